"""Likelihoods of rows, and bounds on them, with their errors.

Autoregressive models give -log p(x) exactly. Masked diffusion bounds it by

    int_0^1 1/t E [ sum_{i masked} -log p(x_i | x_t) ] dt,

estimated as in training: exactly k = ceil(t n) of a row's n scored positions are masked, with weight n/k, t over (0, 1]
without an epsilon. In every draw t is stratified over all rows, and a row's draws lie evenly spaced in t.

With a latent, p(x) = int p(z~) p(x | z~) dz~ with the prior p = N(0, tau^2 I), and for every law q that may see the row

    -log p(x) <= E_q [ -log p(x | z~) ] + KL(q || p).

Stage II's own q = N(mu, s^2 I), with mu = P z_0 / sqrt(1 + sigma^2) and s^2 = sigma^2 / (1 + sigma^2), is the end
a = 1 of a family of laws of d numbers

    q_a = N(a mu, v I),    v = 1 - a^2 (1 - s^2),
    KL(q_a || p) = 1/2 [ d (v / tau^2 - 1 - ln(v / tau^2)) + a^2 |mu|^2 / tau^2 ],

whose other end a = 0 is the prior with tau = 1, where the KL is 0. The conditional perplexity is a = 1 without the KL.
All of this is about models conditioned on z_0. For one conditioned on e, which the flow draws, the law of z~ is a
mixture without a closed-form KL; the bound with e drawn by the flow, whatever the row, holds as the prior's does.

Shapes: N rows, M documents, R draws, L positions, G groups, K numbers of a group of z, d_z after projection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.cross_entropy import linear_nll
from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.backbone.noise import normal
from rmdm.data.order import hash64, permuted, uniform
from rmdm.evaluation.sets import ScoredRows
from rmdm.precision import autocast
from rmdm.processes.objective import MASK_STREAM, TIME_STREAM
from rmdm.samplers.latents import LatentSource, Tau

KEY_STREAM = 140
"""Stream of the rows' keys, of which their latents are drawn."""
NOISE_STREAM = 3005
"""Stream of that noise; see `backbone.noise`."""
BATCH_TOKENS = {"cuda": 131_072, "cpu": 4096}
SEED = 2**32 + 5

Condition = Callable[[NDArray[np.int64], int], Tensor | None]
"""The condition c of some rows (by their numbers) in a draw."""


@dataclass(frozen=True)
class Nats:
    """Nats of every row in every draw: of its text, and of its PAD."""

    text_RN: NDArray[np.float64]
    pad_RN: NDArray[np.float64]

    def rows(self, with_pad: bool) -> NDArray[np.float64]:
        """(R, N), PAD counted or not."""
        return self.text_RN + self.pad_RN if with_pad else self.text_RN


@dataclass(frozen=True)
class Figure:
    """Mean nats a token with two standard errors."""

    nats: float
    error: float | None
    """Of the documents as a sample of all such text, the noise of the draws included; None for a single one."""
    draw_error: float | None
    """Of the draws alone, for these very rows; None for a single draw."""
    tokens: int
    total: float
    """Nats of all the rows."""

    @staticmethod
    def of(
        nats_RN: NDArray[np.float64], tokens_N: NDArray[np.int64], document_N: NDArray[np.int64] | None = None
    ) -> "Figure":
        """sum of nats / sum of tokens, a ratio of two means over documents, which rows are where nothing else is said.

        Rows of one document are easy or hard together, so that a set has fewer independent parts than rows. Draws whose
        times lie evenly spaced vary against each other, so their spread overstates the error of their mean.
        """
        R, N = nats_RN.shape
        _, document_N = np.unique(np.arange(N) if document_N is None else document_N, return_inverse=True)
        tokens = int(tokens_N.sum())
        nats_N = nats_RN.mean(axis=0)
        ratio = float(nats_N.sum()) / tokens
        spread_M = np.bincount(document_N, nats_N - ratio * tokens_N)
        M = len(spread_M)
        error = math.sqrt(M / (M - 1) * float((spread_M**2).sum())) / tokens if M > 1 else None
        draws = nats_RN.sum(axis=1) / tokens
        draw_error = float(draws.std(ddof=1)) / math.sqrt(R) if R > 1 else None
        return Figure(ratio, error, draw_error, tokens, float(nats_N.sum()))


def row_nats(
    backbone: DiT,
    rows: ScoredRows,
    condition: Condition | None = None,
    *,
    draws: int = 1,
    seed: int = SEED,
    batch: int | None = None,
) -> Nats:
    """-log p of every row, or its bound, under the condition; an autoregressive model needs a single draw."""
    device, (N, L) = backbone.embed.weight.device, rows.x_NL.shape
    draws = 1 if backbone.causal else draws
    batch = batch or max(1, BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"]) // L)
    text_RN, pad_RN = np.zeros((draws, N)), np.zeros((draws, N))
    order_N = permuted(seed, np.zeros(N, dtype=np.int64), np.arange(N), N)
    for draw in range(draws):
        for first in range(0, N, batch):
            index = np.arange(first, min(first + batch, N))
            part = rows.at(index)
            if backbone.causal:
                seen_BL, asked_BL, weight_B, t_B = shifted(part.x_NL, backbone.mask_id), part.scored_NL, 1.0, None
            else:
                places = (order_N[index] + draw * N // draws) % N
                t_B = (places + 1.0 - uniform(seed, draw, TIME_STREAM, places)) / N
                u_BL = uniform(seed, draw, MASK_STREAM, index[:, None] * L + np.arange(L))
                asked_BL, weight_B = masks(t_B, u_BL, part.scored_NL)
                seen_BL = np.where(asked_BL, backbone.mask_id, part.x_NL)
                t_B = np.where(asked_BL, u_BL, 0.0).max(axis=1)
            c_BGC = condition(index, draw) if condition is not None else None
            nll_BL = nll(backbone, seen_BL, part.x_NL, asked_BL, c_BGC, t_B) * np.reshape(weight_B, (-1, 1))
            text_RN[draw, index] = (nll_BL * part.text_NL).sum(axis=1)
            pad_RN[draw, index] = (nll_BL * ~part.text_NL).sum(axis=1)
    return Nats(text_RN, pad_RN)


def shifted(x_BL: NDArray[np.integer], start_id: int) -> NDArray[np.int64]:
    """Rows behind the start symbol, without their last token."""
    start_B1 = np.full((len(x_BL), 1), start_id, dtype=np.int64)
    return np.concatenate([start_B1, x_BL[:, :-1].astype(np.int64)], axis=1)


def masks(
    t_B: NDArray[np.float64], u_BL: NDArray[np.float64], scored_BL: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """k = ceil(t n) of each row's n scored positions, those with the smallest u, and the weight n / k."""
    n_B = scored_BL.sum(axis=1)
    k_B = np.clip(np.ceil(t_B * n_B), 1, n_B).astype(np.int64)
    ranked = np.where(scored_BL, u_BL, np.inf)
    threshold_B1 = np.take_along_axis(np.sort(ranked, axis=1), k_B[:, None] - 1, axis=1)
    return ranked <= threshold_B1, n_B / k_B


@torch.no_grad()
def nll(
    backbone: DiT,
    seen_BL: NDArray[np.integer],
    x_BL: NDArray[np.integer],
    asked_BL: NDArray[np.bool_],
    c_BGC: Tensor | None = None,
    t_B: NDArray[np.float64] | None = None,
    *,
    normalised: bool = False,
) -> NDArray[np.float64]:
    """-log p of the true token where it is asked for, and 0 elsewhere, (B, L).

    SEDD's is the score entropy, which its bound is made of, unless `normalised` asks for its prediction alone.
    """
    device = backbone.embed.weight.device
    flat = np.flatnonzero(asked_BL)
    with autocast(device):
        if backbone.time is not None:
            assert t_B is not None
            c_BGC = backbone.time(torch.from_numpy(t_B).float().to(device))
        seen = torch.from_numpy(seen_BL.astype(np.int64)).to(device)
        h_ND = backbone(seen, c_BGC=c_BGC, at_N=torch.from_numpy(flat).to(device))
    # The head in full precision: the figure is a mean of its logarithms.
    h_ND = h_ND.float()
    target_N = torch.from_numpy(x_BL.ravel()[flat].astype(np.int64)).to(device)
    score_entropy = backbone.time is not None and not normalised
    nll_N = linear_nll(h_ND, backbone.head.weight, target_N, backbone.vocab_size, score_entropy)
    out = np.zeros(asked_BL.size)
    out[flat] = nll_N.double().cpu().numpy()
    return out.reshape(asked_BL.shape)


def row_keys(index: NDArray[np.int64], draw: int, seed: int) -> NDArray[np.int64]:
    """One key for each row and draw."""
    return hash64(seed, draw, KEY_STREAM, index).view(np.int64)


@dataclass
class Latents:
    """The latents that some rows may be scored with."""

    latent: Latent
    source: LatentSource
    z_NGK: Tensor | None
    """z_0 or e of each row; None where the latent has nothing to do with the text."""
    seed: int = SEED

    @property
    def variance(self) -> float:
        """s^2 of q(z~ | x)."""
        return self.latent.sigma**2 / (1 + self.latent.sigma**2)

    def at(self, index: NDArray[np.integer]) -> "Latents":
        """Those of some of the rows."""
        z_NGK = None if self.z_NGK is None else self.z_NGK[torch.from_numpy(np.asarray(index))]
        return Latents(self.latent, self.source, z_NGK, self.seed)

    def mean(self, index: NDArray[np.int64]) -> Tensor:
        """mu = P z_0 / sqrt(1 + sigma^2) of rows, (B, G, d_z)."""
        assert self.z_NGK is not None
        z = self.z_NGK[torch.from_numpy(index)].to(self.latent.matrix.device).float()
        is_projected = z.shape[-1] == self.latent.project != self.latent.dim
        return (z if is_projected else z @ self.latent.matrix.T) / math.sqrt(1 + self.latent.sigma**2)

    def posterior(self, a: float = 1.0) -> Condition:
        """The condition with z~ from q_a."""
        spread = math.sqrt(1 - a**2 * (1 - self.variance))
        return lambda index, draw: self.latent(a * self.mean(index) + spread * self._noise(index, draw))

    def prior(self, tau: Tau = 1.0) -> Condition:
        """The condition with z~ drawn as sampling draws it, whatever the row."""
        if self.source.flow is None:
            scale = self.source.temperature(tau)
            return lambda index, draw: self.latent(scale * self._noise(index, draw))
        return lambda index, draw: self.latent(self.source.draw(row_keys(index, draw, self.seed), tau))

    def without(self) -> Condition:
        """The learned null."""
        return lambda index, draw: self.latent.without(len(index))

    def kl(self, index: NDArray[np.int64], tau: Tau = 1.0, a: float = 1.0) -> NDArray[np.float64]:
        """KL(q_a || N(0, tau^2 I)) of rows, in nats."""
        mu = a * self.mean(index).double().flatten(1).cpu().numpy()
        return gaussian_kl(mu, 1 - a**2 * (1 - self.variance), self.source.temperature(tau) ** 2)

    def _noise(self, index: NDArray[np.int64], draw: int) -> Tensor:
        keys = torch.from_numpy(row_keys(index, draw, self.seed)).to(self.latent.matrix.device)
        return normal(keys, (self.latent.groups, self.latent.project), NOISE_STREAM)


def gaussian_kl(mu_Bd: NDArray[np.float64], variance: float, prior: float) -> NDArray[np.float64]:
    """KL(N(mu, variance I) || N(0, prior I)) of each row; infinite for a point."""
    d, ratio = mu_Bd.shape[1], variance / prior
    if ratio == 0:
        return np.full(len(mu_Bd), math.inf)
    return 0.5 * (d * (ratio - 1 - math.log(ratio)) + (mu_Bd**2).sum(axis=1) / prior)
