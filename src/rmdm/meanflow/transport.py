"""Following the flow: from embeddings to z_0, and from noise to embeddings."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""u(z, r, t): a flow's network, or what stands for it."""
Solver = Callable[[Velocity, Tensor, float, float, int], Tensor]
Rule = dict[int, tuple[float, ...]]
PREDICT: Rule = {1: (1.0,), 2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12)}
"""Adams-Bashforth: weights of the velocities at the times before an interval, by their number; the newest in front."""
CORRECT: Rule = {2: (1 / 2, 1 / 2), 3: (5 / 12, 8 / 12, -1 / 12)}
"""Adams-Moulton: the same with the velocity at the interval's end in front."""


@torch.no_grad()
def follow(net: Velocity, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """From time `start` to `stop` in equal steps, each z_r = z_t - (t - r) u(z_t, r, t) [Paper §3.2]."""
    for t_B, r_B in _intervals(z_BGD, start, stop, steps):
        z_BGD = z_BGD - (t_B - r_B)[:, None, None] * net(z_BGD, r_B, t_B).to(z_BGD.dtype)
    return z_BGD


@torch.no_grad()
def integrate(net: Velocity, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """The same by Adams's rules on the velocity v(z, t) = u(z, t, t): third order, one evaluation a step.

    The velocity is asked for at `steps` equally spaced times, both ends among them. To the next time goes first what
    the last three velocities foretell; with the velocity found there the way to it is gone anew, so that predictor and
    corrector share an evaluation. Two evaluations are a step of Heun's rule, one is Euler's.
    """
    known: list[Tensor] = []  # the newest in front
    for t_B, r_B in _intervals(z_BGD, start, stop, max(steps - 1, 1)):
        gap = (r_B - t_B)[:, None, None]
        known = known or [net(z_BGD, t_B, t_B).to(z_BGD.dtype)]
        ahead_BGD = z_BGD + gap * _mean(PREDICT, known)
        if steps == 1:
            return ahead_BGD
        known = [net(ahead_BGD, r_B, r_B).to(z_BGD.dtype), *known[:2]]
        z_BGD = z_BGD + gap * _mean(CORRECT, known)
    return z_BGD


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


def _mean(rule: Rule, known: list[Tensor]) -> Tensor:
    """The mean velocity over an interval, by a rule for so many known ones."""
    first, *others = (weight * v for weight, v in zip(rule[len(known)], known, strict=True))
    return sum(others, start=first)


def _intervals(z_BGD: Tensor, start: float, stop: float, steps: int) -> list[tuple[Tensor, Tensor]]:
    times = torch.linspace(start, stop, steps + 1, dtype=torch.float64).tolist()
    full = [z_BGD.new_full((len(z_BGD),), time) for time in times]
    return list(pairwise(full))
