"""Autoregressive baseline: exact likelihood, -log p(x) = sum_l -log p(x_l | x_<l), on the same rows as the others.

The extra id that masked diffusion uses for [MASK] starts the row here, so the first token is predicted too.
"""

import numpy as np
import torch

from rmdm.data.order import hash64
from rmdm.processes.objective import DROPOUT_STREAM, Batch, Draw


class AR:
    """Predict every token from those before it."""

    causal = True
    is_bound = False

    def batch(self, x_BL: np.ndarray, counted_BL: np.ndarray, mask_id: int, draw: Draw) -> Batch:
        """Shift the row right by one and select every position; those that do not count weigh 0."""
        B, L = x_BL.shape
        shifted = np.concatenate([np.full((B, 1), mask_id, dtype=x_BL.dtype), x_BL[:, :-1]], axis=1)
        return Batch(
            x_BL=torch.from_numpy(shifted),
            select_N=torch.arange(B * L),
            target_N=torch.from_numpy(x_BL.ravel()),
            weight_N=torch.from_numpy(counted_BL.ravel().astype(np.float32)),
            noise_key_B=torch.from_numpy(hash64(draw.seed, draw.step, DROPOUT_STREAM, draw.rows_B).view(np.int64)),
        )
