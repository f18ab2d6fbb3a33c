"""The length of z_0: a monotone map that gives |z| the chi law it has under N(0, I).

Shapes: n rows, P knots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KNOTS, ROWS_A_KNOT = 64, 32


@dataclass(frozen=True)
class Radial:
    """Moves each row along its own direction: |z| goes from `source_P` to `target_P`, straight in between."""

    source_P: Tensor
    target_P: Tensor

    @staticmethod
    def fit(length_n: Tensor, axes: int) -> "Radial | None":
        """Quantiles of these lengths to those of the chi law of `axes` numbers; None from too few rows."""
        knots = min(KNOTS, len(length_n) // ROWS_A_KNOT)
        if knots < 2:
            return None
        share_P = (torch.arange(knots, dtype=torch.float64) + 0.5) / knots
        source_P = torch.quantile(length_n.double().cpu(), share_P)
        if not bool((source_P.diff() > 0).all()):
            return None
        return Radial(source_P, chi_quantile(share_P, axes))

    def apply(self, z_nGD: Tensor) -> Tensor:
        """The rows with their new lengths; beyond the outermost knots lengths are scaled as there."""
        source_P, target_P = self.source_P.to(z_nGD.device), self.target_P.to(z_nGD.device)
        length_n = z_nGD.double().flatten(1).norm(dim=1)
        at_n = torch.searchsorted(source_P, length_n).clamp(1, len(source_P) - 1)
        low, high = source_P[at_n - 1], source_P[at_n]
        within_n = target_P[at_n - 1] + (target_P[at_n] - target_P[at_n - 1]) * (length_n - low) / (high - low)
        below_n, above_n = (length_n * target_P[k] / source_P[k] for k in (0, -1))
        outside_n = torch.where(length_n < source_P[0], below_n, above_n)
        inside_n = (length_n >= source_P[0]) & (length_n <= source_P[-1])
        factor_n = torch.where(inside_n, within_n, outside_n) / length_n.clamp_min(1e-12)
        return z_nGD * factor_n.to(z_nGD)[:, None, None]


def chi_quantile(share_P: Tensor, axes: int) -> Tensor:
    """Lengths of N(0, I) in `axes` dimensions that this share of the rows lies below, by bisection."""
    low_P, high_P = torch.zeros_like(share_P), torch.full_like(share_P, 2 * axes**0.5 + 10)
    half = torch.tensor(axes / 2, dtype=torch.float64)
    for _ in range(60):
        middle_P = (low_P + high_P) / 2
        is_below = torch.special.gammainc(half, middle_P**2 / 2) < share_P
        low_P, high_P = torch.where(is_below, middle_P, low_P), torch.where(is_below, high_P, middle_P)
    return (low_P + high_P) / 2
