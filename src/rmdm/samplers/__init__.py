"""Samplers: plain functions that fill the masked positions of token rows, each with a callback.

All take `(denoiser, x_BL, keys_B, settings, callback)`. `x_BL` holds `mask_id` where a token is wanted; tokens given
elsewhere never change. `keys_B` (`noise.row_keys`) holds the randomness of each row.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rmdm.samplers.ancestral import sample_ancestral
from rmdm.samplers.ar import sample_ar
from rmdm.samplers.confidence import sample_confidence
from rmdm.samplers.denoiser import Callback, Denoiser
from rmdm.samplers.noise import row_keys, row_uniform
from rmdm.samplers.sedd import sample_sedd
from rmdm.samplers.settings import CONFIDENCE, SAMPLERS, SCORE, SampleSettings

__all__ = [
    "SAMPLERS", "Callback", "Denoiser", "SampleSettings", "row_keys", "row_uniform", "sample", "sample_ancestral",
    "sample_ar", "sample_confidence", "sample_sedd",
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
        return sample_sedd(denoiser, x_BL, keys_B, settings, callback)
    function = sample_ar if settings.sampler == "ar" else sample_ancestral
    return function(denoiser, x_BL, keys_B, settings, callback)
