"""Following the flow: from embeddings to z_0, and from noise to embeddings."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def follow(net: nn.Module, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """Walk from time `start` to `stop` in equal steps, each z_r = z_t - (t - r) u(z_t, r, t) [Paper §3.2]."""
    times = torch.linspace(start, stop, steps + 1, dtype=torch.float64).tolist()
    for t, r in zip(times, times[1:], strict=False):
        u = net(z_BGD, z_BGD.new_full((len(z_BGD),), r), z_BGD.new_full((len(z_BGD),), t))
        z_BGD = z_BGD - (t - r) * u.to(z_BGD.dtype)
    return z_BGD


@torch.no_grad()
def integrate(net: nn.Module, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """The same walk by Heun's rule on the velocity v(z, t) = u(z, t, t): two evaluations a step, second order."""
    times = torch.linspace(start, stop, steps + 1, dtype=torch.float64).tolist()
    for t, r in zip(times, times[1:], strict=False):
        here, there = z_BGD.new_full((len(z_BGD),), t), z_BGD.new_full((len(z_BGD),), r)
        v = net(z_BGD, here, here).to(z_BGD.dtype)
        w = net(z_BGD - (t - r) * v, there, there).to(z_BGD.dtype)
        z_BGD = z_BGD - (t - r) / 2 * (v + w)
    return z_BGD
