"""Batches of token rows: what stage II does in a step, and which positions of a row count."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from rmdm.data.order import rows_of_step
from rmdm.data.shards import TokenRows
from rmdm.errors import DataError
from rmdm.processes import Batch, Draw, Process
from rmdm.training.steps import Plan, Step


class Latents(Protocol):
    """Latents by row number."""

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Rows in the order asked for, (n, G, K)."""
        ...


def build_step(
    step: int,
    plan: Plan,
    rows: TokenRows,
    process: Process,
    mask_id: int,
    pad_in_loss: bool,
    latents: Latents | None = None,
) -> Step:
    """All micro-batches of one step: a function of (seed, step) and the plan, of nothing else."""
    order = rows_of_step(plan.seed, step, plan.batch, len(rows))
    micro, tokens = [], 0
    for places in plan.places():
        x_BL = rows.take(order[places])
        if x_BL.max() >= mask_id:
            raise DataError(f"{rows.folder} holds token {x_BL.max()}, past its vocabulary; delete and prepare it again")
        counted_BL = counted(rows, order[places], pad_in_loss)
        batch = process.batch(x_BL, counted_BL, mask_id, Draw(plan.seed, step, places, plan.batch))
        micro.append(with_latents(batch, latents, order[places]))
        tokens += int(counted_BL.sum())
    return Step(step, micro, tokens)


def with_latents(batch: Batch, latents: Latents | None, indices: np.ndarray) -> Batch:
    """The batch with the latents of its rows, if the model is given any."""
    return batch if latents is None else replace(batch, z_BGK=torch.from_numpy(latents.take(indices)))


def counted(rows: TokenRows, indices: np.ndarray, pad_in_loss: bool) -> np.ndarray:
    """Positions (B, L) that enter the loss: all of them, or all but the padding that follows a row's text."""
    if pad_in_loss:
        return np.ones((len(indices), rows.length), dtype=bool)
    return np.arange(rows.length) < rows.lengths(indices)[:, None]
