"""Dropout whose mask is a function of (seed, step, row, layer, element), so that restarts and world sizes agree."""

import torch
from torch import Tensor


def dropout(x_BLD: Tensor, p: float, key_B: Tensor | None, stream: int) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    `key_B` holds one 64-bit key a row, drawn from (seed, step, row); `stream` tells the layers apart. Without a key, or
    with p = 0, nothing is dropped.
    """
    if key_B is None or p == 0.0:
        return x_BLD
    element = torch.arange(x_BLD[0].numel(), device=x_BLD.device, dtype=torch.int32)
    key_B = (key_B ^ (key_B >> 32)).to(torch.int32) + (stream + 1) * 0x632BE5AB
    bits = _mix(_mix(element)[None, :] ^ key_B[:, None]) & 0x7FFFFFFF
    keep = (bits >= int(p * 2**31)).view_as(x_BLD)
    return torch.where(keep, x_BLD / (1 - p), 0.0)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser: wrapping int32 products with logical shifts, alike on every device."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)
