"""Exact categorical draws in float64.

Lower precision is not a detail: Gumbel noise or cumulative sums in fp32 silently cut the tail of the distribution,
which lowers entropy and flatters every perplexity measured on the samples.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rmdm.backbone.triton_here import can_fuse

RUN = 256
"""Tokens whose probabilities are added up together: about the square root of a large vocabulary."""


def draw_categorical(
    logits_NV: Tensor, uniform_N: Tensor | np.ndarray, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """Token n is the one whose interval of the float64 cumulative distribution holds uniform_n in [0, 1)."""
    if top_p >= 1:
        if logits_NV.is_cuda and can_fuse():
            from rmdm.samplers.kernels import draw

            return draw(logits_NV, torch.as_tensor(uniform_N, device=logits_NV.device), temperature)
        return invert(weights(logits_NV, temperature), uniform_N)
    return invert(nucleus(probabilities(logits_NV, temperature), top_p), uniform_N)


def invert(p_NV: Tensor, uniform_N: Tensor | np.ndarray) -> Tensor:
    """The token of each row of (unnormalised) probabilities at a share uniform_n of their cumulative sum.

    First the run of RUN tokens that holds it, then the token: a GPU adds up one row of a large vocabulary slowly.
    """
    runs_NCR = F.pad(p_NV, (0, -p_NV.shape[1] % RUN)).unflatten(1, (-1, RUN))
    cdf_NC = runs_NCR.sum(dim=2).cumsum(dim=1)
    # Scaled by the last entry, so that rounding in the sum cannot leave a uniform number without its token.
    u_N = torch.as_tensor(uniform_N, device=cdf_NC.device) * cdf_NC[:, -1]
    run_N1 = _place(cdf_NC, u_N)
    before_N = F.pad(cdf_NC, (1, 0)).gather(1, run_N1).squeeze(1)
    cdf_NR = runs_NCR.take_along_dim(run_N1[:, :, None], dim=1).squeeze(1).cumsum(dim=1)
    return (run_N1 * RUN + _place(cdf_NR, u_N - before_N)).squeeze(1)


def _place(cdf_NC: Tensor, u_N: Tensor) -> Tensor:
    """Number (N, 1) of the interval that holds u; rounding may put it past the last one that has any probability."""
    place_N1 = torch.searchsorted(cdf_NC, u_N[:, None], right=True)
    return torch.minimum(place_N1, torch.searchsorted(cdf_NC, cdf_NC[:, -1:].contiguous()))


def probabilities(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(logits / temperature) in float64."""
    w_NV = weights(logits_NV, temperature)
    return w_NV.div_(w_NV.sum(dim=-1, keepdim=True))


def weights(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """The same but for a factor; the likeliest token of a row has 1."""
    # Less the largest logit, so that a tiny temperature tends to the most likely token and not to 0/0.
    return logits_NV.double().sub(logits_NV.amax(dim=-1, keepdim=True)).div_(temperature).exp_()


def nucleus(p_NV: Tensor, top_p: float) -> Tensor:
    """`p_NV` with 0 outside the smallest set of likeliest tokens whose mass reaches `top_p`; at least one is kept.

    Of equally likely tokens the one with the smaller id comes first.
    """
    sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = F.pad(sorted_NV.cumsum(dim=-1)[:, :-1], (1, 0))
    kept_NV = torch.where(before_NV < top_p, sorted_NV, 0.0)
    return torch.zeros_like(p_NV).scatter_(-1, order_NV, kept_NV)
