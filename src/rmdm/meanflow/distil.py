"""Few-step draws learnt from many-step ones.

A velocity field that is followed accurately takes tens of evaluations. Where it leads is a deterministic
function of where it starts, so a network can be taught to get there in one evaluation an interval, with none of the
noise that the targets of the MeanFlow identity have. The flow is followed once from many draws of noise, its states at
t = 0, 1/4, 1/2, 3/4 and 1 are kept, and the network regresses on

    u(z_t, r, t) = (z_t - z_r) / (t - r),   t < r two of these times a quarter, a half or the whole way apart.

Shapes: B rows, S = 5 states of a trajectory, G groups, D dimensions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rmdm.data.order import uniform
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.recipes import T_STREAM
from rmdm.meanflow.transport import integrate

STATES = 5
SUBSTEPS = 8
"""Evaluations of the teacher between two states."""
JUMPS = ((1, 0.5), (2, 0.25), (4, 0.25))
"""(states a step skips ahead, share of the rows that learn such a step)."""


@dataclass(frozen=True)
class JumpBatch:
    """Starts and ends of intervals of the teacher's trajectories."""

    z_BGD: Tensor
    target_BGD: Tensor
    """The average velocity over the interval."""
    t_B: Tensor
    r_B: Tensor

    def to(self, device: torch.device) -> "JumpBatch":
        """Copy to `device`; from pinned memory the copy does not wait."""
        return JumpBatch(*(x.to(device, non_blocking=True) for x in self._tensors()))

    def pin(self) -> "JumpBatch":
        """The same batch in page-locked memory."""
        return JumpBatch(*(x.pin_memory() for x in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.z_BGD, self.target_BGD, self.t_B, self.r_B


class DistilObjective(nn.Module):
    """The training module: regression on the teacher's average velocity."""

    def __init__(self, backbone: FlowNet) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, batch: JumpBatch, per_row: Tensor) -> Tensor:
        """sum over rows of the mean squared error, times `per_row`."""
        return (self.errors(batch) * per_row).sum()

    def errors(self, batch: JumpBatch) -> Tensor:
        """The squared error of each row, averaged over its numbers."""
        u_BGD = self.backbone(batch.z_BGD, batch.r_B, batch.t_B).float()
        return (u_BGD - batch.target_BGD).square().flatten(1).mean(1)


def trajectories(net: nn.Module, noise_BGD: Tensor) -> Tensor:
    """States (B, S, G, D) of the flow from noise to embeddings at equally spaced times."""
    states = [noise_BGD]
    for k in range(STATES - 1):
        states.append(integrate(net, states[-1], k / (STATES - 1), (k + 1) / (STATES - 1), SUBSTEPS))
    return torch.stack(states, dim=1)


def draw_jumps(
    seed: int, step: int, rows_B: NDArray[np.int64], batch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last state of the intervals that rows at these places of the global batch learn."""
    pick_B = uniform(seed, step, T_STREAM, rows_B)
    ahead_B, edge = np.full(len(rows_B), JUMPS[-1][0]), 0.0
    for ahead, share in JUMPS:
        inside = (rows_B >= round(edge * batch)) & (rows_B < round((edge + share) * batch))
        ahead_B, edge = np.where(inside, ahead, ahead_B), edge + share
    first_B = np.floor(pick_B * ((STATES - 1) // ahead_B)).astype(np.int64) * ahead_B
    return first_B, first_B + ahead_B


def jump_batch(states_BSGD: Tensor, first_B: NDArray[np.int64], last_B: NDArray[np.int64]) -> JumpBatch:
    """The batch for these intervals."""
    row_B = torch.arange(len(states_BSGD))
    z, z_end = states_BSGD[row_B, torch.from_numpy(first_B)], states_BSGD[row_B, torch.from_numpy(last_B)]
    t_B, r_B = (torch.from_numpy((edge_B / (STATES - 1)).astype(np.float32)) for edge_B in (first_B, last_B))
    return JumpBatch(z, (z - z_end) / (t_B - r_B)[:, None, None], t_B, r_B)
