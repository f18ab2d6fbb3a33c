"""Noise that is a function of integers, made on the device: the same for any number of ranks and after a restart."""

import math

import torch
from torch import Tensor


def mix32(x: Tensor) -> Tensor:
    """A 32-bit finaliser: wrapping int32 products with logical shifts, alike on every device."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def bits31(key_B: Tensor, count: int, stream: int) -> Tensor:
    """31 random bits for each of `count` elements of each row, (B, count) int32, from one 64-bit key a row."""
    element = torch.arange(count, device=key_B.device, dtype=torch.int32)
    folded = (key_B ^ (key_B >> 32)).to(torch.int32) + (stream + 1) * 0x632BE5AB
    return mix32(mix32(element)[None, :] ^ folded[:, None]) & 0x7FFFFFFF


def normal(key_B: Tensor, shape: tuple[int, ...], stream: int) -> Tensor:
    """Standard normal numbers (B, *shape) in float32, by Box and Muller's transform of two streams of bits."""
    count = math.prod(shape)
    # The second stream folds the key's halves another way, so that the two do not share collisions.
    radius = bits31(key_B, count, 2 * stream).float().add_(0.5).mul_(2.0**-31)
    angle = bits31(key_B * 0x2545F4914F6CDD1D, count, 2 * stream + 1).float().mul_(math.tau * 2.0**-31)
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)).view(-1, *shape)
