"""GELU, exact to float32, in a form whose two passes over memory are all it costs on a GPU.

x Phi(x) by its definition takes an error function, which is slower there than the memory it reads. Its tail is
Phi(-|x|) = exp(-x^2 / 2) P(t) / 2 with t = 1 / (1 + p |x| / sqrt 2) and a polynomial P [Abramowitz and Stegun 7.1.26],
off by less than 1e-7; the derivative Phi(x) + x phi(x) has the same exponential in it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RATE = 0.3275911 / math.sqrt(2)
TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""From the highest power of t down to the first."""


def gelu(x: Tensor) -> Tensor:
    """x Phi(x); compiled for a GPU as above, elsewhere torch's own."""
    if x.is_cuda and torch.compiler.is_compiling():  # no kernel of ours: any compiler will do
        y: Tensor = Gelu.apply(x)
        return y
    return F.gelu(x)


class Gelu(torch.autograd.Function):
    """x Phi(x) by the tail's polynomial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """In float32, rounded once."""
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _below(wide, _bell(wide))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Phi(x) + x phi(x), times what comes back."""
        wide = ctx.saved_tensors[0].float()
        bell = _bell(wide)
        slope = _below(wide, bell) + wide * bell * (1 / math.sqrt(2 * math.pi))
        return (slope * grads[0].float()).to(grads[0].dtype)


def _bell(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x)


def _below(x: Tensor, bell: Tensor) -> Tensor:
    """Phi(x), given exp(-x^2 / 2)."""
    t = 1 / (1 + RATE * x.abs())
    tail = torch.zeros_like(t)
    for term in TERMS:
        tail = (tail + term) * t
    tail = 0.5 * tail * bell
    return torch.where(x < 0, tail, 1 - tail)
