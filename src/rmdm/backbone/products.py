"""The products of compiled training on a GPU: large ones by kernels chosen for them, GELU in the epilogues of an MLP's.

A GELU by itself reads and writes every number of the widest activation, forward and back; in an epilogue it finds them
in registers. What does not go to a GPU in bf16, or is small, is computed as torch does.

Shapes: N positions, D and K widths.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rmdm.backbone.cublaslt import DGELU, GELU_AUX, can_multiply, multiply
from rmdm.backbone.gelu import gelu

WORTH = 2**35
"""Operations of a product from which it repays what the host does more for it: half a tenth of a millisecond's work."""

HOPPER = 9
"""The first capability on which the library's kernels for large products hold GELU; before, a kernel follows them."""


def can_choose() -> bool:
    """Whether products can be chosen here: a plain function, since the compiler looks into those that are cached."""
    return can_multiply()


def can_hold_gelu() -> bool:
    """Whether their epilogues gain anything."""
    return can_multiply() and torch.cuda.get_device_capability() >= (HOPPER, 0)


if torch.cuda.is_available():  # constants to what is compiled
    can_choose = torch.compiler.assume_constant_result(can_choose)
    can_hold_gelu = torch.compiler.assume_constant_result(can_hold_gelu)


def chosen(x_ND: Tensor, weight_KD: Tensor) -> bool:
    """Whether a product is large, and compiled for a GPU in bf16."""
    if not (x_ND.is_cuda and torch.compiler.is_compiling() and x_ND.dtype == torch.bfloat16):
        return False
    return 2 * x_ND.numel() * len(weight_KD) >= WORTH and can_choose()


def linear(layer: nn.Linear, x_ND: Tensor) -> Tensor:
    """x W^T, whatever the dimensions before the last."""
    if not chosen(x_ND, layer.weight):
        y: Tensor = layer(x_ND)
        return y
    y = Linear.apply(x_ND.flatten(0, -2), layer.weight.to(x_ND.dtype))
    return y.unflatten(0, x_ND.shape[:-1])


def mlp(up: nn.Linear, down: nn.Linear, x_ND: Tensor) -> Tensor:
    """GELU(x A^T) B^T."""
    if not (chosen(x_ND, up.weight) and can_hold_gelu()):
        return linear(down, gelu(linear(up, x_ND)))
    y = Mlp.apply(x_ND.flatten(0, -2), up.weight.to(x_ND.dtype), down.weight.to(x_ND.dtype))
    return y.unflatten(0, x_ND.shape[:-1])


def product(a: Tensor, b: Tensor, a_turned: bool = False, b_turned: bool = False) -> Tensor:
    """A B, either of them turned over first; without a gradient of its own."""
    large = 2 * a.numel() * (len(b) if b_turned else b.shape[1]) >= WORTH
    if large and a.is_cuda and a.dtype == torch.bfloat16 and torch.compiler.is_compiling() and can_choose():
        return times(a, b, a_turned, b_turned)
    return (a.T if a_turned else a) @ (b.T if b_turned else b)


class Linear(torch.autograd.Function):
    """x W^T with its gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_KD: Tensor) -> Tensor:
        """The values."""
        ctx.save_for_backward(x_ND, weight_KD)
        return times(x_ND, weight_KD, False, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Of x and W."""
        (x_ND, weight_KD), d_NK = ctx.saved_tensors, grads[0].contiguous()
        return times(d_NK, weight_KD, False, False), times(d_NK, x_ND, True, False)


class Mlp(torch.autograd.Function):
    """GELU(x A^T) B^T with its gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, up_KD: Tensor, down_DK: Tensor) -> Tensor:
        """The values."""
        u_NK, y_NK = up_gelu(x_ND, up_KD)
        ctx.save_for_backward(x_ND, up_KD, down_DK, u_NK, y_NK)
        return times(y_NK, down_DK, False, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x, A and B."""
        (x_ND, up_KD, down_DK, u_NK, y_NK), d_ND = ctx.saved_tensors, grads[0].contiguous()
        d_u_NK = down_back(d_ND, down_DK, u_NK)
        return times(d_u_NK, up_KD, False, False), times(d_u_NK, x_ND, True, False), times(d_ND, y_NK, True, False)


@torch.library.custom_op("rmdm::times", mutates_args=())
def times(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
    """A B, either of them turned over first."""
    return multiply(a.contiguous(), b.contiguous(), a_turned, b_turned)


@times.register_fake
def _(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
    return a.new_empty(a.shape[int(a_turned)], b.shape[int(not b_turned)])


@torch.library.custom_op("rmdm::up_gelu", mutates_args=())
def up_gelu(x_ND: Tensor, up_KD: Tensor) -> tuple[Tensor, Tensor]:
    """u = x A^T and GELU(u)."""
    u_NK = x_ND.new_empty(len(x_ND), len(up_KD))
    return u_NK, multiply(x_ND.contiguous(), up_KD.contiguous(), False, True, GELU_AUX, u_NK)


@up_gelu.register_fake
def _(x_ND: Tensor, up_KD: Tensor) -> tuple[Tensor, Tensor]:
    u_NK = x_ND.new_empty(x_ND.shape[0], up_KD.shape[0])
    return u_NK, torch.empty_like(u_NK)


@torch.library.custom_op("rmdm::down_back", mutates_args=())
def down_back(d_ND: Tensor, down_DK: Tensor, u_NK: Tensor) -> Tensor:
    """(d B) GELU'(u)."""
    return multiply(d_ND.contiguous(), down_DK.contiguous(), False, False, DGELU, u_NK)


@down_back.register_fake
def _(d_ND: Tensor, down_DK: Tensor, u_NK: Tensor) -> Tensor:
    return torch.empty_like(u_NK)
