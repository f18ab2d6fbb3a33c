"""What guards a run: bad figures stop it before they do harm, signals end it well, sums have one order."""

import math
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from rmdm.errors import TrainingError
from rmdm.training.checkpoint import list_checkpoints
from rmdm.training.distributed import World


def check_finite(step: int, values: list[float], out: Path, section: str = "") -> None:
    """Stop on a loss or gradient that is not a number; the update of that step has not been made."""
    if not all(math.isfinite(value) for value in values):
        kept = list_checkpoints(out)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        raise TrainingError(
            f"step {step + 1}: loss {values[0]}, gradient norm {values[1]}; stopped before the update; {last}; "
            f"try a lower {section}optim.lr or a longer {section}optim.warmup"
        )


@contextmanager
def repeatable(world: World) -> Generator[None]:
    """On a CPU, only operations whose sums have one order: compiled code adds gradients atomically otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or world.device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def signals() -> Generator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the loop can save and leave; a second one of the kind acts at once."""
    caught: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    old = {kind: signal.getsignal(kind) for kind in kinds}

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, old[signal.Signals(number)])

    for kind in kinds:
        signal.signal(kind, handler)
    try:
        yield caught
    finally:
        for kind in kinds:
            signal.signal(kind, old[kind])
