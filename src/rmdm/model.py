"""A trained model to use: text from nothing, around given tokens, or after the latent of another text.

>>> import rmdm

>>> model = rmdm.load("runs/first")
>>> model.generate(n=4, steps=16, seed=0).texts
>>> model.infill("anna was [MASK] near the [MASK:2] .", n=2).texts
>>> model.generate(n=2, like=model.generate(seed=1).texts[0]).texts
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.config import Config
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError
from rmdm.latents import Choice, LatentEnd, Latents
from rmdm.precision import autocast, dtype, in_half, named
from rmdm.request import Generation, Given, Request, TextLatent
from rmdm.samplers.denoiser import Barred
from rmdm.samplers.generate import BATCH, Writer, own_settings
from rmdm.samplers.infill import Page, Pattern
from rmdm.samplers.noise import row_keys
from rmdm.samplers.settings import SamplerName, SampleSettings
from rmdm.samplers.trunk import Trunk, with_half_matrices

Callback = Callable[[int, Tensor], None]


@dataclass(frozen=True, eq=False)
class Ready:
    """A request that a model can meet, with all that follows from it before anything is drawn."""

    request: Request
    choice: Choice
    settings: SampleSettings
    pattern: Pattern
    x_BL: Tensor
    """The rows to begin with, all alike."""
    keys_B: NDArray[np.int64]


@dataclass(repr=False)
class Model:
    """A trained backbone with all that is needed to use it."""

    backbone: DiT
    tokenizer: Tokenizer
    config: Config
    step: int
    folder: Path
    """The release it was read from."""

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.backbone.parameters())
        return f"Model({self.config.name}: {self.config.process}, {size / 1e6:.2f}M parameters, step {self.step})"

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: not what is made when it is first needed, locks and recordings among it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def generate(
        self,
        n: int = 1,
        steps: int | None = None,
        seed: int = 0,
        *,
        sampler: SamplerName | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        remask: float | None = None,
        spacing: int | None = None,
        guidance: float | None = None,
        latent_temperature: float | Literal["paper"] | None = None,
        latent_seed: int | None = None,
        latent: Tensor | TextLatent | None = None,
        like: str | TextLatent | None = None,
        between: tuple[LatentEnd, LatentEnd] | None = None,
        weight: float | None = None,
        prefix: str | None = None,
        suffix: str | None = None,
        tokens: int | None = None,
        given: Given | None = None,
        draws: int | None = None,
        rounds: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Generation:
        """Write `n` texts; `Request` explains the arguments. `callback(step, x_nL)` sees the rows after each step."""
        request = Request(
            n=n, steps=steps, seed=seed, sampler=sampler, temperature=temperature, top_p=top_p, remask=remask,
            spacing=spacing, guidance=guidance, latent_temperature=latent_temperature, latent_seed=latent_seed,
            latent=latent, like=like, between=between, weight=weight, prefix=prefix, suffix=suffix, tokens=tokens,
            given=given, draws=draws, rounds=rounds,
        )  # fmt: skip
        return self.write(request, trace=trace, callback=callback)

    def infill(
        self,
        text: str,
        n: int = 1,
        steps: int | None = None,
        seed: int = 0,
        *,
        sampler: SamplerName | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        remask: float | None = None,
        spacing: int | None = None,
        guidance: float | None = None,
        latent_temperature: float | Literal["paper"] | None = None,
        latent_seed: int | None = None,
        latent: Tensor | TextLatent | None = None,
        like: str | TextLatent | None = None,
        between: tuple[LatentEnd, LatentEnd] | None = None,
        weight: float | None = None,
        given: Given | None = None,
        draws: int | None = None,
        rounds: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Generation:
        """Fill the gaps of a text, `[MASK]` (one token) or `[MASK:n]`, in `n` ways; the rest of it stays as it is."""
        if not isinstance(text, str):
            raise ConfigError(f"infill={text!r} is no text; write [MASK] or [MASK:3] where tokens are wanted")
        request = Request(
            infill=text, n=n, steps=steps, seed=seed, sampler=sampler, temperature=temperature, top_p=top_p,
            remask=remask, spacing=spacing, guidance=guidance, latent_temperature=latent_temperature,
            latent_seed=latent_seed, latent=latent, like=like, between=between, weight=weight, given=given, draws=draws,
            rounds=rounds,
        )  # fmt: skip
        return self.write(request, trace=trace, callback=callback)

    def encode(self, text: str) -> TextLatent:
        """What the model's encoder makes of a text."""
        return self.latents.read(text, "text")

    def write(self, request: Request, *, trace: bool = False, callback: Callback | None = None) -> Generation:
        """Write what is asked for."""
        if callback is not None and not callable(callback):
            raise ConfigError(f"callback={callback!r} cannot be called; give a function of a step and its rows")
        ready = self.ready(request)
        states: list[NDArray[np.int64]] = []

        def heard(step: int, x_BL: Tensor) -> None:
            if trace:
                states.append(x_BL.cpu().numpy().copy())
            if callback is not None:
                callback(step, x_BL)

        is_heard = trace or callback is not None
        began = time.perf_counter()
        zt_BGd = self.latents.draw(request, ready.choice, ready.x_BL)
        with autocast(self.device):
            written_BL = self.writer().write(
                ready.x_BL,
                ready.keys_B,
                ready.settings,
                zt_BGd=zt_BGd,
                without=zt_BGd is None,
                batch=request.n if is_heard else BATCH,
                barred=self.barred(ready.pattern),
                callback=heard if is_heard else None,
            )
        tokens_BL = written_BL.cpu().numpy()
        return self.generation(ready, tokens_BL, zt_BGd, time.perf_counter() - began, states)

    def ready(self, request: Request) -> Ready:
        """A request made ready for this model; raises `ConfigError` where it cannot be met."""
        if not isinstance(request, Request):
            raise ConfigError(f"{request!r} is no request; give rmdm.Request(n=4), for example, or use generate(n=4)")
        choice = self.choice(request)
        settings, pattern = self.settings(request), self.pattern(request)
        if choice.by == "null":
            settings = replace(settings, guidance=1.0)
            without = self.config.sample.null_temperature
            if without is not None and request.temperature is None:
                settings = replace(settings, temperature=without)
        if choice.reads:
            _ = self.latents.reader  # to load an encoder is not to write
        x_BL = torch.from_numpy(pattern.x_L).to(self.device).repeat(request.n, 1)
        return Ready(request, choice, settings, pattern, x_BL, row_keys(request.seed, range(request.n)))

    def generation(
        self,
        ready: Ready,
        tokens_BL: NDArray[np.int64],
        zt_BGd: Tensor | None,
        seconds: float,
        states: Sequence[NDArray[np.int64]] = (),
    ) -> Generation:
        """What came of a request."""
        shown = ready.pattern.shown or slice(None)
        return Generation(
            texts=self.texts(tokens_BL, ready.pattern),
            tokens=tokens_BL[:, shown],
            trace=np.stack(states)[..., shown] if states else None,
            settings=self.used(ready),
            seconds=seconds,
            latents=zt_BGd,
        )

    def used(self, ready: Ready) -> dict[str, Any]:
        """All that a request is written with, ready for JSON."""
        return {
            **vars(ready.settings),
            "seed": ready.request.seed,
            **ready.choice.report(ready.request),
            "precision": f"{named(dtype(self.device))} network, float64 draws",
        }

    def barred(self, pattern: Pattern) -> Barred | None:
        """Inside a text of known length nothing is written that is no text, and after a space a word begins."""
        begins = pattern.begins if self.tokenizer.is_inside.any() else ()
        if pattern.shown is None and not begins:
            return None
        places_L, begins_L = torch.zeros(2, self.backbone.length, dtype=torch.bool)
        places_L[pattern.shown or slice(0)] = True
        begins_L[list(begins)] = True
        tokens = [of[: self.backbone.vocab_size] for of in (self.tokenizer.is_control, self.tokenizer.is_inside)]
        control_V, inside_V = (torch.from_numpy(of_V).to(self.device) for of_V in tokens)
        where = (begins_L.to(self.device), inside_V) if begins else ()
        return Barred(places_L.to(self.device), control_V, *where)

    def texts(self, x_BL: NDArray[np.int64], pattern: Pattern | None = None) -> list[str]:
        """Rows as texts: what a pattern shows, else the first document of a padded row, else all of a row."""
        if pattern is not None and pattern.shown is not None:
            return [self.tokenizer.decode(row[pattern.shown]) for row in x_BL]
        return [self.tokenizer.decode(row, stop_at_separator=self.page.is_padded) for row in x_BL]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.backbone.embed.weight.device

    def writer(self, *, half: bool = True) -> Writer:
        """What writes with it, in the way it was trained to draw its latents.

        Where networks compute in bf16 it is for `autocast`, unless `half` is refused.
        """
        source = self.latents.source if self.backbone.latent is not None else None
        if not (half and in_half(self.device)):
            return Writer(self.backbone, source)
        return Writer(self.trunk.backbone, source, self.trunk if self.device.type == "cuda" else None)

    @cached_property
    def trunk(self) -> Trunk:
        """Its backbone for writing in bf16, under autocast, and what a GPU recorded of it for all its requests."""
        return Trunk(with_half_matrices(self.backbone))

    @cached_property
    def latents(self) -> Latents:
        """Where its latents come from."""
        return Latents(self.backbone, self.tokenizer, self.config, self.folder)

    @property
    def page(self) -> Page:
        """How texts lie in its rows."""
        return self.latents.page

    def choice(self, request: Request) -> Choice:
        """Where the latents of a request come from; raises `ConfigError` where it cannot be met."""
        request.check()
        settings = self.settings(request)
        settings.check(self.backbone)
        return self.latents.choose(request, settings, self.pattern(request))

    def settings(self, request: Request) -> SampleSettings:
        """The sampler's settings: what was asked for, else the model's own."""
        own = own_settings(self.backbone, self.config.sample, request.steps, request.sampler)
        names = ("temperature", "top_p", "remask", "spacing", "guidance")
        asked = {name: getattr(request, name) for name in names}
        return replace(own, **{name: value for name, value in asked.items() if value is not None})

    def pattern(self, request: Request) -> Pattern:
        """The row that every text starts from."""
        if self.backbone.causal:
            for name in ("infill", "suffix", "tokens"):
                if getattr(request, name) is not None:
                    raise ConfigError(
                        f"{name} does not fit an autoregressive model, which only continues a prefix; "
                        "use prefix alone, or a masked diffusion model"
                    )
        if request.infill is not None:
            return self.page.infill(request.infill)
        return self.page.affix(request.prefix, request.suffix, request.tokens)
