"""The latent where some tokens x_U are given: it should follow p(z | x_U), not the prior.

`resample` draws R latents a row from the model's own source and keeps one, with probability proportional to

    p(x_U | z~) ~ prod_k prod_{i in U_k} p(x_i | x_{U_1}, ..., x_{U_{k-1}}, z~)

where U_1, ..., U_4 are random quarters of U, the same for the R draws of a row: a chain-rule estimate in four forwards.
As R grows the kept latent follows p(z | x_U) under it (sampling importance resampling).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.data.order import hash64
from rmdm.samplers.denoiser import Denoiser, send
from rmdm.samplers.latents import LatentSource, Tau
from rmdm.samplers.noise import row_uniform

RESAMPLE_STREAM, QUARTER_STREAM, CHOICE_STREAM = 120, 121, 122
BLOCKS = 4
CHUNK_ROWS = 512
"""Rows scored at once."""


def resample(
    backbone: DiT,
    source: LatentSource,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    scored_BL: NDArray[np.bool_],
    *,
    draws: int,
    tau: Tau = 1.0,
) -> Tensor:
    """z~ of each row, (B, G, d_z): one of `draws`, weighted by how likely it makes the tokens at `scored_BL`."""
    parts = []
    size = max(1, CHUNK_ROWS // draws)
    for first in range(0, len(x_BL), size):
        rows = slice(first, first + size)
        keys_R = draw_keys(keys_B[rows], draws)
        with torch.autocast(x_BL.device.type, enabled=False):  # the flow chooses its own precision
            zt_RGd = source.draw(keys_R, tau)
        score_R = log_likelihood(backbone, zt_RGd, x_BL[rows], keys_B[rows], scored_BL[rows])
        weight_BR = score_R.view(-1, draws).softmax(dim=1).cumsum(dim=1)
        u_B = send(row_uniform(keys_B[rows], 0, CHOICE_STREAM, 1)[:, 0], x_BL.device)
        pick_B = torch.searchsorted(weight_BR, u_B[:, None] * weight_BR[:, -1:], right=True).squeeze(1)
        pick_B = pick_B.clamp_max(draws - 1)
        parts.append(zt_RGd.unflatten(0, (-1, draws))[torch.arange(len(pick_B), device=x_BL.device), pick_B])
    return torch.cat(parts)


def draw_keys(keys_B: NDArray[np.int64], draws: int) -> NDArray[np.int64]:
    """Keys of the draws of each row, one row's after another's, (B * draws,)."""
    keys = [hash64(0, number, RESAMPLE_STREAM, keys_B).view(np.int64) for number in range(draws)]
    return np.stack(keys, axis=1).ravel()


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
    denoiser = Denoiser(backbone, backbone.latent(zt_RGd))
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
