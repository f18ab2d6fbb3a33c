"""From a trained backbone to token rows: draw the latents, then the tokens, some rows at a time."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.config import SampleConfig
from rmdm.samplers import sample
from rmdm.samplers.denoiser import Barred, Callback, Denoiser, fixed_rows, in_blocks
from rmdm.samplers.latents import LatentSource, Tau
from rmdm.samplers.noise import row_keys
from rmdm.samplers.settings import SamplerName, SampleSettings, fitting_samplers
from rmdm.samplers.trunk import Trunk

BATCH = 64
"""Rows taken through at once; which rows share a batch does not change what they say, but for float ties on a CPU."""


@dataclass
class Writer:
    """A backbone with the source of its latents."""

    backbone: DiT
    source: LatentSource | None = None
    trunk: Trunk | None = None
    """Keeps what was recorded of the backbone; only for one whose weights stay where they are."""

    @torch.no_grad()
    def write(
        self,
        x_BL: Tensor,
        keys_B: np.ndarray,
        settings: SampleSettings,
        *,
        tau: Tau = 1.0,
        zt_BGd: Tensor | None = None,
        without: bool = False,
        batch: int = BATCH,
        barred: Barred | None = None,
        callback: Callback | None = None,
    ) -> Tensor:
        """Fill the masked positions of `x_BL`; a latent that is not given is drawn. `callback` hears of each batch.

        `without` asks for the learned null instead of a latent, `barred` names tokens not to be written.
        """
        settings.check(self.backbone)
        block, parts = fixed_rows(self.backbone), []
        for first in range(0, len(x_BL), batch):
            rows = slice(first, first + batch)
            z = None if without else zt_BGd[rows] if zt_BGd is not None else self.draw(keys_B[rows], tau)
            latent = self.backbone.latent
            c_BGC = in_blocks(latent, z, block) if latent is not None and z is not None else None
            denoiser = Denoiser(self.backbone, c_BGC, settings.guidance, block, barred, self.trunk)
            parts.append(sample(denoiser, x_BL[rows], keys_B[rows], settings, callback))
        return torch.cat(parts)

    def draw(self, keys_B: np.ndarray, tau: Tau = 1.0) -> Tensor | None:
        """Latents of some rows; None for a model without any."""
        return self.source.draw(keys_B, tau) if self.source is not None else None

    def blank(self, n: int, seed: int) -> tuple[Tensor, np.ndarray]:
        """n fully masked rows and their keys: rows 0..n-1 of the request with this seed."""
        device = self.backbone.embed.weight.device
        return torch.full((n, self.backbone.length), self.backbone.mask_id, device=device), row_keys(seed, range(n))


def own_settings(
    backbone: DiT, config: SampleConfig, steps: int | None = None, sampler: SamplerName | None = None
) -> SampleSettings:
    """What a model's config says of sampling, as far as it fits the model and the sampler, if one is asked for."""
    learnt_without = backbone.latent is not None and backbone.latent.dropout > 0 and not backbone.latent.independent
    fits = config.sampler in fitting_samplers(backbone)[0]
    if sampler is None:
        sampler = config.sampler if config.sampler is not None and fits else default_sampler(backbone)
    return SampleSettings(
        sampler=sampler,
        steps=backbone.length if backbone.causal else steps or config.steps,
        temperature=config.temperature,
        guidance=config.guidance if learnt_without else 1.0,
        spacing=config.spacing if sampler == "spaced" else None,
    )


def default_sampler(backbone: DiT) -> Literal["ancestral", "analytic", "ar"]:
    """The sampler that fits a model, where none is named."""
    return "ar" if backbone.causal else "analytic" if backbone.time is not None else "ancestral"
