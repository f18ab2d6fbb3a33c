"""Head and cross-entropy in one pass over chunks of rows, so that the logits never exist all at once.

The gradients of hidden states and head are made in the forward pass, while a chunk's logits are at hand: nothing is
recomputed, and only the chunk (in the compute dtype) is ever held. That costs the 6 N V D operations that are needed
and no more. Compiled for a GPU, one kernel goes over a chunk's logits (`backbone.kernels`).

Score entropy (SEDD) differs in one place: f_y = exp(logit_y - log V) stands where softmax does, and is not normalised.

    cross-entropy    -log softmax_target              d/d logit_y = softmax_y - 1[y = target]
    score entropy    sum_y f_y - 1 - log f_target     d/d logit_y = f_y - 1[y = target]
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmdm.backbone.products import product
from rmdm.backbone.triton_here import fuses

# Elements of one chunk of logits: large enough to keep a GPU's matrix units busy, small enough for a CPU's memory.
CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}
IN_PLACE = 4
"""Times as many where the gradient takes the logits' place, instead of lying beside them and their float32 copies."""


def linear_cross_entropy(
    h_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, score_entropy: bool = False
) -> Tensor:
    """sum_n weight_n * -log softmax(h_n W^T)[target_n] over the first `vocab_size` rows of W, as a fp32 scalar.

    With `score_entropy`, the score entropy of each row instead.
    """
    if not torch.is_grad_enabled():
        return (linear_nll(h_ND, head_VD, target_N, vocab_size, score_entropy) * weight_N).sum()
    loss: Tensor = _LinearCrossEntropy.apply(h_ND, head_VD, target_N, weight_N, vocab_size, score_entropy)
    return loss


def linear_nll(h_ND: Tensor, head_VD: Tensor, target_N: Tensor, vocab_size: int, score_entropy: bool = False) -> Tensor:
    """-log softmax(h_n W^T)[target_n], or the score entropy, for each row, without gradients."""
    with torch.no_grad():
        head = head_VD.to(h_ND.dtype)
        rows = _chunk_rows(h_ND, head)
        pieces = zip(h_ND.split(rows), target_N.split(rows), strict=True)
        return torch.cat([_logits_and_loss(h, head, target, vocab_size, score_entropy)[2] for h, target in pieces])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        head_VD: Tensor,
        target_N: Tensor,
        weight_N: Tensor,
        vocab_size: int,
        score_entropy: bool,
    ) -> Tensor:
        loss = torch.zeros((), device=h_ND.device)
        d_head = torch.zeros(head_VD.shape, device=head_VD.device)
        d_h = []
        head = head_VD.to(h_ND.dtype)
        rows = _chunk_rows(h_ND, head, IN_PLACE if fuses(h_ND) else 1)
        for h, target, weight in zip(h_ND.split(rows), target_N.split(rows), weight_N.split(rows), strict=True):
            row_loss, d_logits = _loss_and_gradient(h, head, target, weight, vocab_size, score_entropy)
            loss = loss + (row_loss * weight).sum()
            d_h.append(product(d_logits, head))
            d_head = d_head + product(d_logits, h, a_turned=True)
        ctx.save_for_backward(torch.cat(d_h), d_head)
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_h, d_head = ctx.saved_tensors
        return d_h * grads[0], (d_head * grads[0]).to(ctx.head_dtype), None, None, None, None


def _chunk_rows(h_ND: Tensor, head_VD: Tensor, times: int = 1) -> int:
    most = max(64, times * CHUNK_ELEMENTS.get(h_ND.device.type, 2**22) // len(head_VD))
    parts = -(-len(h_ND) // most)
    return -(-len(h_ND) // max(parts, 1)) or 1


def _loss_and_gradient(
    h_ND: Tensor, head_PD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, score_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and the gradient of their weighted sum by all columns of the head."""
    if fuses(h_ND):
        from rmdm.backbone.kernels import loss_and_gradient_

        d_logits = product(h_ND, head_PD, b_turned=True)
        return loss_and_gradient_(d_logits, target_N, weight_N, vocab_size, score_entropy), d_logits
    logits, shift, row_loss = _logits_and_loss(h_ND, head_PD, target_N, vocab_size, score_entropy)
    hit = torch.arange(vocab_size, device=h_ND.device)[None, :] == target_N[:, None]
    d_logits = (((logits - shift[:, None]).exp() - hit.float()) * weight_N[:, None]).to(h_ND.dtype)
    return row_loss, F.pad(d_logits, (0, len(head_PD) - vocab_size))


def _logits_and_loss(
    h_ND: Tensor, head_VD: Tensor, target_N: Tensor, vocab_size: int, score_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in fp32, what to take from them so that exp gives softmax or f, and each row's loss, for one chunk."""
    logits = (h_ND @ head_VD.T)[:, :vocab_size].float()
    lse_N = logits.logsumexp(dim=1)
    hit_N = logits.gather(1, target_N[:, None]).squeeze(1)
    if not score_entropy:
        return logits, lse_N, lse_N - hit_N
    shift_N = torch.full_like(lse_N, math.log(vocab_size))
    return logits, shift_N, torch.expm1(lse_N - shift_N) + shift_N - hit_N
