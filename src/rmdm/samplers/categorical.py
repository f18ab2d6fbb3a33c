"""Exact categorical draws in float64.

Lower precision is not a detail: Gumbel noise or cumulative sums in fp32 silently cut the tail of the distribution,
which lowers entropy and flatters every perplexity measured on the samples.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def draw_categorical(
    logits_NV: Tensor, uniform_N: Tensor | np.ndarray, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """Token n is the one whose interval of the float64 cumulative distribution holds uniform_n in [0, 1)."""
    return invert(nucleus(probabilities(logits_NV, temperature), top_p), uniform_N)


def invert(p_NV: Tensor, uniform_N: Tensor | np.ndarray) -> Tensor:
    """The token of each row of (unnormalised) probabilities at a share uniform_n of their cumulative sum."""
    cdf_NV = p_NV.cumsum(dim=-1)
    # Scaled by the last entry, so that rounding in the sum cannot leave a uniform number without its token.
    u_N = torch.as_tensor(uniform_N, device=cdf_NV.device) * cdf_NV[:, -1]
    token_N = torch.searchsorted(cdf_NV, u_N[:, None], right=True).squeeze(1)
    # The product may round up to the last entry itself: then it is the last token that has any probability.
    last_N = torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()).squeeze(1)
    return torch.minimum(token_N, last_N)


def probabilities(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(logits / temperature) in float64."""
    logits_NV = logits_NV.double()
    # Less the largest logit, so that a tiny temperature tends to the most likely token and not to 0/0.
    return torch.softmax((logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def nucleus(p_NV: Tensor, top_p: float) -> Tensor:
    """`p_NV` with 0 outside the smallest set of likeliest tokens whose mass reaches `top_p`; at least one is kept.

    Of equally likely tokens the one with the smaller id comes first.
    """
    if top_p >= 1:
        return p_NV
    sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = F.pad(sorted_NV.cumsum(dim=-1)[:, :-1], (1, 0))
    kept_NV = torch.where(before_NV < top_p, sorted_NV, 0.0)
    return torch.zeros_like(p_NV).scatter_(-1, order_NV, kept_NV)
