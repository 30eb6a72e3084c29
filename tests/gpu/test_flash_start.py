"""When the FlashAttention backend loads its kernel, and when it waits for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from worker.attention import flash_backend
from worker.attention.flash_backend import FlashAttention
from worker.errors import ModelError
from worker.kernels import flash_prefill


class FakePrefill:
    """Takes down what it is asked; `known`: its kernel lies in the disk cache."""

    known, error = False, None

    def __init__(self) -> None:
        self.started, self.calls = False, []

    def start(self) -> None:
        self.started = True
        self.calls.append("start")

    def compile(self, *_shape: object) -> None:
        self.calls.append("compile")

    def compiled_before(self) -> bool:
        return self.known

    def wait(self) -> None:
        self.calls.append("wait")


def start_up(monkeypatch: pytest.MonkeyPatch, required: bool, known: bool, error: Exception | None = None) -> list[str]:
    """What the backend asks of its kernel from its creation until it is ready."""
    monkeypatch.setattr(flash_backend, "FlashPrefill", FakePrefill)
    monkeypatch.setattr(FakePrefill, "known", known)
    monkeypatch.setattr(FakePrefill, "error", error)
    backend = FlashAttention(required)
    backend.pool = SimpleNamespace(k_cache=lambda layer: None, v_cache=lambda layer: None)
    backend.compile(8)
    backend.finish_compiling()
    return backend._flash.calls


def test_a_compiled_kernel_is_loaded_after_the_start(monkeypatch) -> None:
    assert start_up(monkeypatch, required=False, known=True) == ["compile", "start"]


def test_one_to_be_compiled_is_waited_for(monkeypatch) -> None:
    assert start_up(monkeypatch, required=False, known=False) == ["compile", "start", "wait"]


@pytest.mark.parametrize("known", [False, True])
def test_one_that_is_required_is_loaded_at_once(monkeypatch, known) -> None:
    assert start_up(monkeypatch, required=True, known=known) == ["start", "compile", "wait"]


def test_one_that_cannot_be_loaded(monkeypatch) -> None:
    start_up(monkeypatch, required=False, known=False, error=ImportError("broken"))  # the Triton kernel serves
    with pytest.raises(ModelError, match=r"broken.*use attention_backend triton"):
        start_up(monkeypatch, required=True, known=False, error=ImportError("broken"))


def test_what_was_compiled_is_remembered_by_shape(monkeypatch, tmp_path) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(flash_prefill.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(flash_prefill, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def kernel(page_size: int) -> flash_prefill.FlashPrefill:
        cache = torch.empty(3, page_size, 2, 64, dtype=torch.bfloat16)
        flash = flash_prefill.FlashPrefill()
        flash.compile(8, cache, cache)
        return flash

    first = kernel(16)
    assert not first.compiled_before()
    first._marker().touch()
    assert kernel(16).compiled_before() and not kernel(32).compiled_before()
