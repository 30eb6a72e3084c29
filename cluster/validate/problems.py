"""What is wrong and where: file, line, key, and the nearest right key."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cluster.validate.source import Path, Source, show_path

_LISTED = 12  # known names that an error spells out


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `key` is the path from the top of the file, such as `applications[0].args.tp_size`."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}: {self.message}"


class Problems:
    """Collects the problems of one document; one for each key, the first one wins."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._found: dict[Path, Problem] = {}

    def add(self, path: Path, message: str) -> None:
        if path not in self._found:
            self._found[path] = Problem(self.source.file, self.source.line(path), show_path(path), message)

    def unknown(self, path: Path, name: Any, known: Iterable[str], what: str = "unknown key") -> None:
        """`name`, at `path`, is none of the known ones."""
        self.add(path, f"{what}{suggest(str(name), list(known))}")

    def check_keys(self, path: Path, mapping: dict[Any, Any], known: Collection[str]) -> None:
        """Refuses each key that is not known."""
        for key in mapping:
            if key not in known:
                self.unknown((*path, key), key, known)

    def at_or_below(self, path: Path) -> bool:
        """Whether something is known to be wrong with the value at `path`, or inside it."""
        return any(found[: len(path)] == path for found in self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def sorted(self) -> list[Problem]:
        return sorted(self._found.values(), key=lambda problem: problem.line)


def check_text(problems: Problems) -> None:
    """What is wrong with a document whatever it is about."""
    for path in problems.source.duplicates:
        problems.add(path, "stands twice in one mapping; YAML takes the last")
    for path in problems.source.odd_keys:
        problems.add(path, f"a key must be text, and YAML reads this one as {path[-1]!r}; quote it")


def suggest(name: str, known: Collection[str]) -> str:
    """`; did you mean X?`, or what is known, to be put behind a message."""
    near = nearest(name, known, cutoff=0.6)
    if near is not None:
        return f"; did you mean {near}?"
    names = sorted(known)
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"; known: {', '.join(names[:_LISTED])}{more}" if names else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known name that `name` was probably meant to be; case, `_` and `-` do not count. `cutoff`: see difflib."""
    plain = {_plain(each): each for each in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
