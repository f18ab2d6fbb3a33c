"""SEDD's samplers: the analytic (Tweedie) step and Euler's, which are one map on the log-linear schedule.

With exp(-sigma_bar(t)) = 1 - t the scores of a masked position are s_y = r_t f_y, r_t = (1 - t) / t (`processes.sedd`).

- Analytic, from t to s. With d = sigma_bar(t) - sigma_bar(s), exp(d) = (1 - s) / (1 - t), the generator's exponential
  takes the ratios p_t / p_t([MASK]) back to time s, and Bayes' rule multiplies by the chance 1 - exp(-d) of having been
  masked since (1 for what was masked already):

      P(y) = exp(d) s_y (1 - exp(-d)) = (exp(d) - 1) s_y = (t - s) / t f_y,     P([MASK]) = 1 - (t - s) / t Z.

- Euler. The reverse rate sigma_bar'(t) s_y times t - s:

      P(y) = (t - s) 1 / (1 - t) (1 - t) / t f_y = (t - s) / t f_y.

Z = sum_y f_y is learnt. Where (t - s) Z exceeds t, P([MASK]) is 0 and the rest is scaled to 1. The last step leaves no
mask: its tokens are drawn from f / Z. Time runs over k / K, k = K..1, so (t - s) / t = 1 / k.

Temperature, top-p and barred tokens change the shape f / Z, which token a position gets, and leave Z, when it gets one,
alone.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.samplers.categorical import draw_categorical, probabilities
from rmdm.samplers.denoiser import Ask, Callback, Denoiser, Steps, run_steps
from rmdm.samplers.noise import row_uniform
from rmdm.samplers.settings import SampleSettings

SEDD_STREAM = 110
"""Stream of the draws; see `samplers.noise`."""


@torch.no_grad()
def sample_sedd(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
) -> Tensor:
    """Fill the masked positions of `x_BL` in `settings.steps` steps; `callback(step, x_BL)` follows each step."""
    return run_steps(sedd_steps(denoiser.mask_id, x_BL, keys_B, settings, callback), denoiser)


def sedd_steps(
    mask_id: int,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    sure_BL: Tensor | None = None,
) -> Steps:
    """The same, asking for the network; `sure_BL` gets each token's share f_y / Z when it is written."""
    K, L, device = settings.steps, x_BL.shape[1], x_BL.device
    x_BL = x_BL.clone()
    for step in range(K):
        row_N, place_N = torch.nonzero(x_BL == mask_id, as_tuple=True)
        if len(row_N):
            rows_R, local_N, count_R = torch.unique(row_N, return_inverse=True, return_counts=True)
            t_R = torch.full((len(rows_R),), (K - step) / K, device=device)
            u_N = torch.from_numpy(row_uniform(keys_B, step, SEDD_STREAM, L)).to(device)[row_N, place_N]
            token_N = torch.empty_like(place_N)
            hidden = yield Ask(x_BL[rows_R], rows_R, local_N, place_N, count_R.cpu().numpy(), t_R)
            assert hidden is not None
            for part, free in hidden.free_chunks():
                logits = hidden.allowed(part, free)
                token_N[part] = reverse_step(logits, u_N[part], K - step, mask_id, settings, free)
                if sure_BL is not None:
                    sure_BL[row_N[part], place_N[part]] = _share(logits, token_N[part], mask_id)
            x_BL[row_N, place_N] = token_N
        elif callback is None:
            break
        if callback is not None:
            callback(step, x_BL)
    return x_BL


def reverse_step(
    logits_NV: Tensor, u_N: Tensor, k: int, mask_id: int, settings: SampleSettings, free_NV: Tensor | None = None
) -> Tensor:
    """From t = k / K to s = (k - 1) / K: a token with probability Z / k, at most 1, or [MASK] again.

    u_n < p says that a token is due; given that, u_n / p is uniform once more and chooses it. Where some tokens are
    barred, their logits -inf, `free_NV` has them too: Z is of all tokens.
    """
    p_N = unmask_probability(logits_NV if free_NV is None else free_NV, k)
    due_N = u_N < p_N
    share_N = torch.where(due_N, u_N / p_N, 0.0)
    # A GPU draws for all: to learn which are due the host would have to wait for it.
    drawn = slice(None) if logits_NV.is_cuda else due_N
    token_N = torch.full_like(due_N, mask_id, dtype=torch.int64)
    token_N[drawn] = draw_categorical(
        logits_NV[drawn], share_N[drawn], temperature=settings.temperature, top_p=settings.top_p
    )
    return torch.where(due_N, token_N, mask_id)


def _share(logits_NV: Tensor, token_N: Tensor, mask_id: int) -> Tensor:
    """f_y / Z of each token; 0 for a place that stays masked."""
    y_N = token_N.where(token_N != mask_id, 0)
    return probabilities(logits_NV).gather(1, y_N[:, None]).squeeze(1).where(token_N != mask_id, 0.0)


def unmask_probability(logits_NV: Tensor, k: int) -> Tensor:
    """min(1, Z / k) in float64, and 1 at the last step, k = 1, whatever Z is."""
    log_mass_N = logits_NV.double().logsumexp(dim=-1) - math.log(logits_NV.shape[-1])
    return (log_mass_N - math.log(k)).exp().clamp(max=1.0) if k > 1 else torch.ones_like(log_mass_N)
