"""Dropout whose mask is a function of (seed, step, row, layer, element), so that restarts and world sizes agree."""

import torch
from torch import Tensor

from rmdm.backbone.noise import bits31


def dropout(x_BLD: Tensor, p: float, key_B: Tensor | None, stream: int) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    `key_B` holds one 64-bit key a row, drawn from (seed, step, row); `stream` tells the layers apart. Without a key, or
    with p = 0, nothing is dropped.
    """
    if key_B is None or p == 0.0:
        return x_BLD
    keep = (bits31(key_B, x_BLD[0].numel(), stream) >= int(p * 2**31)).view_as(x_BLD)
    return torch.where(keep, x_BLD / (1 - p), 0.0)
