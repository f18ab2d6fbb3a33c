"""The steps of a run: how the rows of a step are dealt to ranks, and steps built ahead while the device works."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from rmdm.errors import ConfigError


class Batch(Protocol):
    """What a training module takes: tensors that move together."""

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`; from pinned memory the copy does not wait."""
        ...

    def pin(self) -> "Batch":
        """The same batch in page-locked memory."""
        ...


@dataclass(frozen=True)
class Step:
    """What this rank does in one optimiser step."""

    step: int
    micro: Sequence[Batch]
    counted: int
    """Units (tokens or rows) of this rank that count in the loss; the loss is the mean over those of all ranks."""


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
    def make(
        seed: int, batch: int, rank: int, size: int, micro_batch: int | None, section: str = "", most: int | None = None
    ) -> "Plan":
        """Check that the batch divides, and fill in the default micro-batch: a rank's whole share, or about `most`."""
        if batch % size:
            raise ConfigError(
                f"{section}train.batch={batch} does not divide over {size} ranks; use a multiple of {size}"
            )
        share = batch // size
        if micro_batch is None and most is not None:
            near = [m for m in range(min(most, share), most // 4, -1) if share % m == 0]
            micro_batch = near[0] if near else None
        micro = min(micro_batch or share, share)
        if share % micro:
            good = next(m for m in range(micro, 0, -1) if share % m == 0)
            raise ConfigError(f"{section}train.micro_batch={micro} does not divide a rank's {share} rows; use {good}")
        return Plan(seed, batch, rank, size, micro)

    def places(self) -> list[np.ndarray]:
        """Places in the global batch of each micro-batch's rows."""
        mine = np.arange(self.rank, self.batch, self.size)
        count = len(mine) // self.micro_batch
        return [mine[m::count] for m in range(count)]


class Prefetcher:
    """Iterates over steps first..last-1, building a few ahead in a thread; errors come out where they are awaited."""

    def __init__(self, first: int, last: int, build: Callable[[int], Step], *, pin: bool, depth: int = 3) -> None:
        self.queue: queue.Queue[Step | BaseException | None] = queue.Queue(maxsize=depth)
        self.stop = threading.Event()

        def work() -> None:
            try:
                for step in range(first, last):
                    built = build(step)
                    if pin:
                        built = replace(built, micro=[batch.pin() for batch in built.micro])
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
