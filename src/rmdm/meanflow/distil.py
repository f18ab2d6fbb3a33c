"""Few-step maps learnt from many-step ones.

A velocity field followed by Heun's rule is accurate and takes tens of evaluations. Its end points are a deterministic
function of the start, so a network can be taught to reach them in one evaluation an interval, with none of the noise
that the targets of the MeanFlow identity have:

    target u(z_t, r, t) = (z_t - z_r) / (t - r),   z_r from z_t by Heun's rule on the teacher
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rmdm.backbone.noise import normal
from rmdm.data.order import uniform
from rmdm.meanflow.affine import Affine, Enter
from rmdm.meanflow.loss import NOISE_STREAM, FlowBatch
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.paths import Path
from rmdm.meanflow.recipes import T_STREAM
from rmdm.meanflow.transport import heun

JUMPS = ((4, 0.5, 4), (2, 0.25, 4), (1, 0.25, 8))
"""(steps of the whole way, share of the rows that learn such a step, Heun steps of the teacher within it)."""


def draw_jumps(
    seed: int, step: int, rows_B: NDArray[np.int64], batch: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Starts t and ends r > t of the intervals that rows at these places of the global batch learn."""
    pick_B = uniform(seed, step, T_STREAM, rows_B)
    steps_B, edge = np.ones(len(rows_B)), 0.0
    for steps, share, _ in JUMPS:
        inside = (rows_B >= round(edge * batch)) & (rows_B < round((edge + share) * batch))
        steps_B, edge = np.where(inside, steps, steps_B), edge + share
    t_B = np.floor(pick_B * steps_B) / steps_B
    return t_B.astype(np.float32), (t_B + 1 / steps_B).astype(np.float32)


class DistilObjective(nn.Module):
    """The training module: the student `backbone` regresses on where the frozen teacher leads."""

    def __init__(self, backbone: FlowNet, teacher: FlowNet, path: Path, enter: Affine | None = None) -> None:
        super().__init__()
        self.backbone, self.path, self.enter = backbone, path, Enter(enter)
        self.teacher = teacher.requires_grad_(False)

    def forward(self, batch: FlowBatch, per_row: Tensor) -> Tensor:
        """sum over rows of the mean squared error, times `per_row`."""
        return (self.errors(batch) * per_row).sum()

    def errors(self, batch: FlowBatch) -> Tensor:
        """The squared error of each row, averaged over its numbers."""
        e, t_B, r_B = self.enter(batch.e_BGD), batch.t_B, batch.r_J
        z = self.path.at(normal(batch.noise_key_B, tuple(e.shape[1:]), NOISE_STREAM), e, t_B[:, None, None]).z
        target = self.average_velocity(z, t_B, r_B)
        return (self.backbone(z, r_B, t_B).float() - target).square().flatten(1).mean(1)

    @torch.no_grad()
    def average_velocity(self, z_BGD: Tensor, t_B: Tensor, r_B: Tensor) -> Tensor:
        """(z_t - z_r) / (t - r) by the teacher; rows come in the order of `JUMPS`."""
        parts, first = [], 0
        for index, (_, share, substeps) in enumerate(JUMPS):
            last = len(z_BGD) if index == len(JUMPS) - 1 else first + round(share * len(z_BGD))
            z, t, r = z_BGD[first:last], t_B[first:last], r_B[first:last]
            for k in range(substeps):
                z = heun(self.teacher, z, t + (r - t) * (k / substeps), t + (r - t) * ((k + 1) / substeps))
            parts.append((z_BGD[first:last] - z) / (t - r)[:, None, None])
            first = last
        return torch.cat(parts)
