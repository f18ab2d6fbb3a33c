"""A bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 30.0
"""Between plain lines when stderr is no terminal."""


class Bar:
    """How far a long job has come; what it says beside the share done is `state`."""

    verb = "working"

    def __init__(self, shown: bool, log: Callable[[str], None]) -> None:
        self._shown, self._log = shown, log
        self._bar: RichProgress | None = None
        self._total = self._done = 0
        self._started = self._line = time.monotonic()

    @contextlib.contextmanager
    def over(self, total: int) -> Generator[None]:
        """Show progress towards `total` while the context is open."""
        self._total, self._started = max(1, total), time.monotonic()
        self._line = self._started
        console = Console(stderr=True)
        if not (self._shown and console.is_terminal):
            yield
            return
        columns = (self.verb, BarColumn(), "{task.percentage:3.0f}%", TextColumn("{task.fields[state]}"))
        # Lines for the terminal are printed above the bar; those for a file go to the file.
        to_terminal = sys.stdout.isatty()
        with RichProgress(*columns, TimeRemainingColumn(), console=console, redirect_stdout=to_terminal) as self._bar:
            self._task = self._bar.add_task(self.verb, total=self._total, state="")
            yield
            self._bar.update(self._task, completed=self._total)

    def move(self, by: int) -> None:
        """Count work done, and show it."""
        self._done += by
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, state=self.state(now - self._started))
        elif self._shown and now - self._line > LINE_SECONDS:
            self._line = now
            self._log(f"{self.verb}: {100 * self._done / self._total:.0f}%, {self.state(now - self._started)}")

    def state(self, seconds: float) -> str:
        """Figures of the first `seconds`."""
        raise NotImplementedError


class Progress(Bar):
    """How far tokenising has come: share of the source, text read a second, tokens, time left."""

    verb = "tokenising"

    def __init__(self, shown: bool, log: Callable[[str], None]) -> None:
        super().__init__(shown, log)
        self._text = self._tokens = 0

    def advance(self, consumed: int, text_bytes: int = 0, tokens: int = 0) -> None:
        """Count source bytes read, and the text and tokens they gave (none when they were done in an earlier run)."""
        self._text += text_bytes
        self._tokens += tokens
        self.move(consumed)

    def state(self, seconds: float) -> str:
        """Text read, its rate, and tokens."""
        rate = self._text / max(seconds, 1e-9)
        return f"{self._text / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s, {self._tokens / 1e6:,.1f}M tokens"


class RowProgress(Bar):
    """How far a pass over rows has come: rows, rows a second, time left."""

    def __init__(self, verb: str, shown: bool, log: Callable[[str], None]) -> None:
        super().__init__(shown, log)
        self.verb = verb

    def state(self, seconds: float) -> str:
        """Rows, their rate and, where the bar does not show it, the time left."""
        rate = self._done / max(seconds, 1e-9)
        left = "" if self._bar is not None else f", {(self._total - self._done) / max(rate, 1e-9):,.0f} s left"
        return f"{self._done:,} rows, {rate:,.0f} rows/s{left}"
