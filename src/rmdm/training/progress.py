"""What a person sees while training: a live bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

QUIET_SECONDS = 10.0


class Progress:
    """A bar with loss, units (tokens or rows) a second and time left; `note` prints a line above it."""

    def __init__(
        self, name: str, first: int, total: int, *, unit: str, enabled: bool, show: Callable[[str], None]
    ) -> None:
        self.enabled, self.show, self.total, self.unit = enabled, show, total, unit
        self.spoke = time.monotonic()
        console = Console(stderr=True)
        self.bar: RichProgress | None = None
        if enabled and console.is_terminal:
            self.bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
                # Lines for the terminal are printed above the bar; those for a file go to the file.
                redirect_stdout=sys.stdout.isatty(),
            )
            self.task = self.bar.add_task(name, total=total, completed=first, figures="")

    def update(self, step: int, *, loss: float, rate: float, seconds_left: float) -> None:
        """Move the bar, or without a terminal print a line now and then."""
        figures = f"loss {loss:.4f}  {human(rate)} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=f"{figures}  {clock(seconds_left)} left")
        elif self.enabled and time.monotonic() - self.spoke > QUIET_SECONDS:
            self.spoke = time.monotonic()
            self.show(f"step {step}/{self.total}  {figures}  {seconds_left:.0f} s left")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self.enabled:
            self.show(text)

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


def clock(seconds: float) -> str:
    """4000 seconds as 1:06:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def human(value: float) -> str:
    """1234567 as 1.23M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
