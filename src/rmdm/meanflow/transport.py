"""Following the flow: from embeddings to z_0, and from noise to embeddings."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

Solver = Callable[[nn.Module, Tensor, float, float, int], Tensor]


@torch.no_grad()
def follow(net: nn.Module, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """From time `start` to `stop` in equal steps, each z_r = z_t - (t - r) u(z_t, r, t) [Paper §3.2]."""
    for t_B, r_B in _intervals(z_BGD, start, stop, steps):
        z_BGD = z_BGD - (t_B - r_B)[:, None, None] * net(z_BGD, r_B, t_B).to(z_BGD.dtype)
    return z_BGD


@torch.no_grad()
def integrate(net: nn.Module, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """The same by Heun's rule on the velocity v(z, t) = u(z, t, t): second order, two evaluations a step."""
    for t_B, r_B in _intervals(z_BGD, start, stop, steps):
        z_BGD = heun(net, z_BGD, t_B, r_B)
    return z_BGD


def heun(net: nn.Module, z_BGD: Tensor, t_B: Tensor, r_B: Tensor) -> Tensor:
    """One step of Heun's rule from t to r, times row by row."""
    gap = (t_B - r_B)[:, None, None]
    v = net(z_BGD, t_B, t_B).to(z_BGD.dtype)
    w = net(z_BGD - gap * v, r_B, r_B).to(z_BGD.dtype)
    return z_BGD - gap / 2 * (v + w)


def guided(net: nn.Module, guide: nn.Module | None, weight: float) -> nn.Module:
    """The network led away from a weaker one; without a guide, itself.

    Where both agree nothing changes; where the weaker one is pulled to places between the data the stronger one mostly
    is too, only less, and going further the same way leads out of them.
    """
    return net if guide is None or weight == 1 else Guided(net, guide, weight)


class Guided(nn.Module):
    """u_guide + weight (u - u_guide)."""

    def __init__(self, net: nn.Module, guide: nn.Module, weight: float) -> None:
        super().__init__()
        self.net, self.guide, self.weight = net, guide, weight

    def forward(self, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        """As a flow's network takes and gives it."""
        return torch.lerp(self.guide(z_BGD, r_B, t_B), self.net(z_BGD, r_B, t_B), self.weight)


def _intervals(z_BGD: Tensor, start: float, stop: float, steps: int) -> list[tuple[Tensor, Tensor]]:
    times = torch.linspace(start, stop, steps + 1, dtype=torch.float64).tolist()
    full = [z_BGD.new_full((len(z_BGD),), time) for time in times]
    return list(pairwise(full))
