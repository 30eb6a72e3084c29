"""Start-up progress: one callable type, so that phases can be shown, logged, or ignored."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""`progress(what, share)`: what is being done and how much of it is done, 0..1."""


def no_progress(what: str, share: float) -> None:
    """Ignores progress."""
