"""Samplers: plain functions that fill the masked positions of token rows, each with a callback.

All take `(denoiser, x_BL, keys_B, settings, callback)`. `x_BL` holds `mask_id` where a token is wanted; tokens given
elsewhere never change. `keys_B` (`noise.row_keys`) holds the randomness of each row.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rmdm.samplers.ancestral import ancestral_steps, sample_ancestral
from rmdm.samplers.ar import ar_steps, sample_ar
from rmdm.samplers.confidence import confidence_steps, sample_confidence
from rmdm.samplers.denoiser import Callback, Denoiser, Steps, run_steps
from rmdm.samplers.noise import row_keys, row_uniform
from rmdm.samplers.sedd import sample_sedd, sedd_steps
from rmdm.samplers.settings import CONFIDENCE, SAMPLERS, SCORE, SampleSettings

__all__ = [
    "SAMPLERS", "Callback", "Denoiser", "SampleSettings", "row_keys", "row_uniform", "sample", "sample_ancestral",
    "sample_ar", "sample_confidence", "sample_sedd", "sample_steps",
]  # fmt: skip


def sample(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
) -> Tensor:
    """Fill the masked positions of `x_BL` with the sampler the settings name; `x_BL` itself is left as it is."""
    return run_steps(sample_steps(denoiser, x_BL, keys_B, settings, callback), denoiser)


def sample_steps(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    sure_BL: Tensor | None = None,
) -> Steps:
    """The same, asking for each run of the network, so that many samplers can share one.

    `sure_BL` (float64) gets the probability of each token when it is written.
    """
    settings.check(denoiser.backbone)
    if settings.guidance != denoiser.guidance:
        raise ValueError(f"settings.guidance={settings.guidance}, but the denoiser was made for {denoiser.guidance}")
    if settings.sampler == "ar":
        return ar_steps(denoiser, x_BL, keys_B, settings, callback, sure_BL)
    if settings.sampler in CONFIDENCE:
        return confidence_steps(denoiser.mask_id, x_BL, keys_B, settings, callback, sure_BL)
    if settings.sampler in SCORE:
        return sedd_steps(denoiser.mask_id, x_BL, keys_B, settings, callback, sure_BL)
    return ancestral_steps(denoiser.mask_id, x_BL, keys_B, settings, callback, sure_BL)
