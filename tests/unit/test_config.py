"""One place for settings: YAML, overrides, and what is said about mistakes."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.errors import ConfigError


def test_defaults_need_nothing():
    config = EngineConfig.load()
    assert config.model is None and config.tp_size == 1 and config.page_size == 16


def test_overrides_win_over_the_file_and_none_is_no_override(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("tp_size: 2\npage_size: 4\nnum_pages: null\n")
    config = EngineConfig.load(file, page_size=8, tp_size=None)
    assert (config.tp_size, config.page_size, config.num_pages) == (2, 8, None)
    file.write_text("")
    assert EngineConfig.load(file) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpsize: 2", "tpsize: unknown setting; did you mean tp_size?"),
        ("zzz: 2", "zzz: unknown setting; known: model,"),
        ("tp_size: 0", "tp_size: Input should be greater than or equal to 1 (got 0)"),
        ("cache_type: lru", "cache_type: Input should be 'radix' or 'naive' (got 'lru')"),
        ("- a\n- b", "must hold a mapping of settings, not list"),
        ("a: [", "cannot read config file"),
        ("[" * 5000, "cannot read config file"),
        ("1: 2", "1: unknown setting; known: model,"),
        ("model: ''", "model: String should have at least 1 character"),
        ("step_timeout: .inf", "step_timeout: Input should be less than or equal to 1000000"),
        (
            "executor: inproc\ntp_size: 2",
            "executor: Value error, inproc runs one rank, not tp_size 2; use executor ray",
        ),
        ("attention_backend: flash\ndevice: cpu", "attention_backend: Value error, FlashAttention-4 runs on a GPU"),
        ("api_key: ['']", "api_key: Value error, a key must not be empty"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        EngineConfig.load(file)
    assert message in str(error.value)


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        EngineConfig.parse({"page_size": 0, "overlap_depth": 3, "pagesize": 1})
    assert len(str(error.value).splitlines()) == 3


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read config file"):
        EngineConfig.load(tmp_path / "config.yaml")


def test_keys_are_not_shown():
    with pytest.raises(ConfigError) as error:
        EngineConfig.parse({"api_key": "sk-secret"})
    assert "sk-secret" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read config file"):
        EngineConfig.load(tmp_path / "none.yaml")


def test_immutable():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().tp_size = 2
