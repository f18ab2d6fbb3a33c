"""Confidence orders: every step writes the masked positions the model is surest of.

How sure it is of a position follows from its distribution p there, at temperature 1 and before top-p:

    max_prob   max p          margin   p_(1) - p_(2)          entropy, balanced   sum p log p

and not from the token that is drawn: the order then leaves each token's law alone, and with one position a step a model
whose conditionals agree with each other is sampled exactly. (To prefer positions that happened to draw a likely token
costs diversity: 64 different openings among 256 stories of the demo's MDLM in 32 steps, instead of 212.) Of equally
sure positions the leftmost is first.

After step s = 1..K of a row with M masks, floor(M (1 - s/K)) stay masked. `balanced` shares out entropy instead of
positions: step s writes the surest positions that together hold at most 1/(K - s + 1) of the entropy the row has left,
and at least one. What tokens drawn at once can miss of each other is bounded by their entropies' sum, so this spreads
the risk evenly over the steps: a latent that settles most words gets them written in the first step, and the others
one by one.

With remasking r, step s > 1 first takes back floor(r (1 - s/K) W) of the W tokens written so far, those to which the
model gave the least probability when they were written, and writes as many more (`balanced`: shares them out anew);
tokens given by the request are never touched. The share falls to 0 because what a late step takes back it must rewrite
all at once: with a constant share of 0.2, 1% of 256 such stories were consistent, with a falling one 15%, without
remasking 16%. Rows with nothing to write sit a step out.

How many positions each row writes and takes back is known beforehand, so no step waits for the device, but for
`balanced`, which waits once a step for that number.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.samplers.categorical import probabilities
from rmdm.samplers.denoiser import Ask, Callback, Denoiser, Hidden, Steps, draw_tokens, run_steps, send
from rmdm.samplers.noise import TOKEN_STREAM, row_uniform
from rmdm.samplers.settings import SampleSettings


@torch.no_grad()
def sample_confidence(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
) -> Tensor:
    """Fill the masked positions of `x_BL`, surest first; `callback(step, x_BL)` follows each step."""
    return run_steps(confidence_steps(denoiser.mask_id, x_BL, keys_B, settings, callback), denoiser)


def confidence_steps(
    mask_id: int,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    sure_BL: Tensor | None = None,
) -> Steps:
    """The same, asking for the network; `sure_BL` gets the probability of each token when it is written."""
    K, L, device = settings.steps, x_BL.shape[1], x_BL.device
    free_BL, x_BL = x_BL == mask_id, x_BL.clone()
    free_B = free_BL.sum(dim=1).cpu().numpy()
    left_B, is_balanced = free_B.copy(), settings.sampler == "balanced"
    if sure_BL is None:
        sure_BL = torch.zeros(x_BL.shape, device=device, dtype=torch.float64)
    for step in range(K):
        if callback is None and settings.remask == 0 and not left_B.any():
            break  # with more steps than positions
        back_B = np.floor(settings.remask * (free_B - left_B) * (K - step - 1) / K).astype(np.int64)
        masked_B = left_B + back_B
        after_B = 0 * free_B if is_balanced else free_B * (K - step - 1) // K
        rows = np.flatnonzero(masked_B > after_B)
        if len(rows):
            if back_B.any():
                written_BL = free_BL & (x_BL != mask_id)
                x_BL[_lowest(torch.where(written_BL, sure_BL, torch.inf), back_B)] = mask_id
            rows_R = send(rows, device)
            x_RL, noise_RL = x_BL[rows_R], send(row_uniform(keys_B[rows], step, TOKEN_STREAM, L), device)
            local_N, place_N = _lowest((x_RL != mask_id).int(), masked_B[rows])
            hidden = yield Ask(x_RL, rows_R if len(rows) < len(x_BL) else None, local_N, place_N, masked_B[rows])
            assert hidden is not None
            number_RL = torch.zeros_like(x_RL).index_put_((local_N, place_N), torch.arange(len(place_N), device=device))
            unsure_RL = torch.full(x_RL.shape, torch.inf, device=device, dtype=torch.float64)
            unsure_RL[local_N, place_N] = -_confidence(hidden, settings.sampler)
            count_R = _fair_share(unsure_RL, K - step) if is_balanced else (masked_B - after_B)[rows]
            local_M, place_M = _lowest(unsure_RL, count_R)
            wanted = hidden.at(number_RL[local_M, place_M])
            token_M, p_M = draw_tokens(wanted, noise_RL[local_M, place_M], settings, sure=True)
            x_BL[rows_R[local_M], place_M] = token_M
            sure_BL[rows_R[local_M], place_M] = p_M
            left_B[rows] = masked_B[rows] - count_R
        if callback is not None:
            callback(step, x_BL)
    return x_BL


def _fair_share(entropy_RL: Tensor, steps: int) -> NDArray[np.int64]:
    """How many positions each row writes so that each of `steps` steps gets its share of the entropy; inf: not masked.

    The last step gets all there is.
    """
    masked_R = entropy_RL.isfinite().sum(dim=1)
    if steps > 1:
        sum_RL = entropy_RL.sort(dim=1).values.nan_to_num(posinf=0.0).cumsum(dim=1)
        fitting_R = (sum_RL <= sum_RL[:, -1:] / steps).sum(dim=1)
        masked_R = torch.minimum(fitting_R.clamp_min(1), masked_R)
    return masked_R.cpu().numpy()


def _confidence(hidden: Hidden, order: str) -> Tensor:
    """How sure the model is of each of N positions, (N,) in float64."""
    return torch.cat([confidence(probabilities(logits), order) for _, logits in hidden.chunks()])


def confidence(p_NV: Tensor, order: str) -> Tensor:
    """How sure a distribution is, larger is surer, by one of the orders."""
    if order in ("entropy", "balanced"):
        return -torch.special.entr(p_NV).sum(dim=-1)
    if order == "max_prob":
        return p_NV.amax(dim=-1)
    first_N, second_N = p_NV.topk(2, dim=-1).values.unbind(dim=-1)
    return first_N - second_N


def _lowest(score_RL: Tensor, count_R: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Row and place of the count_r lowest scores of each row r, flat; of equal ones the leftmost come first."""
    order_RL = score_RL.argsort(dim=1, stable=True)
    nth_M = np.arange(count_R.sum()) - np.repeat(np.cumsum(count_R) - count_R, count_R)
    local_M = send(np.repeat(np.arange(len(count_R)), count_R), score_RL.device)
    return local_M, order_RL[local_M, send(nth_M, score_RL.device)]
