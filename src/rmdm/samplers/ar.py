"""Autoregressive sampling, one token a step with cached keys and values."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rmdm.backbone.dit import DiT, KVCache
from rmdm.data.order import uniform
from rmdm.samplers.ancestral import TOKEN_STREAM
from rmdm.samplers.categorical import draw_categorical


@torch.no_grad()
def sample_ar(
    backbone: DiT,
    n: int,
    seed: int,
    *,
    temperature: float = 1.0,
    first_row: int = 0,
    callback: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Draw `n` rows of L tokens from left to right; `callback(step, x_BL)` sees the state after each token."""
    L, device = backbone.length, backbone.embed.weight.device
    noise_BL = uniform(seed, 0, TOKEN_STREAM, (first_row + np.arange(n))[:, None] * L + np.arange(L))
    cache = KVCache(backbone.config, n, L, device, backbone.compute_dtype)
    x_BL = torch.full((n, L), backbone.mask_id, device=device)
    last_B1 = x_BL[:, :1]
    for place in range(L):
        logits_BV = backbone.logits(backbone(last_B1, cache=cache)[:, -1])
        x_BL[:, place] = draw_categorical(logits_BV, noise_BL[:, place], temperature)
        last_B1 = x_BL[:, place : place + 1]
        if callback is not None:
            callback(place, x_BL)
    return x_BL
