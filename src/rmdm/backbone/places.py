"""Some positions of a batch, all different: what is wanted of a network only there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Pick(torch.autograd.Function):
    """Rows of a matrix. As they are all different, each gradient has a place of its own and none are added up."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, at_N: Tensor) -> Tensor:
        ctx.save_for_backward(at_N)
        ctx.count = len(x_MD)
        return x_MD.index_select(0, at_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (at_N,) = ctx.saved_tensors
        return _put(grads[0], at_N, ctx.count), None


def _put(x_ND: Tensor, at_N: Tensor, count: int) -> Tensor:
    """Rows at their places, zeros elsewhere."""
    return x_ND.new_zeros(count, x_ND.shape[-1]).index_copy(0, at_N, x_ND)


def pick(x_BLD: Tensor, at_N: Tensor) -> Tensor:
    """The positions `at_N`, b L + l each, (N, D)."""
    return _Pick.apply(x_BLD.flatten(0, -2), at_N)


def only_at(at_N: Tensor | None, function: Callable[[Tensor], Tensor], x_BLD: Tensor) -> Tensor:
    """`function`, which knows one position at a time, of the positions `at_N` or of all; zeros elsewhere."""
    if at_N is None:
        return function(x_BLD)
    y_ND = function(pick(x_BLD, at_N))
    return _put(y_ND, at_N, x_BLD.shape[:-1].numel()).view(*x_BLD.shape[:-1], -1)
