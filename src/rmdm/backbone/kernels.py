"""Triton kernel of training on a GPU: a chunk's losses, and the gradient in the place of its logits.

Compiled torch goes through the logits twice and computes addresses for as long as it reads. Here a program has one row,
which comes from memory once. Under `TRITON_INTERPRET=1` it runs on a CPU, which is how it is tested without a GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
"""Logits that a program looks at at once, and its warps."""


LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _add(most, mass, logit_B):
    """The largest of more logits, and the sum of 2^(logit log2 e - largest)."""
    bits_B = logit_B.to(tl.float32) * LOG2E
    more = tl.maximum(most, tl.max(bits_B, axis=0))
    return more, mass * tl.exp2(most - more) + tl.sum(tl.exp2(bits_B - more), axis=0)


@triton.jit
def _share(logit_B, shift, weight):
    """exp(logit - shift) times a weight."""
    return tl.exp2(logit_B.to(tl.float32) * LOG2E - shift * LOG2E) * weight


@triton.jit
def _loss_and_gradient(
    logits, target, weight, loss, uniform,
    V: tl.constexpr, P: tl.constexpr, SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = V // BLOCK * BLOCK  # up to here no mask is needed, and eight logits are read at once
    n, id_B = tl.program_id(0), tl.arange(0, BLOCK)
    row, wanted, own = logits + n.to(tl.int64) * P, tl.load(target + n), tl.load(weight + n)
    hit = tl.load(row + wanted).to(tl.float32)
    most, mass = hit * LOG2E, 0.0
    for first in range(0, WHOLE, BLOCK):
        most, mass = _add(most, mass, tl.load(row + first + id_B))
    rest_B = tl.load(row + WHOLE + id_B, mask=WHOLE + id_B < V, other=-float("inf"))
    most, mass = _add(most, mass, rest_B)
    lse = (most + tl.log2(mass)) / LOG2E
    # What is taken from the logits so that exp gives softmax, or f.
    shift = uniform if SCORE else lse
    tl.store(loss + n, tl.exp(lse - shift) - 1 + shift - hit if SCORE else lse - hit)
    for first in range(0, WHOLE, BLOCK):
        gradient_B = _share(tl.load(row + first + id_B), shift, own)
        tl.store(row + first + id_B, gradient_B.to(logits.dtype.element_ty))
    gradient_B = _share(rest_B, shift, own).to(logits.dtype.element_ty)
    for first in tl.static_range(WHOLE, P, BLOCK):
        if first > WHOLE:
            gradient_B = tl.zeros_like(gradient_B)  # padding that fills more than the last block
        tl.store(row + first + id_B, gradient_B, mask=first + id_B < P)
    tl.debug_barrier()  # the wanted token's place was written by another thread
    tl.store(row + wanted, ((tl.exp(hit - shift) - 1) * own).to(logits.dtype.element_ty))


def loss_and_gradient_(
    logits_NP: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, score_entropy: bool
) -> Tensor:
    """The rows' cross-entropies or score entropies; in place of the logits, weight_n times their gradient.

    Beyond `vocab_size` there is nothing to predict, and the gradient is 0.
    """
    N, P = logits_NP.shape
    loss_N = torch.empty(N, device=logits_NP.device, dtype=torch.float32)
    if N:
        _loss_and_gradient[(N,)](
            logits_NP, target_N, weight_N, loss_N, math.log(vocab_size),
            V=vocab_size, P=P, SCORE=score_entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return loss_N
