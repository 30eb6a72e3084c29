"""Which Ray an address means."""

from __future__ import annotations

import socket

import pytest
import ray

from cluster import ray_runtime
from cluster.errors import ConfigError, StartupError


def test_local_is_a_private_ray() -> None:
    assert ray_runtime._find("local") is None


def test_auto_takes_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert ray_runtime._find("auto") == "10.0.0.7:6379"


def test_auto_without_a_cluster_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_runtime, "canonicalize_bootstrap_address", lambda address: None)
    assert ray_runtime._find("auto") is None


def test_auto_does_not_wait_for_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_runtime, "canonicalize_bootstrap_address", lambda address: unused_address())
    assert ray_runtime._find("auto") is None


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":6379", "host:port"])
def test_another_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="local, auto or HOST:PORT"):
        ray_runtime._find(address)


def test_an_address_where_nobody_answers() -> None:
    with pytest.raises(StartupError, match="no Ray answers"):
        ray_runtime._find(unused_address())


@pytest.mark.usefixtures("private_ray")
def test_the_ray_of_this_process_is_used_and_left_alone() -> None:
    runtime = ray_runtime.connect("local", 1)
    assert not runtime.owned
    runtime.close()
    assert ray.is_initialized()


def unused_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
