"""What all benchmarks ask of the machine: its own matrix-product rate, and to be done."""

import time

import numpy as np
import torch


def matmul_rate(device: torch.device, size: int) -> float:
    """Operations a second of a `size`-cubed bf16 product of random matrices, median of 20."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    times = []
    for _ in range(20):
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / float(np.median(times))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU never lags."""
    if device.type == "cuda":
        torch.cuda.synchronize()
