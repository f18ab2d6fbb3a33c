"""Head and cross-entropy in one pass over chunks of rows, so that the logits never exist all at once.

The gradients of hidden states and head are made in the forward pass, while a chunk's logits are at hand: nothing is
recomputed, and only the chunk (in the compute dtype) is ever held. That costs the 6 N V D operations that are needed
and no more.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of one chunk of logits: large enough to keep a GPU's matrix units busy, small enough for a CPU's memory.
CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}


def linear_cross_entropy(h_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int) -> Tensor:
    """sum_n weight_n * -log softmax(h_n W^T)[target_n] over the first `vocab_size` rows of W, as a fp32 scalar."""
    if not torch.is_grad_enabled():
        nll_N = [c[0] for c in _chunks(h_ND, head_VD, target_N, weight_N, vocab_size, with_grad=False)]
        return (torch.cat(nll_N) * weight_N).sum()
    loss: Tensor = _LinearCrossEntropy.apply(h_ND, head_VD, target_N, weight_N, vocab_size)
    return loss


def linear_nll(h_ND: Tensor, head_VD: Tensor, target_N: Tensor, vocab_size: int) -> Tensor:
    """-log softmax(h_n W^T)[target_n] for each row, without gradients."""
    with torch.no_grad():
        ones = torch.ones(len(target_N), device=h_ND.device)
        return torch.cat([c[0] for c in _chunks(h_ND, head_VD, target_N, ones, vocab_size, with_grad=False)])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int) -> Tensor:
        loss = torch.zeros((), device=h_ND.device)
        d_head = torch.zeros(head_VD.shape, device=head_VD.device)
        d_h = []
        chunks = _chunks(h_ND, head_VD, target_N, weight_N, vocab_size, with_grad=True)
        for (nll, dh, dw), w in zip(chunks, weight_N.split(_chunk_rows(h_ND, head_VD)), strict=True):
            loss = loss + (nll * w).sum()
            d_h.append(dh)
            d_head = d_head + dw
        ctx.save_for_backward(torch.cat(d_h), d_head)
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_h, d_head = ctx.saved_tensors
        return d_h * grads[0], (d_head * grads[0]).to(ctx.head_dtype), None, None, None


def _chunk_rows(h_ND: Tensor, head_VD: Tensor) -> int:
    most = max(64, CHUNK_ELEMENTS.get(h_ND.device.type, 2**22) // len(head_VD))
    parts = -(-len(h_ND) // most)
    return -(-len(h_ND) // max(parts, 1)) or 1


def _chunks(
    h_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, with_grad: bool
) -> Iterator[tuple[Tensor, ...]]:
    rows = _chunk_rows(h_ND, head_VD)
    head = head_VD.to(h_ND.dtype)
    pieces = zip(h_ND.split(rows), target_N.split(rows), weight_N.split(rows), strict=True)
    for h, target, weight in pieces:
        yield _chunk(h, head, target, weight, vocab_size, with_grad)


def _chunk(
    h_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, with_grad: bool
) -> tuple[Tensor, ...]:
    """(nll_N,) or (nll_N, dL/dh, dL/dW) for one chunk."""
    logits = (h_ND @ head_VD.T)[:, :vocab_size].float()
    lse_N = logits.logsumexp(dim=1)
    nll_N = lse_N - logits.gather(1, target_N[:, None]).squeeze(1)
    if not with_grad:
        return (nll_N,)
    hit = torch.arange(vocab_size, device=h_ND.device)[None, :] == target_N[:, None]
    d_logits = (((logits - lse_N[:, None]).exp() - hit.float()) * weight_N[:, None]).to(h_ND.dtype)
    d_logits = F.pad(d_logits, (0, len(head_VD) - vocab_size))
    return nll_N, d_logits @ head_VD, d_logits.T @ h_ND
