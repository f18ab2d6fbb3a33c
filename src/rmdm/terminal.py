"""`rmdm sample --show`: denoising as it happens, drawn on standard error so that standard output keeps the texts."""

import sys
import time
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from rmdm.data.tokenizer import Tokenizer

BLOCK, END = "░░", "¶"
"""A position that is masked, and the end of a document."""
PLAIN_BLOCK, PLAIN_END = "__", "|"
"""The same where the terminal's encoding lacks these."""
PAUSE, SECONDS = 0.15, 5.0
"""A frame stays for at least PAUSE seconds, less where all frames would then take more than SECONDS."""
PLAIN_FRAMES = 5
"""Frames printed where there is no terminal."""


class Frames:
    """A callback for samplers: masked positions as dim blocks, new tokens lit up for one frame, given ones bold."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start_L: NDArray[np.int64],
        steps: int,
        console: Console | None = None,
        shown: slice | None = None,
    ):
        """`shown` are the positions of the text itself, where a row holds more."""
        self.shown = shown or slice(None)
        self.tokenizer, self.start_L, self.steps = tokenizer, start_L[self.shown], steps
        self.console = console or Console(file=sys.stderr)
        can_show = is_in(BLOCK + END, self.console.encoding)
        self.block, self.end = (BLOCK, END) if can_show else (PLAIN_BLOCK, PLAIN_END)
        self.before_BL: NDArray[np.int64] | None = None
        self.pause = min(PAUSE, SECONDS / max(steps, 1))
        draws = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if draws else None
        self.drawn = 0.0

    def __enter__(self) -> "Frames":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, step: int, x_BL: Tensor) -> None:
        """Draw the rows as they are after a step."""
        rows_BL = x_BL.cpu().numpy()[:, self.shown].copy()
        counter = f"step {step + 1:>{len(str(self.steps))}}/{self.steps}"
        if self.live is not None:
            lines = [part for line in self.render(rows_BL) for part in (Text(""), line)]
            time.sleep(max(0.0, self.drawn + self.pause - time.monotonic()))
            self.live.update(Group(Text(counter, style="dim"), *lines), refresh=True)
            self.drawn = time.monotonic()
        elif step + 1 in plain_steps(self.steps):
            for line in self.render(rows_BL):
                print(f"{counter}  {' '.join(line.plain.split())}", file=self.console.file, flush=True)
        self.before_BL = rows_BL

    def render(self, x_BL: NDArray[np.int64]) -> list[Text]:
        """One styled line a row."""
        before_BL = self.before_BL if self.before_BL is not None else np.broadcast_to(self.start_L, x_BL.shape)
        texts, edges = self.tokenizer.spans(x_BL)
        lines = []
        for x_L, before_L, text, edge in zip(x_BL, before_BL, texts, edges, strict=True):
            line = Text()
            for place, token in enumerate(x_L.tolist()):
                if token == self.tokenizer.mask_id:
                    line.append(f" {self.block}" if line.plain else self.block, style="dim")
                    continue
                if token == self.tokenizer.separator_id:
                    line.append(f" {self.end} ", style="dim")
                    continue
                is_given = self.start_L[place] != self.tokenizer.mask_id
                style = "bold" if is_given else "bold green" if token != before_L[place] else ""
                piece = text[edge[place] : edge[place + 1]]
                # No space is written before a text's first word, but a block may stand there.
                space = " " if piece and line.plain and edge[place] == 0 else ""
                line.append(f"{space}{piece}", style=style)
            lines.append(line)
        return lines


def is_in(text: str, encoding: str) -> bool:
    """Whether an encoding has every sign of a text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def plain_steps(steps: int) -> set[int]:
    """The steps after which a frame is printed where there is no terminal: evenly spread, the last among them."""
    return {max(1, round(steps * frame / PLAIN_FRAMES)) for frame in range(1, PLAIN_FRAMES + 1)}
