"""What the machine itself can do, measured in the same run as everything it is compared with.

The floor of a piece of work is the time its needed operations take at the machine's own rate of matrix products, or the
time its needed bytes take at its own rate of copying, whichever is longer.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal

import torch

from rmdm import precision
from rmdm.hub import device_name

MATMUL = {"cuda": 8192, "cpu": 512}
"""Side of the random matrices that are multiplied."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Bytes of the buffer that is copied."""
SETTLING = {"cuda": 1.5, "cpu": 0.0}
"""Seconds of products before those that count. At its power limit a GPU lowers its clocks within a second, for products
as for all else that is measured here, which takes seconds too."""


@dataclass(frozen=True)
class Machine:
    """A device and its own two rates."""

    device: torch.device
    matmul: float
    """Operations a second of a large matrix product, as long as one likes."""
    copy: float
    """Bytes a second of a large copy, read and written ones together."""
    size: int
    """Side of the matrices."""
    first_matmul: float | None = None
    """Operations a second of the first such products, before the clocks are lowered."""
    dtype: torch.dtype = torch.float32
    """Of the numbers that are multiplied: what the work is done in that is compared with it."""

    @staticmethod
    def measure(device: torch.device, size: int | None = None, dtype: torch.dtype | None = None) -> "Machine":
        """Both rates, now; for networks that write or embed unless a precision is named."""
        size, dtype = size or MATMUL.get(device.type, MATMUL["cpu"]), dtype or precision.dtype(device)
        copied = COPIED.get(device.type, COPIED["cpu"])
        first, matmul = matmul_rates(device, size, dtype)
        return Machine(device, matmul, copy_rate(device, copied), size, first, dtype)

    @property
    def facts(self) -> dict[str, Any]:
        """What is written beside every figure."""
        return {
            "matmul_per_s": self.matmul, "first_matmul_per_s": self.first_matmul, "matmul_size": self.size,
            "copy_bytes_per_s": self.copy,
        } | facts(self.device, self.dtype)  # fmt: skip

    def __str__(self) -> str:
        at_first = f" ({spoken(self.first_matmul, 'FLOP/s')} at first)" if SETTLING.get(self.device.type) else ""
        return (
            f"{device_name(self.device)}, torch {torch.__version__}, {precision.named(self.dtype)} product of "
            f"{self.size} cubed {spoken(self.matmul, 'FLOP/s')}{at_first}, copy {spoken(self.copy, 'B/s')}"
        )


@dataclass(frozen=True)
class Floor:
    """Operations and bytes that a piece of work cannot do without."""

    operations: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The least time it takes there."""
        return max(self.operations / machine.matmul, self.bytes / machine.copy)

    def limit(self, machine: Machine) -> Literal["operations", "bytes"]:
        """Which of the two takes longer."""
        return "operations" if self.operations / machine.matmul >= self.bytes / machine.copy else "bytes"

    def figures(self, machine: Machine, seconds: float) -> dict[str, Any]:
        """What a row says of its floor, the work having taken `seconds`."""
        floor = self.seconds(machine)
        return {
            "needed_operations": self.operations, "needed_bytes": self.bytes, "floor_seconds": floor,
            "floor_limit": self.limit(machine), "times_the_floor": seconds / floor,
            "share_of_matmul_rate": self.operations / seconds / machine.matmul,
        }  # fmt: skip


def matmul_rates(device: torch.device, size: int, dtype: torch.dtype, repeats: int = 20) -> tuple[float, float]:
    """Operations a second of a `size`-cubed product of random matrices, at first and once the clocks have settled."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    began = time.perf_counter()
    seconds = [median_seconds(device, lambda: a @ b, repeats)]
    while time.perf_counter() - began < SETTLING.get(device.type, 0.0):
        seconds.append(median_seconds(device, lambda: a @ b, repeats))
    return 2 * size**3 / seconds[0], 2 * size**3 / seconds[-1]


def copy_rate(device: torch.device, size: int, repeats: int = 20) -> float:
    """Bytes a second, read plus written, of copying a buffer of `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / median_seconds(device, lambda: target.copy_(source), repeats)


def median_seconds(device: torch.device, work: Callable[[], object], repeats: int, warmup: int = 5) -> float:
    """Seconds of `work`, the median of several; on a GPU by its own clock."""
    for _ in range(warmup):
        work()
    if device.type != "cuda":
        return median(timed(device, work) for _ in range(repeats))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) / 1e3 for start, end in events)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of `work`, until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU never lags."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Begin to watch the most memory held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most memory torch held on the GPU since `forget_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def release(device: torch.device) -> None:
    """Give back the memory that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clear(device: torch.device) -> None:
    """Let go of what an arm compiled and held, so that the next one begins as the first did."""
    if device.type == "cuda":
        torch._dynamo.reset()
    release(device)


def facts(device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Where and when a figure was taken, of networks that write unless a precision is named."""
    return {
        "device": device_name(device),
        "precision": precision.named(dtype or precision.dtype(device)),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def spoken(value: float | None, unit: str) -> str:
    """A large number with the letter of its thousands; `-` for none."""
    if value is None:
        return "-"
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def memory(value: float | None) -> str:
    """Bytes for a table; `-` for none."""
    if value is None:
        return "-"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
