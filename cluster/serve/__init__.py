"""Ray Serve application: the OpenAI API over an engine. See `build_openai_app`."""

from typing import Any

__all__ = ["build_openai_app"]


def __getattr__(name: str) -> Any:
    """Imports Ray Serve only for those who build an application."""
    if name == "build_openai_app":
        from cluster.serve.app import build_openai_app

        return build_openai_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
