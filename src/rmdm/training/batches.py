"""Batches of token rows: what stage II does in a step, and which positions of a row count."""

import numpy as np

from rmdm.data.order import rows_of_step
from rmdm.data.shards import TokenRows
from rmdm.errors import DataError
from rmdm.processes import Draw, Process
from rmdm.training.steps import Plan, Step


def build_step(step: int, plan: Plan, rows: TokenRows, process: Process, mask_id: int, pad_in_loss: bool) -> Step:
    """All micro-batches of one step: a function of (seed, step) and the plan, of nothing else."""
    order = rows_of_step(plan.seed, step, plan.batch, len(rows))
    micro, tokens = [], 0
    for places in plan.places():
        x_BL = rows.take(order[places])
        if x_BL.max() >= mask_id:
            raise DataError(f"{rows.folder} holds token {x_BL.max()}, past its vocabulary; delete and prepare it again")
        counted_BL = counted(rows, order[places], pad_in_loss)
        micro.append(process.batch(x_BL, counted_BL, mask_id, Draw(plan.seed, step, places, plan.batch)))
        tokens += int(counted_BL.sum())
    return Step(step, micro, tokens)


def counted(rows: TokenRows, indices: np.ndarray, pad_in_loss: bool) -> np.ndarray:
    """Positions (B, L) that enter the loss: all of them, or all but the padding that follows a row's text."""
    if pad_in_loss:
        return np.ones((len(indices), rows.length), dtype=bool)
    return np.arange(rows.length) < rows.lengths(indices)[:, None]
