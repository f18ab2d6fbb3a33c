"""The figures of a run: read from the device without making it wait, then written down.

metrics.jsonl is always written, TensorBoard events if asked.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor

from rmdm.errors import ConfigError


class MetricsLog:
    """Appends one JSON object a line; on resume it first drops the lines of steps that will be done again.

    Ranks that do not write hold a log that is not enabled.
    """

    def __init__(self, path: Path, resume_step: int, *, tensorboard: bool, enabled: bool, section: str = "") -> None:
        self.file: TextIO | None = None
        self.writer: Any = None
        if not enabled:
            return
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= resume_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError(
                    f"{section}train.tensorboard=true needs TensorBoard; install it with: pip install tensorboard"
                ) from None
            self.writer = SummaryWriter(str(path.parent / "tensorboard"), purge_step=resume_step)
        self.file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Write one line; `step` counts finished updates."""
        if self.file is not None:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        if self.writer is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(name, value, values["step"])

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for open_file in (self.file, self.writer):
            if open_file is not None:
                open_file.close()


def _step_of(line: str) -> float:
    """Step of a line; a torn line, left by a kill, sorts after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Ledger:
    """Figures of the steps as the device delivers them, a few steps late on a GPU, and their means for each log line.

    A step's figures are (loss, gradient norm, stop requests), summed over ranks, so every rank reads the same ones for
    the same step and all take the same decisions.
    """

    def __init__(
        self, first: int, window: list[list[float]], log_every: int, last: int, units_a_step: int,
        check: Callable[[int, list[float]], None], report: Callable[[int, float, float, float], None],
    ) -> None:  # fmt: skip
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.window, self.log_every, self.last, self.units_a_step = window, log_every, last, units_a_step
        self.check, self.report = check, report
        self.loss, self.stopping = math.nan, False
        self.first = first
        self.resume_clock(first)

    def push(self, step: int, stats: Tensor) -> None:
        """Start copying the figures of a step to the host."""
        if stats.device.type != "cuda":
            self.pending.append((step, stats, None))
            return
        host = torch.empty(stats.shape, dtype=stats.dtype, pin_memory=True)
        host.copy_(stats, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending.append((step, host, event))

    def settle(self, lag: int) -> None:
        """Take in the figures of all but the last `lag` steps; at a log line, report their means and the rate."""
        while len(self.pending) > lag:
            step, stats, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            values = stats.tolist()
            self.check(step, values)
            self.window.append(values[:2])
            self.loss, self.stopping = values[0], self.stopping or values[2] > 0
            done = step + 1
            if done % self.log_every == 0 or done == self.last:
                now = time.perf_counter()
                rate = (done - self.clock_step) * self.units_a_step / max(now - self.clock, 1e-9)
                loss, norm = (sum(column) / len(self.window) for column in zip(*self.window, strict=True))
                self.window = []
                self.report(done, loss, norm, rate)
                self.resume_clock(done)
            elif step == self.first:
                self.resume_clock(done)  # the first step compiles and warms up; rates leave it out

    def resume_clock(self, step: int) -> None:
        """Count time from now on; called after a pause that was no training."""
        self.clock, self.clock_step = time.perf_counter(), step
