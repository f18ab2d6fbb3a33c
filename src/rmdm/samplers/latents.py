"""Where the latent of a request comes from: drawn once [Paper Algorithm 2] before any token, or read off a text.

Either belongs to its row: it is a function of the row's key and of nothing else in the batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.latent import NOISE_STREAM, Latent
from rmdm.backbone.noise import normal
from rmdm.encoders.encoder import Encoder, Pieces
from rmdm.encoders.whitening import Whitening
from rmdm.errors import ConfigError, DataError
from rmdm.meanflow.flow import DRAW_ROWS, Flow
from rmdm.samplers.denoiser import in_blocks

DRAW_STREAM, FILL_STREAM = 3001, 3002
"""Streams of the noise a latent is drawn from, and of the noise in groups without text."""
READ_TOKENS = {"cuda": 65_536, "cpu": 4096}
"""Encoder tokens taken through at once."""

Tau = float | Literal["paper"]
MOST_TAU = 1000


@dataclass
class LatentSource:
    """Draws z~ for a trained model."""

    latent: Latent
    flow: Flow | None = None
    """Draws e from noise, for models conditioned on e; without it z~ is drawn from its prior."""

    def draw(self, keys_B: np.ndarray, tau: Tau = 1.0) -> Tensor:
        """z~, (B, G, d_z); tau scales the noise it is drawn from, and `paper` leaves out the noise of training."""
        return self.of_noise(self.noise(keys_B), tau)

    def noise(self, keys_B: np.ndarray) -> Tensor:
        """The standard normal numbers z~ is made of, (B, G, K): where the flow starts, and the noise of training."""
        latent, keys = self.latent, torch.from_numpy(keys_B).to(self.latent.matrix.device)
        start_BGD = normal(keys, (latent.groups, latent.project if self.flow is None else latent.dim), DRAW_STREAM)
        if self.flow is None:
            return start_BGD
        return torch.cat((start_BGD, normal(keys, (latent.groups, latent.project), NOISE_STREAM)), dim=-1)

    def of_noise(self, noise_BGK: Tensor, tau: Tau = 1.0) -> Tensor:
        """z~ of such numbers."""
        latent, scale = self.latent, self.temperature(tau)
        if self.flow is None:
            return scale * noise_BGK
        start_BGD, eps_BGd = noise_BGK.split((latent.dim, latent.project), dim=-1)
        sigma, scale = (0.0, 1.0) if tau == "paper" else (latent.sigma, scale)
        with torch.autocast(start_BGD.device.type, enabled=False):  # the flow chooses its own precision
            e_BGD = to_embedding(self.flow, scale * start_BGD).to(eps_BGd.device)
            seen_BGd = (e_BGD.double() @ latent.matrix.T.double()).float()  # no row rounds by how many there are
            return (seen_BGd + sigma * eps_BGd) / math.sqrt(1 + latent.sigma**2)

    def noise_at(self, z_BGD: Tensor, keys_B: np.ndarray, tau: Tau = 1.0) -> Tensor:
        """The numbers from which `of_noise` leads to the latent of `z_BGD`, what stage II is conditioned on."""
        latent, scale = self.latent, self.temperature(tau)
        keys = torch.from_numpy(keys_B).to(z_BGD.device)
        if self.flow is None:
            return latent.noisy(z_BGD, keys) / scale
        with torch.autocast(z_BGD.device.type, enabled=False):
            start_BGD = self.flow.to_latent(z_BGD) / (1.0 if tau == "paper" else scale)
        return torch.cat((start_BGD, normal(keys, (latent.groups, latent.project), NOISE_STREAM)), dim=-1)

    def temperature(self, tau: Tau) -> float:
        """tau as a number: z~ of the prior has this standard deviation."""
        if tau == "paper":
            return 1 / math.sqrt(1 + self.latent.sigma**2)
        if isinstance(tau, str) or not 0 < tau <= MOST_TAU:
            raise ConfigError(f"latent_temperature={tau} is not a positive number up to {MOST_TAU}; use 1.0 or 'paper'")
        return float(tau)


@dataclass
class LatentReader:
    """Reads the latent of texts as training did: encoder, pooling, whitening and, for models given z_0, the flow."""

    encoder: Encoder
    whitening: Whitening
    latent: Latent
    flow: Flow
    gives_z0: bool
    """Whether the model is conditioned on z_0, or on e."""
    mask_id: int

    def __post_init__(self) -> None:
        channels = len(self.whitening.mean_D)
        if self.encoder.dim != channels:
            raise DataError(
                f"encoder {self.encoder.name!r} has {self.encoder.dim} channels, but the model was trained with one of "
                f"{channels}; restore the encoder it was trained with"
            )
        self.whitening = self.whitening.to(self.encoder.device)
        self._reads_ids = self._sees_masks()

    def read(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Whitened embeddings (B, G, D_z) and which groups have text (B, G); masked positions are no text."""
        G, device = self.latent.groups, self.latent.matrix.device
        pieces = [self._without_masks(piece) for piece in self.encoder.pieces(x_BL, lengths_B, G)]
        present_BG = np.zeros((len(x_BL), G), dtype=bool)
        for row, piece in enumerate(pieces):
            present_BG[row, piece.group_N] = True
        # A group without a token of its own borrows its neighbour's: right at the end of a text, not in gaps.
        is_given = (x_BL != self.mask_id) & (np.arange(x_BL.shape[1]) < lengths_B[:, None])
        present_BG &= is_given.reshape(len(x_BL), G, -1).any(axis=2)
        most = READ_TOKENS.get(self.encoder.device.type, READ_TOKENS["cuda"])
        size = max(1, most // max(len(piece.ids_T) for piece in pieces))
        parts = [self.encoder.embed(pieces[first : first + size], G) for first in range(0, len(pieces), size)]
        e_BGD = self.whitening.apply(torch.cat(parts)).to(device)
        if not torch.isfinite(e_BGD).all():
            raise DataError(f"encoder {self.encoder.name!r} gives NaN or infinity for this text; check its files")
        return e_BGD, torch.from_numpy(present_BG).to(device)

    def fill(self, e_BGD: Tensor, present_BG: Tensor, keys_B: np.ndarray) -> Tensor:
        """The embeddings with the row's own noise in groups without text."""
        keys = torch.from_numpy(keys_B).to(e_BGD.device)
        noise_BGD = normal(keys, (self.latent.groups, self.latent.dim), FILL_STREAM)
        return torch.where(present_BG[..., None], e_BGD, noise_BGD)

    def condition(self, e_BGD: Tensor) -> Tensor:
        """What stage II is conditioned on: e or z_0."""
        return self.flow.to_latent(e_BGD) if self.gives_z0 else e_BGD

    def between(self, a_BGD: Tensor, b_BGD: Tensor, weight: float) -> Tensor:
        """What stage II is conditioned on between two embeddings, from the arc between their z_0.

        There every point is as likely as the ends, which a mixture of two embeddings is not. What is lost on the way to
        z_0 and back is made up for in proportion, so that the ends are the ends.
        """
        z_BGD = slerp(self.flow.to_latent(a_BGD), self.flow.to_latent(b_BGD), weight)
        if self.gives_z0:
            return z_BGD
        lost_a, lost_b = (e - to_embedding(self.flow, self.flow.to_latent(e)) for e in (a_BGD, b_BGD))
        return to_embedding(self.flow, z_BGD) + (1 - weight) * lost_a + weight * lost_b

    def _sees_masks(self) -> bool:
        """Whether the encoder is handed the model's own ids, masks included, and not its text."""
        x_1G = np.full((1, self.latent.groups), self.mask_id)
        ids_T = self.encoder.pieces(x_1G, np.array([self.latent.groups]), self.latent.groups)[0].ids_T
        return int((ids_T == self.mask_id).sum()) >= self.latent.groups

    def _without_masks(self, piece: Pieces) -> Pieces:
        kept_T = piece.ids_T != self.mask_id
        if not self._reads_ids or kept_T.all():
            return piece
        token_N = (np.cumsum(kept_T) - 1)[piece.token_N]
        return Pieces(piece.ids_T[kept_T], token_N, piece.group_N, piece.weight_N)


def to_embedding(flow: Flow, noise_BGD: Tensor) -> Tensor:
    """Embeddings drawn from noise; on a GPU so many at a time that a row's does not depend on how many there are."""
    return in_blocks(flow.to_embedding, noise_BGD, DRAW_ROWS if noise_BGD.is_cuda else None)


def slerp(a_BGd: Tensor, b_BGd: Tensor, weight: float) -> Tensor:
    """Spherical interpolation, group by group, from a (weight 0) to b (weight 1).

    Direction along the arc, length in equal steps: with a and b ~ N(0, I) every group stays on the shell where draws
    lie, and variance 1, which a straight line would not (1/2 in the middle). Group by group, since a group on which
    the two agree then stays as it is; one angle for the whole row would stretch it.
    """
    length_a, length_b = (x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (a_BGd, b_BGd))
    a, b = a_BGd / length_a, b_BGd / length_b
    angle = (a * b).sum(dim=-1, keepdim=True).clamp(-1, 1).acos()
    # Where the two are (anti)parallel there is no arc between them to follow.
    is_flat = angle.sin() < 1e-4
    safe = torch.where(is_flat, torch.ones_like(angle), angle)
    arc = (torch.sin((1 - weight) * safe) * a + torch.sin(weight * safe) * b) / safe.sin()
    line = (1 - weight) * a_BGd + weight * b_BGd
    return torch.where(is_flat, line, arc * ((1 - weight) * length_a + weight * length_b))
