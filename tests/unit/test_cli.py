"""The command line without an engine: flags, errors before anything heavy, what is printed."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import socket
import subprocess
import sys

import pytest

import cluster
from cluster.cli import build_parser, main
from cluster.cli.application import reachable, startup_error
from cluster.cli.flags import engine_config, parse_model
from cluster.cli.output import Timeline, print_table, write_json
from cluster.cli.serve import check_port_free, signals_raise
from cluster.config import EngineConfig
from cluster.errors import ConfigError, EngineDeadError, ModelLoadError, PlacementError, StartupError
from cluster.llm_stream import RequestOutput
from cluster.logprobs import Logprob
from scheduler.sampling_params import SamplingParams


def parse(*argv: str):
    return build_parser().parse_args(argv)


def test_version_and_help_are_quick_and_import_neither_torch_nor_ray():
    code = (
        "import sys\nfrom cluster.cli import main\n"
        "for args in (['--version'], ['bench', 'throughput', '--help']):\n"
        "    try:\n        main(args)\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in EngineConfig.model_fields:
        assert "--" + name.replace("_", "-") in done.stdout


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["bench", "throughput"], ["bench", "transformers"]])
def test_every_setting_is_a_flag(command):
    args = parse(*command, "--tp-size", "2", "--dtype", "bfloat16", "--overlap-depth", "1", "--step-timeout", "2.5")
    config = engine_config(args)
    assert (config.tp_size, config.dtype, config.overlap_depth, config.step_timeout) == (2, "bfloat16", 1, 2.5)
    assert config.model_fields_set == {"tp_size", "dtype", "overlap_depth", "step_timeout"}


def test_model_as_argument_or_flag():
    assert engine_config(parse("serve", "some/model")).model == "some/model"
    assert engine_config(parse("serve", "--model", "some/model")).model == "some/model"
    assert engine_config(parse("generate", "a prompt", "--model", "some/model")).model == "some/model"
    assert engine_config(parse("serve")).model is None
    with pytest.raises(ConfigError, match="two models"):
        engine_config(parse("serve", "some/model", "--model", "other/model"))


def test_flags_win_over_the_config_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("page_size: 4\nmax_step_tokens: 64\nmodel: from/file\n")
    config = engine_config(parse("serve", "--config", str(file), "--page-size", "8"))
    assert (config.page_size, config.max_step_tokens, config.model) == (8, 64, "from/file")


def test_sampling_flags():
    argv = ["--temperature", "0", "--stop", "a", "--stop", "b", "--stop-token-ids", "3", "--ignore-eos", "--seed", "1"]
    sampling = parse_model(SamplingParams, parse("generate", *argv))
    expected = SamplingParams(temperature=0.0, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, seed=1)
    assert sampling == expected
    assert parse_model(SamplingParams, parse("generate")) == SamplingParams()


def test_sampling_flags_with_parts_are_json():
    argv = ["--logit-bias", '{"5": 1, "7": -2.5}', "--structured-outputs", '{"json": {"type": "object"}}']
    sampling = parse_model(SamplingParams, parse("generate", *argv))
    assert sampling.logit_bias == {5: 1.0, 7: -2.5}
    assert sampling.structured_outputs.text == '{"type": "object"}'


def test_help_shows_json_that_its_flags_take(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--logit-bias", "--structured-outputs"):
        example = re.search(rf"{flag} JSON .*?; such as '(.*?)'", text)[1]
        parse_model(SamplingParams, parse("generate", flag, example))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--logit-bias", "x", "not valid JSON: Expecting value: line 1 column 1 (char 0) (got 'x')"),
        ("--logit-bias", "[1]", "must be a JSON object in braces (got '[1]')"),
        ("--structured-outputs", "[" * 100_000, "not valid JSON: "),
        ("--structured-outputs", '{"regx": "a"}', "regx: unknown setting; did you mean regex?"),
        ("--structured-outputs", '{"regex": "a", "json_object": true}', "give one of json, "),
        ("--structured-outputs", '{"choice": "a"}', "choice: Input should be a valid list (got 'a')"),
    ],
)
def test_wrong_json_of_a_flag(flag, value, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "x", flag, value])
    assert end.value.code == 2
    assert f"argument {flag}: " in (error := capsys.readouterr().err) and message in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--page-size", "0"], "page_size: Input should be greater than or equal to 1 (got 0)"),
        (["serve", "--model", "/no/such/dir"], "no such directory"),
        (["serve", ""], "model: String should have at least 1 character"),
        (["serve", "--config", "/no/such/file"], "cannot read config file"),
        (["generate", "x", "--temperature", "-1", "--top-p", "0"], "temperature: "),
        (["generate", "x", "--json", "/no/such/dir/out.json"], "no such directory"),
        (["generate", "x", "--json", "/usr"], "--json /usr: is a directory; name a file, such as /usr/out.json"),
        (["simulate", "--calibrate", "/usr"], "--calibrate /usr: is a directory"),
        (["bench", "throughput", "--executor", "inproc", "--profile", "/usr"], "--profile /usr: is a directory"),
        (["generate", "x", "--logit-bias", '{"x": 1}'], "logit_bias.x.[key]: Input should be a valid integer"),
        (["generate", "x", "--logit-bias", '{"5": 101}'], "logit_bias of token 5 is 101.0; it must lie in -100..100"),
        (["bench", "throughput", "--min-len", "9", "--max-len", "8"], "--min-len 9 must not exceed --max-len 8"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_one_message(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("raydix: error: ") and message in error and "Traceback" not in error


@pytest.mark.parametrize(
    "argv", [["serve", "--tpsize", "2"], ["serve", "--port", "99999"], ["serve", "--cache-type", "x"], ["x"], []]
)
def test_argparse_mistakes_end_with_exit_code_2(argv):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2


def test_no_prompts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n"))
    assert main(["generate"]) == 2
    assert "no prompts" in capsys.readouterr().err


class FixedLLM:
    """Stands for `LLM`: the second prompt of three fails."""

    def __init__(self, **config):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def generate(self, prompts, sampling):
        scored = [{7: Logprob(-0.5, 1), 8: Logprob(-math.inf, 2)}]
        fine = RequestOutput([1], [7], "seven", "length", 0, logprobs=scored, prompt_logprobs=[None])
        failed = RequestOutput([1], [], "", "error", 0, error="it outgrew the KV cache", logprobs=[])
        return [failed if index == 1 else fine for index in range(len(prompts))]


@pytest.mark.parametrize(("prompts", "code"), [(["a"], 0), (["a", "b", "c"], 1)], ids=["fine", "one fails"])
def test_a_failed_request_is_exit_code_1_and_named(prompts, code, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cluster, "LLM", FixedLLM)
    assert main(["generate", "--json", str(tmp_path / "out.json"), *prompts]) == code
    printed = capsys.readouterr()
    assert printed.out.count("seven") == len(prompts) - code
    assert printed.err == "raydix: error: prompt 1: it outgrew the KV cache\n" * code
    outputs = json.loads((tmp_path / "out.json").read_text())["outputs"]
    assert [output["error"] for output in outputs] == [None, "it outgrew the KV cache", None][: len(prompts)]
    assert outputs[0]["logprobs"] == [{"7": {"logprob": -0.5, "rank": 1}, "8": {"logprob": -9999.0, "rank": 2}}]
    assert outputs[0]["prompt_logprobs"] == [None]


@pytest.mark.parametrize("tokenizer", [None, "[]"])
def test_serving_needs_a_tokenizer(tokenizer, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_taken_port_is_found_before_anything_heavy(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    check_port_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen"):
        check_port_free("203.0.113.1", port)  # an address of nobody (RFC 5737)


def test_signals_raise_and_are_given_back():
    class Stop(BaseException):
        pass

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stop), signals_raise(Stop) as take:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a library would
        take()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import signal; from cluster.cli.serve import StopRequested, signals_raise\n"
        "with signals_raise(StopRequested):\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    finally: signal.raise_signal(signal.SIGINT); print('not reached', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")


def test_a_signal_that_a_c_function_turned_into_another_error_is_still_the_signal():
    class Stop(BaseException):
        pass

    with pytest.raises(Stop) as caught, signals_raise(Stop):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stop as stop:
            raise SystemError("returned a result with an exception set") from stop
    assert isinstance(caught.value.__cause__, SystemError)
    with pytest.raises(SystemError), signals_raise(Stop):
        raise SystemError


def test_startup_error_takes_the_cause_out_of_a_remote_traceback():
    text = (
        "The deployment failed to start 1 times.\nTraceback (most recent call last):\n"
        '  File "engine.py", line 1, in start\n    raise ModelLoadError(x)\n'
        "cluster.errors.ModelLoadError: lm_head.weight is missing\nin model.safetensors"
    )
    error = startup_error(text)
    assert type(error) is ModelLoadError and str(error) == "lm_head.weight is missing\nin model.safetensors"
    placement = startup_error("ray.exceptions.X: y\ncluster.errors.PlacementError: asked for 4")
    assert type(placement) is PlacementError and str(placement) == "asked for 4"
    assert type(startup_error("ValueError: something else")) is StartupError
    assert type(startup_error("cluster.errors.EngineDeadError: rank 0 died")) is EngineDeadError


def test_reachable_address():
    assert [reachable(host) for host in ("0.0.0.0", "::1", "10.0.0.5")] == ["127.0.0.1", "[::1]", "10.0.0.5"]


def test_timeline_prints_each_phase_once():
    out = io.StringIO()
    timeline = Timeline(out)
    for share in (0.0, 0.5, 1.0):
        timeline("loading", share)
    timeline("ready")
    timeline.done()
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == ["loading", "ready"]


def test_timeline_counts_up_on_a_terminal():
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    timeline = Timeline(out)
    for share in (0.0, 0.5, 0.504):
        timeline("loading", share)
    timeline("ready")
    timeline.done()
    assert out.getvalue().count("\n") == 2 and out.getvalue().count("50 %") == 1


def test_tables_and_json(tmp_path, capsys):
    print_table([{"name": "a", "tokens": 12345, "us": 1.23456}, {"name": "bb", "tokens": 1, "us": 12345.6}])
    assert capsys.readouterr().out.splitlines() == [
        "name  tokens      us",
        "   a  12,345   1.235",
        "  bb       1  12,346",
    ]
    write_json(None, {})
    write_json(str(tmp_path / "out.json"), {"text": "日本"})
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"text": "日本"}


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("raydix ")
