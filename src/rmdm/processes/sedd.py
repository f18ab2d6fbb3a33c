"""Score entropy with absorbing noise (Lou et al. 2024), the paper's SEDD baseline, on MDLM's log-linear schedule.

With exp(-sigma_bar(t)) = 1 - t, a masked position whose token was y has the ratio r_t = p_t(y) / p_t([MASK]) =
1 / (exp(sigma_bar) - 1) = (1 - t) / t. The network gives the scores s_y = r_t f_y with f_y = exp(logit_y - log V) > 0,
which is not normalised: Z = sum_y f_y is 1 where the network is untrained, and is learnt. The denoising score entropy
of the position, weighted by the rate sigma_bar'(t) = 1 / (1 - t), is

    sigma_bar' [ sum_y s_y - r_t log s_{x_0} + r_t (log r_t - 1) ] = 1/t [ Z - 1 - log f_{x_0} ]
                                                              = 1/t [ -log (f_{x_0} / Z) + (Z - 1 - log Z) ]:

MDLM's cross-entropy and, for the mass Z that is no part of the prediction, a term >= 0. Its integral over t bounds
-log p(x_0) of the reverse process that has these scores. Unlike MDLM's network this one is told t.

Each position is masked at its own uniform time. Seen at a uniform t, k of L positions are masked with probability
C(L, k) t^k (1-t)^(L-k), and weigh 1/t:

    1/t C(L, k) t^k (1-t)^(L-k) = 1/k Beta(t; k, L-k+1),

the law of the time of the k-th mask, over k. So the bound is also the mean over k uniform in 1..L, with weight L/k, of
rows seen at the moment of their k-th mask. That is MDLM's batch, and t is the time of its last mask. Coin flips
weighted by 1/t have the same mean, an infinite variance (the integral of 1/t at 0) and a count known only afterwards.
"""

from dataclasses import replace

import numpy as np
import torch

from rmdm.data.order import uniform
from rmdm.processes.mdlm import MDLM
from rmdm.processes.objective import MASK_STREAM, Batch, Draw


class SEDD(MDLM):
    """Predict the masked tokens, and how many of them are due, from the rest of the row and the time."""

    def batch(self, x_BL: np.ndarray, counted_BL: np.ndarray, mask_id: int, draw: Draw) -> Batch:
        """MDLM's batch with the time at which each row has just its masks."""
        batch = super().batch(x_BL, counted_BL, mask_id, draw)
        t_B = last_mask_time(draw, batch.x_BL.numpy() == mask_id)
        return replace(batch, t_B=torch.from_numpy(t_B.astype(np.float32)))


def last_mask_time(draw: Draw, mask_BL: np.ndarray) -> np.ndarray:
    """The latest of the masked positions' times, which are the numbers that `choose_masks` put in order."""
    L = mask_BL.shape[1]
    u_BL = uniform(draw.seed, draw.step, MASK_STREAM, draw.rows_B[:, None] * L + np.arange(L))
    return np.where(mask_BL, u_BL, 0.0).max(axis=1)
