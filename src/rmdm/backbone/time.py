"""The time as a condition, for SEDD: sines and cosines of it, through a small network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES, FASTEST = 32, 32.0


class Time(nn.Module):
    """t in (0, 1] to the condition c of a whole row (one group)."""

    frequency: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("frequency", torch.linspace(0.5, FASTEST, FREQUENCIES), persistent=False)
        self.inner = nn.Linear(2 * FREQUENCIES, width)
        self.outer = nn.Linear(width, width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Linear layers at 1/sqrt(fan-in)."""
        for linear in (self.inner, self.outer):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, t_B: Tensor) -> Tensor:
        """The condition c, (B, 1, C)."""
        angle = torch.outer(t_B, self.frequency)
        waves = torch.cat((angle.cos(), angle.sin()), dim=-1).to(self.inner.weight.dtype)
        return F.silu(self.outer(F.silu(self.inner(waves))))[:, None]
