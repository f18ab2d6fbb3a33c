"""A trained model to use: text from nothing, around given tokens, or after the latent of another text.

>>> import rmdm

>>> model = rmdm.load("runs/first")
>>> model.generate(n=4, steps=16, seed=0).texts
>>> model.infill("anna was [MASK] near the [MASK:2] .", n=2).texts
>>> model.generate(n=2, like="tom was sad near the river .").texts
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.config import Config
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError
from rmdm.meanflow.flow import Flow
from rmdm.request import ABOUT_LATENTS, GIVEN, SOURCES, Generation, Given, Request, TextLatent
from rmdm.samplers.generate import BATCH, Writer, default_sampler
from rmdm.samplers.given import resample
from rmdm.samplers.infill import Page, Pattern
from rmdm.samplers.latents import LatentReader, LatentSource, slerp
from rmdm.samplers.noise import row_keys
from rmdm.samplers.settings import SamplerName, SampleSettings

Callback = Callable[[int, Tensor], None]
LatentEnd = str | TextLatent | Tensor


@dataclass(frozen=True)
class Drawn:
    """Where the latents of a request come from."""

    by: str
    """`flow` or `prior`: drawn. `latent`, `like`, `between`: named. `encode`, `resample`: from the given tokens.
    `null`: the learned null. `none`: the model has no latent."""
    tau: float = 1.0
    draws: int = 1


@dataclass
class Model:
    """A trained backbone with all that is needed to use it."""

    backbone: DiT
    tokenizer: Tokenizer
    config: Config
    step: int
    folder: Path
    """The release it was read from."""

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
        guidance: float | None = None,
        latent_temperature: float | Literal["paper"] | None = None,
        latent_seed: int | None = None,
        latent: Tensor | TextLatent | None = None,
        like: str | TextLatent | None = None,
        between: tuple[LatentEnd, LatentEnd] | None = None,
        weight: float = 0.5,
        prefix: str | None = None,
        suffix: str | None = None,
        tokens: int | None = None,
        given: Given | None = None,
        draws: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Generation:
        """Write `n` texts; `Request` explains the arguments. `callback(step, x_nL)` sees the rows after each step."""
        request = Request(
            n=n, steps=steps, seed=seed, sampler=sampler, temperature=temperature, top_p=top_p, remask=remask,
            guidance=guidance, latent_temperature=latent_temperature, latent_seed=latent_seed, latent=latent, like=like,
            between=between, weight=weight, prefix=prefix, suffix=suffix, tokens=tokens, given=given, draws=draws,
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
        guidance: float | None = None,
        latent_temperature: float | Literal["paper"] | None = None,
        latent_seed: int | None = None,
        latent: Tensor | TextLatent | None = None,
        like: str | TextLatent | None = None,
        between: tuple[LatentEnd, LatentEnd] | None = None,
        weight: float = 0.5,
        given: Given | None = None,
        draws: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Generation:
        """Fill the gaps of a text, `[MASK]` (one token) or `[MASK:n]`, in `n` ways; the rest of it stays as it is."""
        request = Request(
            infill=text, n=n, steps=steps, seed=seed, sampler=sampler, temperature=temperature, top_p=top_p,
            remask=remask, guidance=guidance, latent_temperature=latent_temperature, latent_seed=latent_seed,
            latent=latent, like=like, between=between, weight=weight, given=given, draws=draws,
        )  # fmt: skip
        return self.write(request, trace=trace, callback=callback)

    def encode(self, text: str) -> TextLatent:
        """What the model's encoder makes of a text."""
        return self._read(text, "text")

    def write(self, request: Request, *, trace: bool = False, callback: Callback | None = None) -> Generation:
        """Write what is asked for."""
        request.check()
        settings, pattern = self.settings(request), self.pattern(request)
        settings.check(self.backbone)
        drawn = self._drawn(request, settings, pattern)
        if drawn.by in ("encode", "like", "between"):
            _ = self.reader  # to load an encoder is not to write
        states: list[NDArray[np.int64]] = []

        def heard(step: int, x_BL: Tensor) -> None:
            if trace:
                states.append(x_BL.cpu().numpy().copy())
            if callback is not None:
                callback(step, x_BL)

        is_heard = trace or callback is not None
        began = time.perf_counter()
        x_BL = torch.from_numpy(pattern.x_L).to(self.device).repeat(request.n, 1)
        zt_BGd = self._latents(request, drawn, x_BL)
        with self.autocast():
            written_BL = self.writer().write(
                x_BL,
                row_keys(request.seed, range(request.n)),
                settings,
                zt_BGd=zt_BGd,
                without=zt_BGd is None,
                batch=request.n if is_heard else BATCH,
                callback=heard if is_heard else None,
            )
        tokens_BL = written_BL.cpu().numpy()
        seconds = time.perf_counter() - began
        shown = pattern.shown or slice(None)
        return Generation(
            texts=self.texts(tokens_BL, pattern),
            tokens=tokens_BL[:, shown],
            trace=np.stack(states)[..., shown] if states else None,
            settings=self._report(request, settings, drawn),
            seconds=seconds,
            latents=zt_BGd,
        )

    def texts(self, x_BL: NDArray[np.int64], pattern: Pattern | None = None) -> list[str]:
        """Rows as texts: what a pattern shows, else the first document of a padded row, else all of a row."""
        if pattern is not None and pattern.shown is not None:
            return [self.tokenizer.decode(row[pattern.shown]) for row in x_BL]
        return [self.tokenizer.decode(row, stop_at_separator=self.page.is_padded) for row in x_BL]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.backbone.embed.weight.device

    def autocast(self) -> torch.autocast:
        """The precision it runs in: bf16 on a GPU, that of its weights on a CPU."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def writer(self) -> Writer:
        """What writes with it, in the way it was trained to draw its latents."""
        return Writer(self.backbone, self._source() if self.backbone.latent is not None else None)

    @cached_property
    def page(self) -> Page:
        """How texts lie in its rows."""
        return Page.of(self.tokenizer, self.config.data)

    @cached_property
    def reader(self) -> LatentReader:
        """What reads latents off texts; the encoder is looked for where training found it."""
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
    def _flow(self) -> Flow:
        return Flow.load(self.folder / "flow", self.device)

    def _source(self) -> LatentSource:
        by_flow = self.config.latent.draw == "flow" and not self.config.latent.independent
        return LatentSource(self._latent(), self._flow if by_flow else None)

    def _latent(self) -> Latent:
        if self.backbone.latent is None:
            raise ConfigError(f"{self.config.name} is a model without a latent; use an rmdm model")
        return self.backbone.latent

    def settings(self, request: Request) -> SampleSettings:
        """The sampler's settings: what was asked for, else the model's own."""
        own, plain = self.config.sample, SampleSettings()
        return SampleSettings(
            sampler=request.sampler or default_sampler(self.backbone),
            steps=self.backbone.length if self.backbone.causal else request.steps or own.steps,
            temperature=own.temperature if request.temperature is None else request.temperature,
            top_p=plain.top_p if request.top_p is None else request.top_p,
            remask=plain.remask if request.remask is None else request.remask,
            guidance=plain.guidance if request.guidance is None else request.guidance,
        )

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

    def _drawn(self, request: Request, settings: SampleSettings, pattern: Pattern) -> Drawn:
        """Where the latents come from."""
        if self.backbone.latent is None:
            for name in ABOUT_LATENTS:
                if getattr(request, name) is not None:
                    raise ConfigError(f"{name} needs a latent, and {self.config.name} has none; use an rmdm model")
            return Drawn("none")
        untrained = self.config.latent.dropout == 0
        if settings.guidance != 1 and untrained:
            raise ConfigError(
                f"guidance={settings.guidance} needs a model that also learnt to do without its latent, and "
                f"{self.config.name} has latent.dropout=0; use guidance=1"
            )
        for name in SOURCES:
            if getattr(request, name) is not None:
                return Drawn(name)
        asked, source = request.latent_temperature, self._source()
        tau = self.config.sample.latent_temperature if asked is None else asked
        plain = Drawn("flow" if source.flow is not None else "prior", source.temperature(tau))
        if not (pattern.x_L != self.tokenizer.mask_id).any() or self.config.latent.independent:
            return plain
        given = request.given or self.config.latent.given or "null"
        if given == "null" and (untrained or settings.guidance != 1):
            why = "latent.dropout=0 never taught it" if untrained else f"guidance={settings.guidance} forbids"
            others = ", ".join(name for name in GIVEN if name != "null")
            raise ConfigError(f"given='null' writes without a latent, which {why}; use {others}")
        if given == "resample":
            return Drawn("resample", plain.tau, request.draws or self.config.sample.draws)
        return plain if given == "prior" else Drawn(given)

    def _latents(self, request: Request, drawn: Drawn, x_BL: Tensor) -> Tensor | None:
        """z~ of the rows; None for the learned null and for models without a latent."""
        seed = request.seed if request.latent_seed is None else request.latent_seed
        keys_B = row_keys(seed, range(request.n))
        if drawn.by in ("none", "null"):
            return None
        if drawn.by == "resample":
            with self.autocast():
                return resample(
                    self.backbone, self._source(), x_BL, keys_B, self.scored(x_BL), draws=drawn.draws, tau=drawn.tau
                )
        if drawn.by == "encode":
            e_1GD, present_1G = self.read_given(x_BL[:1])
            e_BGD = self._filled(TextLatent("", x_BL[0].cpu().numpy(), e_1GD[0], present_1G[0]), keys_B)
            return self._noisy(self.reader.condition(e_BGD), keys_B)
        if request.between is not None:
            return self._between(request.between, request.weight, keys_B)
        if request.like is not None or request.latent is not None:
            end = request.like if request.like is not None else request.latent
            assert end is not None
            return self._end(end, drawn.by, keys_B)
        return self._source().draw(keys_B, drawn.tau)

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

    def _read(self, text: str, name: str) -> TextLatent:
        x_L, length = self.page.whole(text, name)
        e_1GD, present_1G = self.reader.read(x_L[None], np.array([length]))
        return TextLatent(text, x_L[:length], e_1GD[0], present_1G[0])

    def _filled(self, text: TextLatent, keys_B: NDArray[np.int64], name: str = "latent") -> Tensor:
        """Its embedding for each row, with the row's noise where it has no text."""
        latent, n = self._latent(), len(keys_B)
        self._check_shape(text.embedding, (latent.groups, latent.dim), name)
        e_GD, present_G = text.embedding.to(self.device), text.present.to(self.device)
        return self.reader.fill(e_GD.expand(n, -1, -1), present_G.expand(n, -1), keys_B)

    def _noisy(self, z_BGD: Tensor, keys_B: NDArray[np.int64]) -> Tensor:
        """z~: with the noise of training, under the row's key."""
        return self._latent().noisy(z_BGD, torch.from_numpy(keys_B).to(z_BGD.device))

    def _between(self, ends: tuple[LatentEnd, LatentEnd], weight: float, keys_B: NDArray[np.int64]) -> Tensor:
        if len(ends) != 2:
            raise ConfigError(f"between takes two texts or latents, not {len(ends)}")
        first, second = (self._read(end, "between") if isinstance(end, str) else end for end in ends)
        if isinstance(first, TextLatent) and isinstance(second, TextLatent):
            a_BGD, b_BGD = (self._filled(end, keys_B, "between") for end in (first, second))
            return self._noisy(self.reader.between(a_BGD, b_BGD, weight), keys_B)
        a_BGd, b_BGd = (self._end(end, "between", keys_B) for end in (first, second))
        return slerp(a_BGd, b_BGd, weight)

    def _end(self, end: LatentEnd, name: str, keys_B: NDArray[np.int64]) -> Tensor:
        """z~ of each row from a text, what `encode` made of it, or itself."""
        if isinstance(end, str):
            end = self._read(end, name)
        if isinstance(end, TextLatent):
            return self._noisy(self.reader.condition(self._filled(end, keys_B, name)), keys_B)
        latent, n = self._latent(), len(keys_B)
        zt = torch.as_tensor(end, device=self.device, dtype=torch.float32)
        if zt.ndim == 2:
            zt = zt.expand(n, -1, -1)
        self._check_shape(zt, (n, latent.groups, latent.project), name)
        return zt

    def _check_shape(self, given: Tensor, shape: tuple[int, ...], name: str) -> None:
        if tuple(given.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(given.shape)}, this request takes {shape}; use that")
        if not torch.isfinite(given).all():
            raise ConfigError(f"{name} holds NaN or infinity; use a latent of finite numbers")

    def _report(self, request: Request, settings: SampleSettings, drawn: Drawn) -> dict[str, Any]:
        """The settings that were used, ready for JSON."""
        seed = request.seed if request.latent_seed is None else request.latent_seed
        network = "bf16" if self.device.type == "cuda" else "fp32"
        return {
            **vars(settings),
            "seed": request.seed,
            "latent": drawn.by if drawn.by != "none" else None,
            "latent_seed": seed if drawn.by not in ("none", "null") else None,
            "tau": drawn.tau if drawn.by in ("flow", "prior", "resample") else None,
            **({"draws": drawn.draws} if drawn.by == "resample" else {}),
            **({"weight": request.weight} if request.between is not None else {}),
            "precision": f"{network} network, float64 draws",
        }
