"""What a sampling request may ask for, and which of it fits which model."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rmdm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rmdm.backbone.dit import DiT

SamplerName = Literal["ancestral", "spaced", "max_prob", "margin", "entropy", "balanced", "analytic", "euler", "ar"]
CONFIDENCE = ("max_prob", "margin", "entropy", "balanced")
SCORE = ("analytic", "euler")
MASKED = ("ancestral", "spaced", *CONFIDENCE)
SAMPLERS = (*MASKED, *SCORE, "ar")
MOST_GUIDANCE = 1000


@dataclass(frozen=True)
class SampleSettings:
    """How to sample, apart from the latent, the given tokens and the seed."""

    sampler: SamplerName = "ancestral"
    """`ancestral`: the model's own law. `spaced`: positions far apart share a step. `max_prob`, `margin`, `entropy`:
    surest positions first, as many each step. `balanced`: surest first, as much entropy each step. `analytic`, `euler`:
    SEDD's. `ar`: left to right."""
    steps: int = 16
    """Denoising steps K; an autoregressive model always takes one a token."""
    temperature: float = 1.0
    """Divides the logits."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this much probability."""
    remask: float = 0.0
    """Share of the written tokens, the least likely ones, that a step takes back; it falls to 0 towards the last step
    (confidence orders only)."""
    guidance: float = 1.0
    """Weight on the latent: logits = l_null + guidance (l_z - l_null)."""
    spacing: int | None = None
    """How many masked positions apart those of a step lie (`spaced` only). When that many steps have written all of
    them, those that are left write them anew, seeing all the rest. None: as many as there are steps."""

    def words(self) -> str:
        """How the texts are written, apart from the number of steps: the sampler and what is not at its default."""
        default = SampleSettings()
        names = ("temperature", "top_p", "remask", "spacing", "guidance")
        changed = [f"{name} {value:g}" for name in names if (value := getattr(self, name)) != getattr(default, name)]
        return ", ".join([self.sampler, *changed])

    def check(self, backbone: "DiT") -> None:
        """Raise `ConfigError` unless every value keeps its rule and the sampler fits the model."""
        self._check_values()
        fitting, kind = fitting_samplers(backbone)
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"sampler={self.sampler!r} is unknown; {nearest(self.sampler, fitting)}")
        if self.sampler not in fitting:
            raise ConfigError(f"sampler={self.sampler!r} does not fit {kind}; use {' or '.join(fitting)}")
        if self.remask > 0 and self.sampler not in CONFIDENCE:
            others = [name for name in CONFIDENCE if name in fitting]
            remedy = f"use {' or '.join(others)}, or remask=0" if others else "use remask=0"
            raise ConfigError(
                f"remask={self.remask} needs a sampler that knows how sure it was, not {self.sampler!r}; {remedy}"
            )
        if self.spacing is not None and self.sampler != "spaced":
            remedy = "use spaced, or leave it out" if "spaced" in fitting else "leave it out"
            raise ConfigError(f"spacing={self.spacing} is for the spaced order, not {self.sampler!r}; {remedy}")
        if self.guidance != 1 and backbone.latent is None:
            raise ConfigError(f"guidance={self.guidance} on a model without a latent; use guidance=1 or an rmdm model")

    def _check_values(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} is below 1; use 16, for example")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} is not a positive number; use 1.0, or 0.0001 for the likeliest"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not above 0 and at most 1; use 0.9, or 1.0 to keep every token")
        if not 0 <= self.remask < 1:
            raise ConfigError(f"remask={self.remask} is not at least 0 and below 1; use 0.1, for example")
        if self.spacing is not None and self.spacing < 2:
            raise ConfigError(f"spacing={self.spacing} is below 2; use 8, for example")
        if not abs(self.guidance) <= MOST_GUIDANCE:
            raise ConfigError(
                f"guidance={self.guidance} is not in -{MOST_GUIDANCE}..{MOST_GUIDANCE}; use 1.0, for example"
            )


def fitting_samplers(backbone: "DiT") -> tuple[tuple[str, ...], str]:
    """The samplers that fit a model, and what kind of model it is."""
    if backbone.causal:
        return ("ar",), "an autoregressive model"
    if backbone.time is not None:
        return SCORE, "a sedd model"
    return MASKED, "a masked diffusion model"
