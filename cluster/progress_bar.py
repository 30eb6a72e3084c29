"""A bar for `LLM.generate`: finished requests and tokens per second, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class ProgressBar:
    """Counts finished requests and their tokens; shows nothing."""

    def finished(self, tokens: int) -> None:
        """One more request has finished, with so many tokens."""


class RichProgressBar(ProgressBar):
    """Shows them on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn as Bar
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (Bar(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
        self.display = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self.display.add_task("", total=total, rate="")
        self._tokens = 0
        self._start = time.monotonic()

    def finished(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._start, 1e-6)
        self.display.update(self._task, advance=1, rate=f"{rate:.0f} tok/s")


@contextlib.contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[ProgressBar]:
    if not shown or not sys.stderr.isatty():
        yield ProgressBar()
        return
    bar = RichProgressBar(total)
    with bar.display:
        yield bar
