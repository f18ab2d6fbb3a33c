"""Exact categorical draws in float64.

Lower precision is not a detail: Gumbel noise or cumulative sums in fp32 silently cut the tail of the distribution,
which lowers entropy and flatters every perplexity measured on the samples.
"""

import numpy as np
import torch
from torch import Tensor


def draw_categorical(logits_NV: Tensor, uniform_N: np.ndarray, temperature: float = 1.0) -> Tensor:
    """Token n is the one whose interval of the float64 cumulative distribution holds uniform_n in [0, 1)."""
    logits_NV = logits_NV.double()
    # Less the largest logit, so that a tiny temperature tends to the most likely token and not to 0/0.
    p_NV = torch.softmax((logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    cdf_NV = p_NV.cumsum(dim=-1)
    # Scaled by the last entry, so that rounding in the sum cannot leave a uniform number without its token.
    u_N = torch.from_numpy(uniform_N).to(cdf_NV.device) * cdf_NV[:, -1]
    return torch.searchsorted(cdf_NV, u_N[:, None], right=True).squeeze(1).clamp_(max=logits_NV.shape[-1] - 1)
