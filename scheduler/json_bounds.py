"""Bounds of a JSON value from outside, before anything walks it by recursion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_values(value: Any, most: int | None = None, most_levels: int | None = None) -> None:
    """Raises ValueError for JSON of more than `most` values, or nested in more than `most_levels` levels."""
    level, depth, count = [value], 0, 1
    while containers := [node for node in level if isinstance(node, dict | list)]:
        count += sum(map(len, containers))
        if most is not None and count > most:
            raise ValueError(f"more than {most} JSON values in it")
        level = [child for node in containers for child in _children(node)]
        depth += bool(level)
        if most_levels is not None and depth > most_levels:
            raise ValueError(f"nested more than {most_levels} levels deep")


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node
