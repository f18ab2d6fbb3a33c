"""What guards a run: one process has it, bad figures do no harm, signals end it well, sums have one order."""

import math
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from rmdm.errors import TrainingError
from rmdm.links import own_name
from rmdm.locks import locked
from rmdm.training.checkpoint import list_checkpoints
from rmdm.training.distributed import World

LOCK = ".lock"
_HELD: set[Path] = set()
"""Runs that this process holds."""


@contextmanager
def alone(out: Path, world: World) -> Generator[None]:
    """Hold a run, which two processes would spoil for each other; all ranks call this, and rank 0 holds it for them.

    Within another `alone` of the same run it does nothing. A folder that is made for it goes again if it stays empty.
    """
    rest = "wait for it, end it, or choose another --out"
    with _holding(out, world, rest, shared=False):
        yield


@contextmanager
def unchanged(run: Path, world: World) -> Generator[None]:
    """Hold a run whose flow this one is trained with: others may do so too, and none may train it meanwhile."""
    with _holding(run, world, "wait for it, or end it", shared=True):
        yield


@contextmanager
def _holding(run: Path, world: World, remedy: str, *, shared: bool) -> Generator[None]:
    refused, whole = None, own_name(run)

    def refuse(who: str) -> None:
        raise TrainingError(f"{run} is in use by another process ({who}); {remedy}")

    with ExitStack() as held:
        if world.is_main and whole not in _HELD:
            if not shared:
                held.enter_context(_made(run))
            try:
                held.enter_context(locked(run / LOCK, refuse, shared=shared))
            except TrainingError as error:
                refused = str(error)
            _HELD.add(whole)
            held.callback(_HELD.discard, whole)
        refused = world.broadcast(refused)
        if refused is not None:
            raise TrainingError(refused)
        yield


@contextmanager
def _made(folder: Path) -> Generator[None]:
    """Make a folder, and remove it if nothing was put there."""
    new: list[Path] = []
    with suppress(OSError):  # whoever must write there will say so
        new += [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for one in new:
                one.rmdir()


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
    """Collects SIGINT, SIGTERM and SIGHUP, so that the loop can save and leave; a second one of the kind acts at once.

    But not a second SIGHUP: of a closed terminal both the system and the shell tell. Under nohup there is none at all.
    """
    caught: list[int] = []
    kinds = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    old = {kind: signal.getsignal(kind) for kind in kinds}

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else old[signal.Signals(number)])

    for kind in kinds:
        signal.signal(kind, handler)
    try:
        yield caught
    finally:
        for kind in kinds:
            signal.signal(kind, old[kind])
