"""Ancestral sampling of masked diffusion [Paper §2.2, Algorithm 2], select first, then sample.

From time t to s = t - 1/K each masked position unmasks with probability (t - s) / t, whatever the logits say, so the
step at which a position unmasks is uniform over the K steps and can be drawn up front. A step then runs only the rows
in which something unmasks, and the head only on those positions. The law is exactly that of ancestral sampling.

The noise belongs to the row: row i of a call depends on (seed, i) alone, not on the batch around it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.data.order import uniform
from rmdm.samplers.categorical import draw_categorical

# Streams of the counter-based generator that sampling uses; `step` is 0 and counters are row * L + position.
UNMASK_STREAM, TOKEN_STREAM = 101, 102


@torch.no_grad()
def sample_ancestral(
    backbone: DiT,
    n: int,
    steps: int,
    seed: int,
    *,
    temperature: float = 1.0,
    first_row: int = 0,
    callback: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Draw `n` rows of L tokens in `steps` steps; `callback(step, x_BL)` sees the state after each step.

    `first_row` numbers the first row, so that rows first_row.. of a longer request can be drawn in a call of their own.
    """
    L, device = backbone.length, backbone.embed.weight.device
    counters = (first_row + np.arange(n))[:, None] * L + np.arange(L)
    step_BL = torch.from_numpy(np.floor(uniform(seed, 0, UNMASK_STREAM, counters) * steps).astype(np.int64)).to(device)
    token_noise_BL = uniform(seed, 0, TOKEN_STREAM, counters)
    x_BL = torch.full((n, L), backbone.mask_id, device=device)
    # Only a callback wants to hear of steps in which nothing happens.
    for step in range(steps) if callback is not None else step_BL.unique().tolist():
        row_N, place_N = torch.nonzero(step_BL == step, as_tuple=True)
        if len(row_N):
            rows, local_N = torch.unique(row_N, return_inverse=True)
            h_ND = backbone(x_BL[rows])[local_N, place_N]
            noise_N = token_noise_BL[row_N.cpu().numpy(), place_N.cpu().numpy()]
            x_BL[row_N, place_N] = draw_categorical(backbone.logits(h_ND), noise_N, temperature)
        if callback is not None:
            callback(step, x_BL)
    return x_BL
