"""The latent that coordinates a row [Paper §3.2, §3.4]: projection, noise, and the condition every block is given.

    z~ = (P z + sigma eps) / sqrt(1 + sigma^2)          P fixed, with orthonormal rows; eps ~ N(0, I)

With z ~ N(0, I), z~ is N(0, I) again, so z~ itself is what sampling draws.

Shapes: B rows, G groups, K numbers of a group of z, D_z of an embedding, d_z after projection, C of the condition.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmdm.backbone.noise import bits31, normal
from rmdm.config import LatentConfig

NOISE_STREAM, DROP_STREAM, BLUR_STREAM, BLUR_NOISE_STREAM = 1001, 2010, 2012, 1011
"""Streams of eps, of the choice of rows that go without a latent, and of what blurs groups and by how much (streams 2s
and 2s + 1 belong to noise s)."""


def projection(dim: int, project: int, seed: int) -> Tensor:
    """P, (d_z, D_z) with orthonormal rows, a function of the seed alone; P z_0 is N(0, I) when z_0 is."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(square)
    return (q * r.diagonal().sign()).T[:project].contiguous()


class Latent(nn.Module):
    """z~ to the condition c of every group; a row without a latent gets a learned null instead."""

    matrix: Tensor
    """P, (d_z, D_z)."""

    def __init__(self, config: LatentConfig, seed: int) -> None:
        super().__init__()
        self.groups, self.dim, self.project = config.groups, config.dim, config.project or config.dim
        self.sigma, self.dropout, self.independent = config.sigma, config.dropout, config.independent
        self.blur = config.blur
        # A latent that keeps all its dimensions needs no turning; the network learns its own.
        kept = self.project == self.dim
        matrix = torch.eye(self.dim) if kept else projection(self.dim, self.project, seed).float()
        self.register_buffer("matrix", matrix)
        self.width = C = config.width
        self.up = nn.Identity() if kept else nn.Linear(self.project, self.dim, bias=False)
        self.inner = nn.Linear(self.dim, C)
        self.outer = nn.Linear(C, C)
        self.null = nn.Parameter(torch.empty(C))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Linear layers at 1/sqrt(fan-in), the null at zero."""
        for linear in (self.up, self.inner, self.outer):
            if isinstance(linear, nn.Identity):
                continue
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for linear in (self.inner, self.outer):
            nn.init.zeros_(linear.bias)
        nn.init.zeros_(self.null)

    def noisy(self, z_BGK: Tensor | None, noise_key_B: Tensor) -> Tensor:
        """z~ of embeddings or latents of D_z numbers, or of d_z where they are stored projected.

        Where it is independent of the text, it is noise alone.
        """
        if self.independent:
            return normal(noise_key_B, (self.groups, self.project), NOISE_STREAM)
        assert z_BGK is not None
        z_BGd = z_BGK.float()
        if z_BGd.shape[-1] != self.project or self.project == self.dim:
            z_BGd = z_BGd @ self.matrix.T
        eps = normal(noise_key_B, tuple(z_BGd.shape[1:]), NOISE_STREAM)
        return (z_BGd + self.sigma * eps) / math.sqrt(1 + self.sigma**2)

    def blurred(self, zt_BGd: Tensor, noise_key_B: Tensor) -> Tensor:
        """z~ as training shows it: a share `blur` of the groups mixed with noise, each by its own amount a ~ U(0, 1).

        sqrt(1 - a^2) z~ + a eps has the variance of z~. As some groups say little or nothing of the row and the others
        all, the model learns to weigh a group by what goes with it: the other groups, and what is written.
        """
        if not self.blur or self.independent:
            return zt_BGd
        u_BG = bits31(noise_key_B, self.groups, BLUR_STREAM).view(-1, self.groups).float() / 2**31
        a_BG1 = torch.where(u_BG < self.blur, u_BG / self.blur, 0.0)[..., None]
        eps_BGd = normal(noise_key_B, tuple(zt_BGd.shape[1:]), BLUR_NOISE_STREAM)
        return (1 - a_BG1**2).sqrt() * zt_BGd + a_BG1 * eps_BGd

    def kept(self, noise_key_B: Tensor) -> Tensor:
        """Which rows keep their latent in training, (B,): all but a share of `dropout`."""
        return bits31(noise_key_B, 1, DROP_STREAM).squeeze(1) >= int(self.dropout * 2**31)

    def forward(self, zt_BGd: Tensor, kept_B: Tensor | None = None) -> Tensor:
        """The condition c, (B, G, C), of every group's z~; rows that are not `kept` get the null."""
        c_BGC = F.silu(self.outer(F.silu(self.inner(self.up(zt_BGd)))))
        return c_BGC if kept_B is None else torch.where(kept_B[:, None, None], c_BGC, self.null.to(c_BGC.dtype))

    def without(self, rows: int) -> Tensor:
        """The condition of rows without a latent, (rows, 1, C)."""
        return self.null.expand(rows, 1, -1)
