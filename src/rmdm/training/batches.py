"""Batches for each step, built ahead by a thread while the device works."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from rmdm.data.order import rows_of_step
from rmdm.data.shards import TokenRows
from rmdm.errors import ConfigError, DataError
from rmdm.processes import Batch, Draw, Process


@dataclass(frozen=True)
class Step:
    """What this rank does in one optimiser step."""

    step: int
    micro: list[Batch]
    tokens: int
    """Positions of this rank that count in the loss."""


@dataclass(frozen=True)
class Plan:
    """How the rows of a step are dealt: row b goes to rank b mod size, and there to micro-batch (b // size) mod m.

    Dealing rows out in turn spreads the strata of t evenly over ranks and micro-batches.
    """

    seed: int
    batch: int
    rank: int
    size: int
    micro_batch: int

    @staticmethod
    def make(seed: int, batch: int, rank: int, size: int, micro_batch: int | None) -> "Plan":
        """Check that the batch divides, and fill in the default micro-batch (a rank's whole share)."""
        if batch % size:
            raise ConfigError(f"train.batch={batch} does not divide over {size} ranks; use a multiple of {size}")
        share = batch // size
        micro = min(micro_batch or share, share)
        if share % micro:
            good = next(m for m in range(micro, 0, -1) if share % m == 0)
            raise ConfigError(f"train.micro_batch={micro} does not divide a rank's {share} rows; use {good}")
        return Plan(seed, batch, rank, size, micro)

    def places(self) -> list[np.ndarray]:
        """Places in the global batch of each micro-batch's rows."""
        mine = np.arange(self.rank, self.batch, self.size)
        count = len(mine) // self.micro_batch
        return [mine[m::count] for m in range(count)]


def build_step(step: int, plan: Plan, rows: TokenRows, process: Process, mask_id: int, pad_in_loss: bool) -> Step:
    """All micro-batches of one step: a function of (seed, step) and the plan, of nothing else."""
    order = rows_of_step(plan.seed, step, plan.batch, len(rows))
    micro, tokens = [], 0
    for places in plan.places():
        x_BL = rows.take(order[places])
        if x_BL.max() >= mask_id:
            raise DataError(f"{rows.folder} holds token {x_BL.max()}, past its vocabulary; delete and prepare it again")
        counted_BL = counted(rows, order[places], pad_in_loss)
        micro.append(process.batch(x_BL, counted_BL, mask_id, Draw(plan.seed, step, places, plan.batch)))
        tokens += int(counted_BL.sum())
    return Step(step, micro, tokens)


def counted(rows: TokenRows, indices: np.ndarray, pad_in_loss: bool) -> np.ndarray:
    """Positions (B, L) that enter the loss: all of them, or all but the padding that follows a row's text."""
    if pad_in_loss:
        return np.ones((len(indices), rows.length), dtype=bool)
    return np.arange(rows.length) < rows.lengths(indices)[:, None]


class Prefetcher:
    """Iterates over steps first..last-1, building a few ahead in a thread; errors come out where they are awaited."""

    def __init__(
        self,
        first: int,
        last: int,
        plan: Plan,
        rows: TokenRows,
        process: Process,
        *,
        mask_id: int,
        pad_in_loss: bool,
        pin: bool,
        depth: int = 3,
    ) -> None:
        self.queue: queue.Queue[Step | BaseException | None] = queue.Queue(maxsize=depth)
        self.stop = threading.Event()

        def work() -> None:
            try:
                for step in range(first, last):
                    built = build_step(step, plan, rows, process, mask_id, pad_in_loss)
                    if pin:
                        built = Step(built.step, [b.pin() for b in built.micro], built.tokens)
                    if not self._put(built):
                        return
                self._put(None)
            except BaseException as error:
                self._put(error)

        self.thread = threading.Thread(target=work, name="rmdm-batches", daemon=True)
        self.thread.start()

    def _put(self, item: Step | BaseException | None) -> bool:
        while not self.stop.is_set():
            try:
                self.queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Step]:
        while (item := self.queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        self.thread.join()
