"""What commands print: progress and tables on stderr, results on stdout, JSON into a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from cluster.errors import ConfigError


class Timeline:
    """Prints each start-up phase with the seconds since the command began; one line that counts on a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._started = time.monotonic()
        self._current: str | None = None
        self._percent = -1

    @property
    def elapsed(self) -> float:
        """Seconds since this command began."""
        return time.monotonic() - self._started

    def __call__(self, what: str, share: float = 0.0) -> None:
        """`Progress`: a new phase gets a new line; its share is updated in place where the output is a terminal."""
        percent = int(100 * share)
        terminal = self._out.isatty()
        if what != self._current:
            self._end_line(terminal)
            self._current, self._percent = what, -1
            if not terminal:
                print(self._line(what, 0), file=self._out, flush=True)
        if terminal and percent != self._percent:
            self._percent = percent
            print("\r\033[K" + self._line(what, percent), end="", file=self._out, flush=True)

    def done(self) -> None:
        """Ends a line that is still being counted up."""
        self._end_line(self._out.isatty())
        self._current = None

    def _line(self, what: str, percent: int) -> str:
        return f"{self.elapsed:6.1f} s  {what}" + (f"  {percent} %" if 0 < percent < 100 else "")

    def _end_line(self, terminal: bool) -> None:
        if terminal and self._current is not None:
            print(file=self._out, flush=True)


def check_json_path(path: str | None, flag: str = "--json") -> None:
    """Refuses a file of --json, or of another flag, that cannot be written: before the work and not after it.

    Raises:
        ConfigError: its directory does not exist, or it is a directory itself.
    """
    if path is None:
        return
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise ConfigError(f"{flag} {path}: is a directory; name a file, such as {file / 'out.json'}")
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {path}: no such directory")


def write_json(path: str | None, value: Any) -> None:
    """Writes `value` as JSON into `path`, if there is one."""
    if path is not None:
        Path(path).expanduser().write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Rows with the same keys as aligned columns on stdout."""
    if not rows:
        return
    cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def cell(value: Any) -> str:
    """A number as people read it: thousands separated, as many digits as mean something."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
