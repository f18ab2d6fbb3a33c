"""Where the time of a piece of work goes, operation by operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rmdm.bench.machine import synchronize


def begin_profile(path: Path | None) -> None:
    """Empty the file, before anything is measured, so that one that cannot be written is told at once."""
    if path is not None:
        path.write_text("", encoding="utf-8")


@contextmanager
def profiled(device: torch.device, title: str, path: Path) -> Iterator[None]:
    """Append a table of the operations that took longest to a file."""
    with torch.profiler.profile() as profiler:
        yield
        synchronize(device)
    sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=sort, row_limit=100, max_name_column_width=90)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{title}\n{table}\n")
