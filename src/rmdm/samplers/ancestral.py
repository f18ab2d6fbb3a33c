"""Ancestral sampling of masked diffusion [Paper §2.2, Algorithm 2], select first, then sample.

From time t to s = t - 1/K each masked position unmasks with probability (t - s) / t, whatever the logits say, so the
step at which a position unmasks is uniform over the K steps and can be drawn up front. A step then runs the head only
on the positions that unmask. A row in which a step unmasks nothing is not changed by it, so every row goes straight to
its next step with something to do. The law is exactly that of ancestral sampling.

Which row runs when is known before the network first runs, so it is worked out on the host and sent once.

The `spaced` order is the same but for which positions share a step: those of one step lie K masked positions apart, in
a random order of the steps. Words drawn at once do not see each other, and neighbours depend on each other most; what
far ones share, a latent can tell them. A model of masked diffusion was trained for any set of masks, so it is as much
a way to write with it as any other order.

What is written first is written on the least. With a spacing c below K, positions of a step lie c apart, so that c
steps write all of them; then those of the first step are masked again and written anew given all the rest, and so on in
the same order until the steps are spent: Gibbs sampling, a block at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.samplers.denoiser import Ask, Callback, Denoiser, Steps, draw_tokens, run_steps, send
from rmdm.samplers.noise import TOKEN_STREAM, UNMASK_STREAM, row_uniform
from rmdm.samplers.settings import SampleSettings

NEVER = -1
"""Step of a position that is given."""
SPARSE = 16
"""Steps a position beyond which most are empty, and tables of all of them take more than they spare."""


@torch.no_grad()
def sample_ancestral(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    *,
    skip: bool = True,
) -> Tensor:
    """Fill the masked positions of `x_BL` in `settings.steps` steps; `callback(step, x_BL)` follows each step.

    With a callback all rows make the same step at the same time. `skip=False` is the plain algorithm, in which every
    row runs at every step; the law is the same, and so is the text but for float ties.
    """
    return run_steps(ancestral_steps(denoiser.mask_id, x_BL, keys_B, settings, callback, skip=skip), denoiser)


def ancestral_steps(
    mask_id: int,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    sure_BL: Tensor | None = None,
    *,
    skip: bool = True,
) -> Steps:
    """The same, asking for the network; `sure_BL` gets the probability of each token that is written."""
    K, (B, L) = settings.steps, x_BL.shape
    u_BL, masked_BL = row_uniform(keys_B, 0, UNMASK_STREAM, L), (x_BL == mask_id).cpu().numpy()
    sweep = min(K, settings.spacing or K)  # as many steps write every position once
    is_spaced = settings.sampler == "spaced"
    step_BL = spaced_steps(u_BL, masked_BL, sweep) if is_spaced else np.floor(u_BL * K).astype(np.int64)
    step_BL[~masked_BL] = NEVER
    if callback is None and skip and sweep == K:
        step_BL = _without_gaps(step_BL)
        K = sweep = int(step_BL.max(initial=NEVER)) + 1
    schedule = _Schedule.of(step_BL, sweep, row_uniform(keys_B, 0, TOKEN_STREAM, L), x_BL.device)
    x_BL, everyone = x_BL.clone(), torch.arange(B, device=x_BL.device)
    for step in range(K):
        swept, at = divmod(step, sweep)
        if swept and at == 0:
            # A row that is written all at once would be drawn again from the same law.
            step_BL = np.where(step_BL.max(axis=1, keepdims=True) > 0, step_BL, NEVER)
            schedule = _Schedule.of(step_BL, sweep, row_uniform(keys_B, swept, TOKEN_STREAM, L), x_BL.device)
        row_N, place_N, local_N, noise_N, rows_R, count_R = schedule.at(at)
        if not skip:
            local_N, rows_R, count_R = row_N, everyone, (step_BL == at).sum(axis=1)
        if len(rows_R):
            if swept:
                x_BL[row_N, place_N] = mask_id
            some_R = rows_R if len(rows_R) < B else None
            x_RL = x_BL if some_R is None else x_BL[some_R]
            hidden = yield Ask(x_RL, some_R, local_N, place_N, count_R)
            assert hidden is not None
            x_BL[row_N, place_N], p_N = draw_tokens(hidden, noise_N, settings, sure=sure_BL is not None)
            if sure_BL is not None:
                sure_BL[row_N, place_N] = p_N
        if callback is not None:
            callback(step, x_BL)
    return x_BL


def spaced_steps(u_BL: NDArray[np.float64], masked_BL: NDArray[np.bool_], steps: int) -> NDArray[np.int64]:
    """The step of every masked position: the n-th of a row has that of its class n mod K, in the order u puts them in.

    With as many steps as positions, or more, each has a step of its own.
    """
    period_B1 = np.maximum(np.minimum(masked_BL.sum(axis=1, keepdims=True), steps), 1)
    classes = int(period_B1.max(initial=1))
    u_BC = np.where(np.arange(classes) < period_B1, u_BL[:, :classes], np.inf)
    step_BC = np.argsort(np.argsort(u_BC, axis=1, kind="stable"), axis=1)
    class_BL = (np.cumsum(masked_BL, axis=1) - 1) % period_B1
    return np.take_along_axis(step_BC, class_BL, axis=1)


def _without_gaps(step_BL: NDArray[np.int64]) -> NDArray[np.int64]:
    """The steps of each row renumbered 0, 1, ... so that none is empty before its last."""
    if step_BL.max(initial=NEVER) > SPARSE * step_BL.shape[1]:
        found, number_BL = np.unique(step_BL, return_inverse=True)
        step_BL = number_BL.reshape(step_BL.shape) - (found[0] == NEVER)
    row_B1, steps = np.arange(len(step_BL))[:, None], int(step_BL.max(initial=NEVER)) + 1
    has_BK = np.zeros((len(step_BL), steps + 1), dtype=bool)  # the last column is that of `NEVER`
    has_BK[row_B1, step_BL] = True
    number_BK = np.cumsum(has_BK, axis=1) - 1
    number_BK[:, -1] = NEVER
    return number_BK[row_B1, step_BL]


@dataclass(frozen=True)
class _Schedule:
    """What unmasks when, on the device: flat lists sorted by step, and where each step begins."""

    row_M: Tensor
    place_M: Tensor
    local_M: Tensor
    """Number of the row among those that run in the step."""
    noise_M: Tensor
    rows_Q: Tensor
    """Rows that run, step after step."""
    count_Q: NDArray[np.int64]
    """How many places each of them unmasks."""
    token_start: list[int]
    row_start: list[int]

    @staticmethod
    def of(step_BL: NDArray[np.int64], steps: int, noise_BL: NDArray[np.float64], device: torch.device) -> "_Schedule":
        """The schedule in which position (b, l) unmasks at step_BL[b, l]."""
        B = len(step_BL)
        row_M, place_M = np.nonzero(step_BL != NEVER)
        # Of small numbers numpy sorts by digits, many times as fast.
        small = np.int16 if steps < 2**15 else np.int64
        order_M = np.argsort(step_BL[row_M, place_M].astype(small), kind="stable")
        row_M, place_M = row_M[order_M], place_M[order_M]
        step_M = step_BL[row_M, place_M]
        run_M = step_M * B + row_M
        if steps > SPARSE * step_BL.shape[1]:
            run_Q, number_M, count_Q = np.unique(run_M, return_inverse=True, return_counts=True)
        else:  # counting needs no sorting
            count_KB = np.bincount(run_M, minlength=steps * B)
            run_Q, number_M = np.nonzero(count_KB)[0], (np.cumsum(count_KB > 0) - 1)[run_M]
            count_Q = count_KB[run_Q]
        token_start = np.searchsorted(step_M, np.arange(steps + 1))
        row_start = np.searchsorted(run_Q, np.arange(steps + 1) * B)
        return _Schedule(
            row_M=send(row_M, device),
            place_M=send(place_M, device),
            local_M=send(number_M - row_start[step_M], device),
            noise_M=send(noise_BL[row_M, place_M], device),
            rows_Q=send(run_Q % max(B, 1), device),
            count_Q=count_Q,
            token_start=token_start.tolist(),
            row_start=row_start.tolist(),
        )

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, NDArray[np.int64]]:
        """row_N, place_N, local_N and noise_N of the positions that unmask in a step, its rows_R and their counts."""
        n = slice(self.token_start[step], self.token_start[step + 1])
        r = slice(self.row_start[step], self.row_start[step + 1])
        return self.row_M[n], self.place_M[n], self.local_M[n], self.noise_M[n], self.rows_Q[r], self.count_Q[r]
