"""A bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_SECONDS = 30.0
"""Between plain lines when stderr is no terminal."""


class Progress:
    """How far tokenising has come: share of the source, text read a second, tokens, time left."""

    def __init__(self, shown: bool, log: Callable[[str], None]) -> None:
        self._shown, self._log = shown, log
        self._bar: RichProgress | None = None
        self._total = self._done = self._text = self._tokens = 0
        self._started = self._line = time.monotonic()

    @contextlib.contextmanager
    def over(self, total: int) -> Generator[None]:
        """Show progress towards `total` source bytes while the context is open."""
        self._total, self._started = max(1, total), time.monotonic()
        self._line = self._started
        console = Console(stderr=True)
        if not (self._shown and console.is_terminal):
            yield
            return
        columns = ("tokenising", BarColumn(), "{task.percentage:3.0f}%", TextColumn("{task.fields[state]}"))
        with RichProgress(*columns, TimeRemainingColumn(), console=console) as self._bar:
            self._task = self._bar.add_task("tokenise", total=self._total, state="")
            yield
            self._bar.update(self._task, completed=self._total)

    def advance(self, consumed: int, text_bytes: int = 0, tokens: int = 0) -> None:
        """Count source bytes read, and the text and tokens they gave (none when they were done in an earlier run)."""
        self._done += consumed
        self._text += text_bytes
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, state=self._state(now))
        elif self._shown and now - self._line > LINE_SECONDS:
            self._line = now
            self._log(f"tokenising: {100 * self._done / self._total:.0f}%, {self._state(now)}")

    def _state(self, now: float) -> str:
        rate = self._text / max(now - self._started, 1e-9)
        return f"{self._text / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s, {self._tokens / 1e6:,.1f}M tokens"
