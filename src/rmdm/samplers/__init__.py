"""Samplers: plain functions that fill the masked positions of token rows, each with a callback.

All take `(denoiser, x_BL, keys_B, settings, callback)`. `x_BL` holds `mask_id` where a token is wanted; tokens given
elsewhere never change. `keys_B` (`noise.row_keys`) holds the randomness of each row.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.samplers.ancestral import sample_ancestral
from rmdm.samplers.ar import sample_ar
from rmdm.samplers.confidence import sample_confidence
from rmdm.samplers.denoiser import Callback, Denoiser
from rmdm.samplers.noise import row_keys, row_uniform
from rmdm.samplers.settings import CONFIDENCE, SAMPLERS, SCORE, SampleSettings

__all__ = [
    "SAMPLERS", "Callback", "Denoiser", "SampleSettings", "row_keys", "row_uniform", "sample", "sample_ancestral",
    "sample_ar", "sample_confidence", "sample_rows",
]  # fmt: skip


def sample(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
) -> Tensor:
    """Fill the masked positions of `x_BL` with the sampler the settings name; `x_BL` itself is left as it is."""
    settings.check(denoiser.backbone)
    if settings.guidance != denoiser.guidance:
        raise ValueError(f"settings.guidance={settings.guidance}, but the denoiser was made for {denoiser.guidance}")
    if settings.sampler in CONFIDENCE:
        return sample_confidence(denoiser, x_BL, keys_B, settings, callback)
    if settings.sampler in SCORE:
        from rmdm.samplers.sedd import sample_sedd

        return sample_sedd(denoiser, x_BL, keys_B, settings, callback)
    function = sample_ar if settings.sampler == "ar" else sample_ancestral
    return function(denoiser, x_BL, keys_B, settings, callback)


def sample_rows(backbone: DiT, n: int, steps: int, seed: int, temperature: float = 1.0, batch: int = 64) -> Tensor:
    """`n` rows from nothing, without a latent, by the model's own sampler; the batch does not change the rows."""
    sampler = "ar" if backbone.causal else "analytic" if backbone.time is not None else "ancestral"
    settings = SampleSettings(sampler=sampler, steps=steps, temperature=temperature)
    denoiser = Denoiser(backbone)
    parts = []
    for first in range(0, n, batch):
        keys_B = row_keys(seed, range(first, min(first + batch, n)))
        x_BL = torch.full((len(keys_B), backbone.length), backbone.mask_id, device=denoiser.device)
        parts.append(sample(denoiser, x_BL, keys_B, settings))
    return torch.cat(parts)
