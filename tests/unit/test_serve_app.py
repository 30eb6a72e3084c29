"""What makes an application of settings."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ConfigError
from cluster.serve import build_models_app


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "models"),
        ({"models": []}, "models"),
        ({"models": ["a"]}, "models"),
        ({"models": [{"model": "a/b"}, {"model": "a/b"}]}, "served_model_name"),
        ({"models": [{"served_model_name": "a/b"}, {"served_model_name": "a-b"}]}, "served_model_name"),
        ({"models": [{"model": "a/b", "tp_sise": 2}]}, "did you mean tp_size"),
        ({"tp_size": 0, "models": [{"model": "a/b"}]}, "tp_size"),
    ],
)
def test_mistakes_are_named(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_models_app(args)


def test_a_deployment_for_each_model() -> None:
    from ray.serve._private.build_app import build_app

    args = {"device": "fake", "models": [{"model": "org/one"}, {"model": "org/two", "served_model_name": "2"}]}
    built = build_app(build_models_app(args), name="app")
    assert {deployment.name for deployment in built.deployments} == {"ingress", "engine-org-one", "engine-2"}
