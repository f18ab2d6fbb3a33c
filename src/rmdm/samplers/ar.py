"""Autoregressive sampling, one token a step with cached keys and values."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import KVCache
from rmdm.errors import ConfigError
from rmdm.samplers.categorical import draw_categorical, probabilities
from rmdm.samplers.denoiser import Callback, Denoiser, Steps, check_finite, run_steps, send
from rmdm.samplers.noise import TOKEN_STREAM, row_uniform
from rmdm.samplers.settings import SampleSettings


@torch.no_grad()
def sample_ar(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
) -> Tensor:
    """Continue each row's prefix from left to right; `callback(step, x_BL)` follows each place that is written."""
    return run_steps(ar_steps(denoiser, x_BL, keys_B, settings, callback), denoiser)


def ar_steps(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None = None,
    sure_BL: Tensor | None = None,
) -> Steps:
    """The same with a pause after each place; it runs the network itself, since its rows share a cache.

    `sure_BL` gets the probability of each token that is written.
    """
    if denoiser.block is not None and len(x_BL) % denoiser.block:
        return (yield from _filled_steps(denoiser, x_BL, keys_B, settings, callback, sure_BL))
    backbone, (B, L) = denoiser.backbone, x_BL.shape
    prefix_B = _prefix_lengths(x_BL, denoiser.mask_id)
    first = int(prefix_B.min(initial=L))
    given_BL = x_BL != denoiser.mask_id
    noise_BL = send(row_uniform(keys_B, 0, TOKEN_STREAM, L), x_BL.device)
    cache = KVCache(backbone.config, B, L, x_BL.device, backbone.compute_dtype)
    # The extra id starts a row; what all rows were given runs with it, in one go.
    x_BL, new_BT = x_BL.clone(), torch.cat((torch.full_like(x_BL[:, :1], denoiser.mask_id), x_BL[:, :first]), dim=1)
    for place in range(first, L):
        with torch.no_grad():
            logits_BV = backbone.logits(backbone(new_BT, cache=cache)[:, -1])
        if place == first:
            check_finite(logits_BV)
        token_B = draw_categorical(logits_BV, noise_BL[:, place], settings.temperature, settings.top_p)
        x_BL[:, place] = torch.where(given_BL[:, place], x_BL[:, place], token_B)
        if sure_BL is not None:
            sure_BL[:, place] = probabilities(logits_BV).gather(1, token_B[:, None]).squeeze(1)
        new_BT = x_BL[:, place : place + 1]
        if callback is not None:
            callback(place - first, x_BL)
        yield None
    return x_BL


def _filled_steps(
    denoiser: Denoiser,
    x_BL: Tensor,
    keys_B: NDArray[np.int64],
    settings: SampleSettings,
    callback: Callback | None,
    sure_BL: Tensor | None,
) -> Steps:
    """The same with the batch filled up to whole blocks."""
    B, block = len(x_BL), denoiser.block or 1
    of = np.arange(-(-B // block) * block).clip(max=B - 1)
    all_BL = x_BL[torch.from_numpy(of).to(x_BL.device)]
    all_sure_BL = None if sure_BL is None else torch.zeros(all_BL.shape, device=x_BL.device, dtype=torch.float64)

    def heard(step: int, x: Tensor) -> None:
        if sure_BL is not None and all_sure_BL is not None:
            sure_BL.copy_(all_sure_BL[:B])
        if callback is not None:
            callback(step, x[:B])

    x_BL = yield from ar_steps(denoiser, all_BL, keys_B[of], settings, heard, all_sure_BL)
    return x_BL[:B]


def _prefix_lengths(x_BL: Tensor, mask_id: int) -> NDArray[np.int64]:
    """How many tokens each row begins with; tokens given after a masked place are refused."""
    given_BL = (x_BL != mask_id).cpu().numpy()
    prefix_B = np.logical_and.accumulate(given_BL, axis=1).sum(axis=1)
    astray = np.flatnonzero(prefix_B != given_BL.sum(axis=1))
    if len(astray):
        raise ConfigError(
            f"row {astray[0]} gives tokens after its masked place {prefix_B[astray[0]]}, but an autoregressive model "
            "can only continue a prefix; give the beginning alone, or use a masked diffusion model"
        )
    return prefix_B
