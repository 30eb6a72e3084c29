"""Ray Serve application: the OpenAI API over an engine. See `build_openai_app`."""

from typing import Any

__all__ = ["build_models_app", "build_openai_app"]


def __getattr__(name: str) -> Any:
    """Imports Ray Serve only for those who build an application."""
    if name in __all__:
        from cluster.serve import app

        return getattr(app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
