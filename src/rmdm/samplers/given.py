"""The latent where some tokens x_U are given: it should follow p(z | x_U), not the prior.

`resample` draws R latents a row from the model's own source and keeps one, with probability proportional to

    p(x_U | z~) ~ prod_k prod_{i in U_k} p(x_i | x_{U_1}, ..., x_{U_{k-1}}, z~)

where U_1, ..., U_4 are random quarters of U, the same for all latents of a row: a chain-rule estimate in four forwards.
Where the encoder can be had, its latent of the given text takes the place of one of the R. That is no draw, so what is
kept of the first round does not follow p(z | x_U) yet: it is where the rounds start from.

Where a latent says much about its row, even the best of a few draws hardly fits the tokens. So more rounds follow, each
with R draws near the latent that was kept: with nu the noise it is made of,

    c = a nu + b eps,    nu_r = a c + b eps_r,    a^2 + b^2 = 1,    eps, eps_r ~ N(0, I),

and one of nu, nu_1, ..., nu_R is kept, again by weight. Given c all of them are alike a priori, so each round leaves
p(nu | x_U) as it is [Tjelmeland 2004; preconditioned Crank-Nicolson with many proposals], whatever its b.
"""

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.backbone.noise import normal
from rmdm.data.order import hash64
from rmdm.samplers.denoiser import Denoiser, fixed_rows, in_blocks, send
from rmdm.samplers.latents import LatentSource, Tau
from rmdm.samplers.noise import row_uniform

Result = TypeVar("Result")
RESAMPLE_STREAM, QUARTER_STREAM, CHOICE_STREAM = 120, 121, 122
MOVE_STREAM = 3003
"""Stream of eps; see `backbone.noise`."""
BLOCKS = 4
CHUNK_ROWS = {"cuda": 512, "cpu": 64}
"""Latents scored at once: as many as fill the device, for others may be waiting for it."""
FIRST_MOVE, LAST_MOVE = 0.5, 0.15
"""b of the first and the last of the rounds that move; between them it falls by equal factors."""


def resample(
    backbone: DiT,
    source: LatentSource,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    scored_BL: NDArray[np.bool_],
    *,
    draws: int,
    rounds: int = 1,
    tau: Tau = 1.0,
    start_BGK: Tensor | None = None,
) -> Tensor:
    """z~ of each row, (B, G, d_z), that fits its tokens at `scored_BL`: `rounds` times one of `draws` is kept.

    `start_BGK` is the noise of a latent that takes the place of the first draw.
    """
    how = {"draws": draws, "rounds": rounds, "tau": tau, "start_BGK": start_BGK}
    return to_end(resample_steps(backbone, source, x_BL, keys_B, scored_BL, **how))


def to_end(steps: Generator[None, None, Result]) -> Result:
    """What comes of work that pauses, without the pauses."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        return done.value


def under(
    context: Callable[[], AbstractContextManager[Any]], steps: Generator[None, None, Result]
) -> Generator[None, None, Result]:
    """Work that pauses, each stretch of it in a context of its own: none holds for what others do in the pauses."""
    while True:
        with context():
            try:
                next(steps)
            except StopIteration as done:
                return done.value
        yield


def resample_steps(
    backbone: DiT,
    source: LatentSource,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    scored_BL: NDArray[np.bool_],
    *,
    draws: int,
    rounds: int,
    tau: Tau,
    start_BGK: Tensor | None = None,
) -> Generator[None, None, Tensor]:
    """The same with a pause after each round."""
    size = max(1, CHUNK_ROWS.get(x_BL.device.type, 64) // draws)
    parts = []
    for first in range(0, len(x_BL), size):
        part = slice(first, first + size)
        chain = _Chain(backbone, source, x_BL[part], keys_B[part], scored_BL[part], tau)
        parts.append((yield from chain.run(draws, rounds, start_BGK[part] if start_BGK is not None else None)))
    return torch.cat(parts)


class _Chain:
    """The rounds of some rows."""

    def __init__(
        self,
        backbone: DiT,
        source: LatentSource,
        x_BL: Tensor,
        keys_B: NDArray[np.int64],
        scored_BL: NDArray[np.bool_],
        tau: Tau,
    ) -> None:
        self.backbone, self.source, self.x_BL, self.keys_B, self.tau = backbone, source, x_BL, keys_B, tau
        self.scored_BL = scored_BL

    def run(self, draws: int, rounds: int, start_BGK: Tensor | None) -> Generator[None, None, Tensor]:
        """The latents that are kept at last, (B, G, d_z), with a pause after each round."""
        B = len(self.keys_B)
        keys_BR = round_keys(self.keys_B, 0, draws)
        noise_BRGK = self.source.noise(keys_BR.ravel()).unflatten(0, (B, draws))
        if start_BGK is not None:
            noise_BRGK[:, 0] = start_BGK
        zt_BRGd, score_BR = self._scored(noise_BRGK)
        noise, zt, score_B = self._keep(0, noise_BRGK, zt_BRGd, score_BR)
        for number in range(1, rounds):
            yield
            b = FIRST_MOVE * (LAST_MOVE / FIRST_MOVE) ** ((number - 1) / max(1, rounds - 2))
            noise_BRGK = self._near(noise, number, draws, b)
            zt_BRGd, score_BR = self._scored(noise_BRGK)
            noise, zt, score_B = self._keep(
                number,
                torch.cat((noise[:, None], noise_BRGK), dim=1),
                torch.cat((zt[:, None], zt_BRGd), dim=1),
                torch.cat((score_B[:, None], score_BR), dim=1),
            )
        return zt

    def _near(self, noise_BGK: Tensor, number: int, draws: int, b: float) -> Tensor:
        """The proposals of a round, (B, R, G, K)."""
        a, B = math.sqrt(1 - b * b), len(noise_BGK)
        keys = send(round_keys(self.keys_B, number, draws + 1).ravel(), noise_BGK.device)
        eps = normal(keys, tuple(noise_BGK.shape[1:]), MOVE_STREAM).unflatten(0, (B, draws + 1))
        centre_BGK = a * noise_BGK + b * eps[:, 0]
        return a * centre_BGK[:, None] + b * eps[:, 1:]

    def _scored(self, noise_BRGK: Tensor) -> tuple[Tensor, Tensor]:
        """z~ (B, R, G, d_z) and log p(x_U | z~) (B, R)."""
        shape = noise_BRGK.shape[:2]
        zt = self.source.of_noise(noise_BRGK.flatten(0, 1), self.tau)
        score = log_likelihood(self.backbone, zt, self.x_BL, self.keys_B, self.scored_BL)
        return zt.unflatten(0, shape), score.view(shape)

    def _keep(
        self, number: int, noise_BRGK: Tensor, zt_BRGd: Tensor, score_BR: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One of R by its weight."""
        cdf_BR = score_BR.softmax(dim=1).cumsum(dim=1)
        u_B = send(row_uniform(self.keys_B, number, CHOICE_STREAM, 1)[:, 0], cdf_BR.device)
        kept_B = torch.searchsorted(cdf_BR, u_B[:, None] * cdf_BR[:, -1:], right=True).squeeze(1)
        kept_B = kept_B.clamp_max(score_BR.shape[1] - 1)
        rows_B = torch.arange(len(kept_B), device=kept_B.device)
        return noise_BRGK[rows_B, kept_B], zt_BRGd[rows_B, kept_B], score_BR[rows_B, kept_B]


def round_keys(keys_B: NDArray[np.int64], number: int, draws: int) -> NDArray[np.int64]:
    """Keys of the draws of each row in a round, (B, draws)."""
    start_B1 = hash64(0, number, RESAMPLE_STREAM, keys_B)[:, None]
    return hash64(0, 0, RESAMPLE_STREAM, start_B1 + np.arange(draws, dtype=np.uint64)).view(np.int64)


@torch.no_grad()
def log_likelihood(
    backbone: DiT,
    zt_RGd: Tensor,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    scored_BL: NDArray[np.bool_],
) -> Tensor:
    """log p(x_U | z~) of the R / B latents of each row, (R,) in float64, U the positions of `scored_BL`.

    Given tokens that are not scored are seen from the start.
    """
    assert backbone.latent is not None
    draws = len(zt_RGd) // len(x_BL)
    rows = fixed_rows(backbone)
    denoiser = Denoiser(backbone, in_blocks(backbone.latent, zt_RGd, rows), block=rows)
    block_BL = send(blocks(keys_B, scored_BL), x_BL.device)
    x_RL, block_RL = (each.repeat_interleave(draws, dim=0) for each in (x_BL, block_BL))
    score_R = torch.zeros(len(x_RL), dtype=torch.float64, device=x_BL.device)
    for block in range(BLOCKS):
        local_N, place_N = torch.nonzero(block_RL == block, as_tuple=True)
        if not len(local_N):
            continue
        seen_RL = torch.where(block_RL >= block, backbone.mask_id, x_RL)
        for part, logits in denoiser.chunks(seen_RL, None, local_N, place_N):
            token_M = x_RL[local_N[part], place_N[part]]
            log_p_M = logits.double().log_softmax(dim=-1).gather(1, token_M[:, None]).squeeze(1)
            score_R.index_add_(0, local_N[part], log_p_M)
    return score_R


def blocks(keys_B: NDArray[np.int64], scored_BL: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The block each scored position is revealed in, of equal size but for one, and -1 elsewhere."""
    u_BL = np.where(scored_BL, row_uniform(keys_B, 0, QUARTER_STREAM, scored_BL.shape[1]), np.inf)
    rank_BL = np.argsort(np.argsort(u_BL, axis=1, kind="stable"), axis=1, kind="stable")
    count_B1 = scored_BL.sum(axis=1, keepdims=True)
    return np.where(scored_BL, rank_BL * BLOCKS // np.maximum(count_B1, 1), -1)
