"""Errors of `worker/`; `cluster/` maps them into its own tree."""

from __future__ import annotations


class ModelError(ValueError):
    """A checkpoint or a setting that cannot be served: the message names the value, the limit, the way out."""
