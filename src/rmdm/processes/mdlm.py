"""Masked diffusion with the log-linear schedule alpha_t = 1 - t [Paper §2.2, Equation 1].

    L = int_0^1 1/t E_q [ sum_{i in I_t} -log p(x_0^i | x_t) ] dt

Given t, exactly k = ceil(t L) positions are masked instead of each with probability t, with weight L/k instead of 1/t.
Integrating t out, both weigh every set of k masks by 1 / (k C(L, k)), so the bound is the same number, with less
variance and a batch whose count of masked positions is known beforehand. t is stratified over the global batch.
"""

import math

import numpy as np
import torch

from rmdm.data.order import hash64, uniform
from rmdm.processes.objective import DROPOUT_STREAM, MASK_STREAM, TIME_STREAM, Batch, Draw


class MDLM:
    """Predict the masked tokens from the rest of the row."""

    causal = False
    is_bound = True

    def batch(self, x_BL: np.ndarray, counted_BL: np.ndarray, mask_id: int, draw: Draw) -> Batch:
        """Mask each row at its own time and select the masked positions that count."""
        B, L = x_BL.shape
        k_B = masks_of_time(stratified_time(draw), L)
        mask_BL = choose_masks(draw, k_B, L)
        selected_BL = mask_BL & counted_BL
        flat, others = np.flatnonzero(selected_BL), np.flatnonzero(~selected_BL)
        select = np.concatenate([flat, others])[: most_masks(B, L)]
        weight = np.zeros(len(select), dtype=np.float32)
        weight[: len(flat)] = (L / k_B)[flat // L]
        return Batch(
            x_BL=torch.from_numpy(np.where(mask_BL, mask_id, x_BL)),
            select_N=torch.from_numpy(select),
            target_N=torch.from_numpy(x_BL.ravel()[select].astype(np.int64)),
            weight_N=torch.from_numpy(weight),
            noise_key_B=torch.from_numpy(hash64(draw.seed, draw.step, DROPOUT_STREAM, draw.rows_B).view(np.int64)),
        )


def stratified_time(draw: Draw) -> np.ndarray:
    """t in (b/B, (b+1)/B] for row b of the global batch of B, so t covers (0, 1] evenly whatever the world size."""
    u_B = uniform(draw.seed, draw.step, TIME_STREAM, draw.rows_B)
    return (draw.rows_B + 1.0 - u_B) / draw.batch


def masks_of_time(t_B: np.ndarray, length: int) -> np.ndarray:
    """k = ceil(t L), between 1 and L."""
    return np.clip(np.ceil(t_B * length), 1, length).astype(np.int64)


def choose_masks(draw: Draw, k_B: np.ndarray, length: int) -> np.ndarray:
    """A uniformly random set of k_b positions for each row, as booleans (B, L)."""
    counters = draw.rows_B[:, None] * length + np.arange(length)
    key_BL = hash64(draw.seed, draw.step, MASK_STREAM, counters)
    threshold_B = np.take_along_axis(np.sort(key_BL, axis=1), k_B[:, None] - 1, axis=1)
    return key_BL <= threshold_B


def most_masks(rows: int, length: int) -> int:
    """No batch of `rows` evenly spaced strata has more masks than this: sum_j (j+1)/n = (n+1)/2, plus rounding up."""
    bound = min(rows * length, math.ceil(length * (rows + 1) / 2) + rows)
    return min(rows * length, 64 * math.ceil(bound / 64))
