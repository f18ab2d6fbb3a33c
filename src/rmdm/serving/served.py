"""The models of a server, and requests made ready for them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rmdm.errors import ConfigError, nearest
from rmdm.model import Model
from rmdm.request import RESAMPLING, Request, SeedLatent
from rmdm.samplers.generate import own_settings
from rmdm.samplers.settings import fitting_samplers
from rmdm.serving.answers import Answers
from rmdm.serving.schema import Ability, CompletionRequest, Latent, ModelCard, SeedEnd

MOST_WORK = 1024
"""Latents that may be weighed for a text that is given in part."""
GAP = 16
"""Tokens between a prompt and a suffix, where nothing is said of it and they fit."""
LEAST_TEMPERATURE = 1e-4
"""What temperature 0 is taken for: the likeliest token, but for ties within rounding."""
SAME = (
    "steps", "seed", "sampler", "top_p", "remask", "spacing", "guidance", "latent_temperature", "latent_seed", "like",
    "weight", "infill", "tokens", "given", "draws", "rounds",
)  # fmt: skip
"""Fields that mean the same in a request of ours."""


class UnknownModelError(ConfigError):
    """No such model is served."""


@dataclass(eq=False)
class Served:
    """A model under a name."""

    name: str
    model: Model
    created: int
    alias: str | None = None
    """A second name it is asked for by."""
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def card(self) -> ModelCard:
        """What it is and can do."""
        model, backbone = self.model, self.model.backbone
        latent = model.config.latent
        has_latent = backbone.latent is not None
        ability = Ability(
            process=model.config.process,
            parameters=sum(p.numel() for p in backbone.parameters()),
            step=model.step,
            length=backbone.length,
            vocabulary=model.tokenizer.size,
            samplers=list(fitting_samplers(backbone)[0]),
            settings=vars(own_settings(backbone, model.config.sample)),
            latent=has_latent,
            has_null=has_latent and latent.dropout > 0,
            reads_text=has_latent and not latent.independent,
        )
        return ModelCard(id=self.name, created=self.created, rmdm=ability)

    def answers(self, body: CompletionRequest) -> list[Answers]:
        """A request made ready, prompt by prompt; raises `ConfigError` where the model cannot meet it."""
        if body.infill is not None and (body.prompt or body.suffix):
            raise ConfigError("infill and prompt exclude each other; write it all into the infill text")
        n, own = body.n or 1, self.model.config.sample
        work = (body.draws or own.draws) * (body.rounds or own.rounds)
        if (body.draws or body.rounds) and work > MOST_WORK:
            raise ConfigError(f"draws times rounds are {work}, over the limit of {MOST_WORK}; ask for fewer")
        common: dict[str, Any] = {name: getattr(body, name) for name in SAME}
        if body.temperature is not None:
            common["temperature"] = max(body.temperature, LEAST_TEMPERATURE)
        common |= {"n": n, "latent": self._latent(body), "between": self._between(body)}
        found = []
        for number, prompt in enumerate(body.prompts):
            own = dict(common)
            if not (prompt or body.suffix or body.infill or body.tokens):
                own |= dict.fromkeys(("given", *RESAMPLING))  # an empty prompt gives nothing to fit a latent to
            request = Request(**own, prefix=prompt or None, suffix=body.suffix or None)
            request = self._with_gap(request, body)
            # An encoder is loaded by the first request that needs it, and only once.
            with self._reading:
                ready = self.model.ready(request)
            found.append(Answers(self.model, ready, body, prompt, number * n))
        return found

    def _with_gap(self, request: Request, body: CompletionRequest) -> Request:
        if request.suffix is None or request.tokens is not None:
            return request
        page = self.model.page
        taken = sum(len(page.encode(part)) for part in ((request.prefix or "").removesuffix(" "), request.suffix))
        fits = max(1, page.room - taken)
        return replace(request, tokens=min(GAP, fits) if body.max_tokens is None else body.max_tokens)

    def _latent(self, body: CompletionRequest) -> Any:
        return None if body.latent is None else self._numbers(body.latent, "latent")

    def _between(self, body: CompletionRequest) -> Any:
        return None if body.between is None else tuple(self._end(end) for end in body.between)

    def _end(self, end: str | SeedEnd | Latent) -> Any:
        if isinstance(end, SeedEnd):
            return SeedLatent(end.seed)
        return end if isinstance(end, str) else self._numbers(end, "between")

    def _numbers(self, values: Any, name: str) -> Any:
        import torch

        try:
            return torch.tensor(values, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError):
            raise ConfigError(
                f"{name} is no table of numbers; give rows of equal length, as return_latents does"
            ) from None


class Shelf:
    """Served models by name; the first is the default."""

    def __init__(self, models: Sequence[Served]) -> None:
        self.models = {served.name: served for served in models}
        self.aliases = {served.alias: served for served in models if served.alias is not None}

    def find(self, name: str | None) -> Served:
        """The model that is asked for."""
        if name is None:
            return next(iter(self.models.values()))
        found = self.models.get(name) or self.aliases.get(name)
        if found is None:
            raise UnknownModelError(f"model={name!r} is not served here; {nearest(name, self.models)}")
        return found
