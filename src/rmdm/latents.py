"""Where the latents of requests come from: the model's draws, texts, other latents, or the tokens that are given."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.config import Config
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError, RMDMError
from rmdm.meanflow.flow import Flow
from rmdm.precision import autocast
from rmdm.request import ABOUT_LATENTS, GIVEN, SOURCES, Request, SeedLatent, TextLatent
from rmdm.samplers.given import resample_steps, to_end, under
from rmdm.samplers.infill import Page, Pattern
from rmdm.samplers.latents import LatentReader, LatentSource, Tau, slerp
from rmdm.samplers.noise import row_keys
from rmdm.samplers.settings import SampleSettings

MOST_LATENT = 1000
LatentEnd = str | TextLatent | SeedLatent | Tensor
"""A text, what `Model.encode` made of it, the seed of a draw, or z~ itself."""


@dataclass(frozen=True)
class Choice:
    """Where the latents of a request come from."""

    by: str
    """`flow`, `prior`: drawn. `latent`, `like`, `between`: named. `encode`, `resample`: from the given tokens. `null`:
    the learned null. `none`: the model has no latent."""
    tau: Tau = 1.0
    scale: float = 1.0
    """tau as a number."""
    draws: int = 1
    rounds: int = 1
    reads: bool = False
    """Whether a text has to be read for it."""
    starts_at_text: bool = False
    """For `resample`: whether the first round has the latent of the given text to choose from."""

    def report(self, request: Request) -> dict[str, Any]:
        """The part of the settings that is about the latent."""
        seed = request.seed if request.latent_seed is None else request.latent_seed
        return {
            "latent": self.by if self.by != "none" else None,
            "latent_seed": seed if self.by not in ("none", "null") and not request.has_fixed_latent else None,
            "tau": self.scale if self.by in ("flow", "prior", "resample") else None,
            **(self._resampling() if self.by == "resample" else {}),
            **({"weight": middle(request.weight)} if self.by == "between" else {}),
        }

    def _resampling(self) -> dict[str, Any]:
        return {"draws": self.draws, "rounds": self.rounds, "start": "text" if self.starts_at_text else "draw"}


def latent_keys(request: Request) -> NDArray[np.int64]:
    """The keys of the latents of a request, one a text."""
    return row_keys(request.seed if request.latent_seed is None else request.latent_seed, range(request.n))


def middle(weight: float | None) -> float:
    """Where between two latents, if nothing was said."""
    return 0.5 if weight is None else weight


class Latents:
    """The latents of one model's requests."""

    def __init__(self, backbone: DiT, tokenizer: Tokenizer, config: Config, folder: Path) -> None:
        """`folder` is the release, which holds the flow and the whitening."""
        self.backbone, self.tokenizer, self.config, self.folder = backbone, tokenizer, config, folder
        self.device = backbone.embed.weight.device
        self.page = Page.of(tokenizer, config)

    def choose(self, request: Request, settings: SampleSettings, pattern: Pattern) -> Choice:
        """Where the latents of a request come from; raises `ConfigError` where the model cannot do what is asked."""
        name, latent = self.config.name, self.config.latent
        if self.backbone.latent is None:
            for field in ABOUT_LATENTS:
                if getattr(request, field) is not None:
                    raise ConfigError(f"{field} needs a latent, and {name} has none; use an rmdm model")
            return Choice("none")
        if settings.guidance != 1 and latent.dropout == 0:
            raise ConfigError(
                f"guidance={settings.guidance} needs a model that also learnt to do without its latent, and {name} has "
                "latent.dropout=0; use guidance=1"
            )
        for field in SOURCES:
            if getattr(request, field) is not None:
                self._check_given(request, field)
                ends = request.between if request.between is not None else (getattr(request, field),)
                return Choice(field, reads=any(isinstance(end, str | TextLatent) for end in ends))
        asked = request.latent_temperature
        tau = self.config.sample.latent_temperature if asked is None else asked
        scale = self.source.temperature(tau)
        drawn = Choice("flow" if self.source.flow is not None else "prior", tau, scale)
        if latent.independent and request.given not in (None, "prior"):
            raise ConfigError(f"given={request.given!r}, but the latent of {name} knows nothing of the text; use prior")
        if latent.independent or (pattern.x_L == self.tokenizer.mask_id).all():
            return drawn
        given = request.given or latent.given or "null"
        others = ", ".join(other for other in GIVEN if other != "null")
        if given == "null" and latent.dropout == 0:
            raise ConfigError(
                f"given='null' writes without a latent, which latent.dropout=0 never taught it; use {others}"
            )
        if given == "null" and request.guidance not in (None, 1):
            raise ConfigError(
                f"guidance={request.guidance} weighs the latent, and the text goes on from what is given without one "
                f"(given='null'); use given={others}, or guidance=1"
            )
        if given in ("encode", "resample") and not self.text_given(pattern).any():
            return drawn
        if given == "resample":
            own = self.config.sample
            draws, rounds = request.draws or own.draws, request.rounds or own.rounds
            return Choice(given, tau, scale, draws, rounds, starts_at_text=self.can_read)
        return drawn if given == "prior" else Choice(given, reads=given == "encode")

    def draw(self, request: Request, choice: Choice, x_BL: Tensor) -> Tensor | None:
        """z~ of the rows `x_BL`, all of them alike; None for the learned null and for models without a latent."""
        return to_end(self.draw_steps(request, choice, x_BL))

    @torch.no_grad()
    def draw_steps(self, request: Request, choice: Choice, x_BL: Tensor) -> Generator[None, None, Tensor | None]:
        """The same with pauses, where it takes long."""
        keys_B = latent_keys(request)
        if choice.by in ("none", "null"):
            return None
        if choice.by == "resample":
            start = self._start(x_BL, keys_B, choice.tau) if choice.starts_at_text else None
            how = {"draws": choice.draws, "rounds": choice.rounds, "tau": choice.tau, "start_BGK": start}
            steps = resample_steps(self.backbone, self.source, x_BL, keys_B, self.scored(x_BL), **how)
            return in_range((yield from under(lambda: autocast(self.device), steps)), choice)
        if choice.by == "encode":
            return self._noisy(self._condition_given(x_BL, keys_B), keys_B)
        if request.between is not None:
            return self._between(request.between, middle(request.weight), keys_B)
        end = request.like if request.like is not None else request.latent
        if end is not None:
            return self._end(end, choice.by, keys_B)
        return in_range(self.source.draw(keys_B, choice.tau), choice)

    def text_given(self, pattern: Pattern) -> NDArray[np.bool_]:
        """Positions where a pattern gives text, and not only where it ends."""
        return ~self.tokenizer.is_control[pattern.x_L]

    def scored(self, x_BL: Tensor) -> NDArray[np.bool_]:
        """Given tokens that tell latents apart: all that the model was trained to predict."""
        x = x_BL.cpu().numpy()
        is_given = x != self.tokenizer.mask_id
        is_learnt = self.config.data.pad_in_loss or not self.page.is_padded
        return is_given if is_learnt else is_given & (x != self.tokenizer.pad_id)

    def read_given(self, x_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the given text where it stands, and which groups have any."""
        x = x_BL.cpu().numpy()
        is_text = (x != self.tokenizer.mask_id) & (x != self.tokenizer.pad_id)
        lengths_B = ((np.arange(x.shape[1]) + 1) * is_text).max(axis=1)
        return self.reader.read(x, lengths_B)

    def read(self, text: str, name: str) -> TextLatent:
        """The latent of a text; `name` is the argument it was given as."""
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r} is no text; give a string")
        x_L, length = self.page.whole(text, name)
        e_1GD, present_1G = self.reader.read(x_L[None], np.array([length]))
        return TextLatent(text, x_L[:length], e_1GD[0], present_1G[0])

    @cached_property
    def source(self) -> LatentSource:
        """Draws latents in the way the model was trained to have them drawn."""
        by_flow = self.config.latent.draw == "flow" and not self.config.latent.independent
        return LatentSource(self._latent(), self._flow if by_flow else None)

    @cached_property
    def reader(self) -> LatentReader:
        """Reads latents off texts; the encoder is looked for where training found it."""
        from rmdm.encoders.find import open_encoder
        from rmdm.encoders.whitening import Whitening

        latent = self._latent()
        if self.config.latent.independent:
            raise ConfigError(
                f"{self.config.name} was trained with latents that have nothing to do with its texts "
                "(latent.independent), so none can be read off a text; use another model"
            )
        whitening = Whitening.load(self.folder / "whitening.safetensors")
        encoder = open_encoder(self.config.encoder, self.tokenizer, self.config.data.length, self.device)
        gives_z0 = self.config.latent.draw == "prior"
        return LatentReader(encoder, whitening, latent, self._flow, gives_z0, self.backbone.mask_id)

    @cached_property
    def can_read(self) -> bool:
        """Whether latents can be read off texts here: the model has such latents, and its encoder can be had."""
        try:
            _ = self.reader
        except RMDMError:
            return False
        return True

    @cached_property
    def _flow(self) -> Flow:
        return Flow.load(self.folder / "flow", self.device)

    def _latent(self) -> Latent:
        if self.backbone.latent is None:
            raise ConfigError(f"{self.config.name} is a model without a latent; use an rmdm model")
        return self.backbone.latent

    def _condition_given(self, x_BL: Tensor, keys_B: NDArray[np.int64]) -> Tensor:
        """What stage II is conditioned on for the text that is given in rows that are all alike."""
        e_1GD, present_1G = self.read_given(x_BL[:1])
        n = len(keys_B)
        e_BGD = self.reader.fill(e_1GD.expand(n, -1, -1), present_1G.expand(n, -1), keys_B)
        return self.reader.condition(e_BGD)

    def _start(self, x_BL: Tensor, keys_B: NDArray[np.int64], tau: Tau) -> Tensor:
        """Noise that leads to the latent of the given text, in no group longer than noise is.

        To the encoder a few words are a whole, odd text, whose latent is one that would never be drawn.
        """
        noise_BGK = self.source.noise_at(self._condition_given(x_BL, keys_B), keys_B, tau)
        own = self._latent().dim if self.source.flow is not None else noise_BGK.shape[-1]  # what follows is plain noise
        length_BG1 = noise_BGK[..., :own].norm(dim=-1, keepdim=True)
        noise_BGK[..., :own] *= (math.sqrt(own) / length_BG1).clamp_max(1)
        return noise_BGK

    def _filled(self, text: TextLatent, keys_B: NDArray[np.int64]) -> Tensor:
        """Its embedding for each row, with the row's noise where it has no text."""
        n = len(keys_B)
        e_GD, present_G = text.embedding.to(self.device), text.present.to(self.device)
        return self.reader.fill(e_GD.expand(n, -1, -1), present_G.expand(n, -1), keys_B)

    def _noisy(self, z_BGD: Tensor, keys_B: NDArray[np.int64]) -> Tensor:
        """z~: with the noise of training, under the row's key."""
        return self._latent().noisy(z_BGD, torch.from_numpy(keys_B).to(z_BGD.device))

    def _between(self, ends: tuple[LatentEnd, LatentEnd], weight: float, keys_B: NDArray[np.int64]) -> Tensor:
        first, second = (self.read(end, "between") if isinstance(end, str) else end for end in ends)
        if isinstance(first, TextLatent) and isinstance(second, TextLatent):
            a_BGD, b_BGD = (self._filled(end, keys_B) for end in (first, second))
            return self._noisy(self.reader.between(a_BGD, b_BGD, weight), keys_B)
        a_BGd, b_BGd = (self._end(end, "between", keys_B) for end in (first, second))
        return slerp(a_BGd, b_BGd, weight)

    def _check_given(self, request: Request, name: str) -> None:
        """Raise `ConfigError` where a latent that is given does not fit the model."""
        latent, ends = self._latent(), getattr(request, name)
        for end in ends if name == "between" else [ends]:
            if isinstance(end, TextLatent):
                check_numbers(end.embedding, (latent.groups, latent.dim), name)
            elif not isinstance(end, str | SeedLatent):
                zt = as_numbers(end, name)
                wanted = (latent.groups, latent.project)
                check_numbers(zt, wanted if zt.ndim == 2 else (request.n, *wanted), name)

    def _end(self, end: LatentEnd, name: str, keys_B: NDArray[np.int64]) -> Tensor:
        """z~ of each row from one latent."""
        if isinstance(end, str):
            end = self.read(end, name)
        if isinstance(end, TextLatent):
            return self._noisy(self.reader.condition(self._filled(end, keys_B)), keys_B)
        if isinstance(end, SeedLatent):
            return self.source.draw(row_keys(end.seed, range(len(keys_B))), self.config.sample.latent_temperature)
        zt = torch.as_tensor(end, device=self.device, dtype=torch.float32)
        return zt.expand(len(keys_B), -1, -1) if zt.ndim == 2 else zt


def in_range(zt_BGd: Tensor, choice: Choice) -> Tensor:
    """The latents that were drawn; raises `ConfigError` where the temperature made them larger than any may be.

    How high is too high depends on the flow, which was never shown such noise. What is drawn at 1 needs no look.
    """
    if choice.scale > 1 and not (zt_BGd.abs() <= MOST_LATENT).all():  # which NaN is not either
        raise ConfigError(
            f"latent_temperature={choice.scale:g} draws latents beyond {MOST_LATENT}, or NaN; use a lower one, such as "
            "1.0"
        )
    return zt_BGd


def as_numbers(given: Any, name: str) -> Tensor:
    """What was given for a latent as a tensor; raises `ConfigError` where it holds no real numbers."""
    try:
        zt = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        zt = None
    if zt is None or zt.is_complex() or zt.dtype == torch.bool:
        raise ConfigError(f"{name} is no latent; give a tensor of numbers, a text, or what Model.encode returns")
    return zt


def check_numbers(given: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise `ConfigError` for a latent of another shape, or one that is not finite."""
    if tuple(given.shape) != shape:
        raise ConfigError(f"{name} has shape {tuple(given.shape)}, this request takes {shape}; use that")
    if not (given.abs() <= MOST_LATENT).all():  # which NaN is not either
        raise ConfigError(f"{name} holds numbers beyond {MOST_LATENT}, or NaN; a latent's are mostly within -4 and 4")
