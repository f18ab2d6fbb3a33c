"""What can be asked of a trained model, and what comes back. Nothing here imports torch.

Shapes: n texts, L positions, G groups, D_z numbers of an embedding's group, d_z of a latent's as the model sees it.
"""

import numbers
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rmdm.errors import ArgumentsError, ConfigError, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rmdm.samplers.settings import SamplerName

Given = Literal["null", "prior", "encode", "resample"]
GIVEN = ("null", "prior", "encode", "resample")
MOST_SEED = 2**63 - 1
RANGES: dict[str, tuple[int, int, str]] = {
    "n": (1, 100_000, "4, for example"),
    "steps": (1, 1_000_000, "16, for example"),
    "seed": (0, MOST_SEED, "0, for example"),
    "latent_seed": (0, MOST_SEED, "0, for example"),
    "spacing": (2, 1_000_000, "8, for example"),
    "tokens": (1, 1_000_000, "8, for example"),
    "draws": (1, 10_000, "16, for example"),
    "rounds": (1, 10_000, "32, for example"),
}
"""Least and largest value of each whole number of a request, and what to use instead of another."""
ALWAYS = ("n", "seed")
"""Those of them that nothing else decides, so that None is no choice."""
NUMBERS = ("temperature", "top_p", "remask", "guidance", "weight")
TEXTS = ("sampler", "prefix", "suffix", "infill")
AFFIXES = ("prefix", "suffix", "tokens")
SOURCES = ("latent", "like", "between")
RESAMPLING = ("draws", "rounds")
ABOUT_LATENTS = (*SOURCES, "latent_temperature", "latent_seed", "given", *RESAMPLING)


@dataclass(frozen=True, eq=False)
class TextLatent:
    """What the encoder makes of a text; `latent=`, `like=` and `between=` take it."""

    text: str
    tokens: "NDArray[np.int64]"
    """Ids of the text, with the special tokens around it."""
    embedding: "Tensor"
    """Whitened embedding e, (G, D_z)."""
    present: "Tensor"
    """Which groups have text, (G,); the others get noise of the row that is written, as in training."""


@dataclass(frozen=True)
class SeedLatent:
    """The latent that a seed draws, for `between=`; that of text i follows from (seed, i)."""

    seed: int

    def check(self) -> None:
        """Raise `ConfigError` for what is no seed."""
        if not isinstance(self.seed, numbers.Integral) or not 0 <= self.seed <= MOST_SEED:
            raise ConfigError(f"SeedLatent({self.seed!r}) is no seed; use a whole number from 0 to {MOST_SEED}")


@dataclass(frozen=True, eq=False)
class Generation:
    """Texts, and how they came about."""

    texts: list[str]
    tokens: "NDArray[np.int64]"
    """Ids of the rows, (n, L); of a text of known length only its own."""
    trace: "NDArray[np.int64] | None"
    """The rows after each step, (steps, n, L), if asked for; the mask's id stands where nothing is written yet.

    An autoregressive model makes a step for each token it writes."""
    settings: dict[str, Any]
    """What they were written with, ready for JSON."""
    seconds: float
    """Time to draw latents and tokens."""
    latents: "Tensor | None"
    """z~ of the rows, (n, G, d_z), which `latent=` takes; None without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What to write. None leaves a choice to the model's own settings."""

    n: int = 1
    """Number of texts."""
    steps: int | None = None
    """Denoising steps; an autoregressive model always takes one a token."""
    seed: int = 0
    """Same seed, same texts; text i follows from (seed, i)."""
    sampler: "SamplerName | None" = None
    """`ancestral`, `spaced`, `max_prob`, `margin`, `entropy`, `balanced`, `analytic`, `euler` or `ar`: see
    `SampleSettings`."""
    temperature: float | None = None
    """Divides the logits."""
    top_p: float | None = None
    """Draw from the smallest set of tokens that holds this much probability."""
    remask: float | None = None
    """Share of the written tokens that the first step takes back, later ones less (confidence orders only)."""
    spacing: int | None = None
    """How many masked positions apart those of a step lie; steps beyond that many write anew (`spaced` only)."""
    guidance: float | None = None
    """Weight on the latent."""
    latent_temperature: float | Literal["paper"] | None = None
    """tau: scales the noise a latent is drawn from; `paper` is 1 / sqrt(1 + sigma^2)."""
    latent_seed: int | None = None
    """Seed of the latents, where it is not that of the tokens; the latent of text i follows from (latent_seed, i)."""
    latent: "Tensor | TextLatent | None" = None
    """z~ for all texts, (G, d_z), or one a text, (n, G, d_z); or what `Model.encode` returns."""
    like: str | TextLatent | None = None
    """A text whose latent to write with."""
    between: "tuple[str | TextLatent | SeedLatent | Tensor, str | TextLatent | SeedLatent | Tensor] | None" = None
    """Two texts, seeds (`SeedLatent`) or latents, to write in between of."""
    weight: float | None = None
    """Where between the two: 0 is the first, 1 the second; None is the middle."""
    prefix: str | None = None
    """What the texts begin with."""
    suffix: str | None = None
    """What the texts end with."""
    tokens: int | None = None
    """Number of tokens between prefix and suffix, or after the prefix."""
    infill: str | None = None
    """A text with gaps, `[MASK]` or `[MASK:n]`, to be filled."""
    given: Given | None = None
    """Where the latent comes from when tokens are given; see `LatentConfig.given`."""
    draws: int | None = None
    """For `given="resample"`: latents to choose from."""
    rounds: int | None = None
    """For `given="resample"`: how often one is chosen, each time but the first from latents near the last choice."""

    def check(self) -> None:
        """Raise `ConfigError` for what no model could do; what depends on the model is checked when it is written."""
        self._check_types()
        for name, (low, high, example) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                side = f"below {low}" if value < low else f"above {high}"
                raise ConfigError(f"{name}={value} is {side}; use {example}")
        if self.weight is not None and not 0 <= self.weight <= 1:
            raise ConfigError(f"weight={self.weight} is outside 0..1; use 0.5 for the middle")
        if self.weight is not None and self.between is None:
            raise ArgumentsError(
                f"weight={self.weight} is for between; give two texts or latents, or drop it", "between"
            )
        if self.given is not None and self.given not in GIVEN:
            raise ConfigError(f"given={self.given!r} is unknown; {nearest(str(self.given), GIVEN)}")
        self._check_latent()
        affixes = self._named(AFFIXES)
        if self.infill is not None and affixes:
            raise ArgumentsError(
                f"infill and {affixes[0]} exclude each other; write it all into the infill text", "infill", affixes[0]
            )
        if self.given is not None and self.infill is None and not affixes:
            raise _needs_tokens(f"given={self.given!r}")
        for name in self._named(RESAMPLING):
            if self.infill is None and not affixes:
                raise _needs_tokens(f"{name}={getattr(self, name)}")
            if self.given not in (None, "resample"):
                raise ConfigError(f"{name}={getattr(self, name)} is for given='resample', not {self.given!r}; drop one")

    def _check_types(self) -> None:
        for name, (*_, example) in RANGES.items():
            value = getattr(self, name)
            if value is not None or name in ALWAYS:
                try:
                    object.__setattr__(self, name, operator.index(value))  # numpy's whole numbers too
                except TypeError:
                    raise ConfigError(f"{name}={value!r} is no whole number; use {example}") from None
            _check_size(name, value, example)
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, numbers.Real):
                raise ConfigError(f"{name}={value!r} is no number; use 0.5, for example")
            _check_size(name, value, "0.5, for example")
        tau = self.latent_temperature
        is_named = isinstance(tau, str) and tau == "paper"
        if tau is not None and not is_named and not isinstance(tau, numbers.Real):
            raise ConfigError(f"latent_temperature={tau!r} is no number; use 1.0 or 'paper'")
        _check_size("latent_temperature", None if is_named else tau, "1.0 or 'paper'")
        for name in TEXTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r} is no text; give a string")
        if self.like is not None and not isinstance(self.like, str | TextLatent):
            raise ConfigError(f"like={self.like!r} is no text; give a string, or what Model.encode returns")
        if self.between is not None and (not isinstance(self.between, tuple | list) or len(self.between) != 2):
            raise ConfigError("between takes two texts or latents; give a pair of them")
        for end in self.between or ():
            if isinstance(end, SeedLatent):
                end.check()
            elif end is None:
                raise ConfigError("between takes two texts or latents, and one of them is None; give both")

    def _check_latent(self) -> None:
        sources = self._named(SOURCES)
        if len(sources) > 1:
            raise ArgumentsError(f"{sources[0]} and {sources[1]} both name a latent; give one of them", *sources[:2])
        idle = self._named(
            ("latent_temperature", "given", *RESAMPLING, *(("latent_seed",) if self.has_fixed_latent else ()))
        )
        if sources and idle:
            raise ArgumentsError(
                f"{idle[0]} has no say where {sources[0]} names the latent; give one of them", idle[0], sources[0]
            )

    @property
    def has_fixed_latent(self) -> bool:
        """Whether the latents are given as numbers, so that no seed has a say in them."""
        return self.latent is not None and not isinstance(self.latent, str | TextLatent)

    def _named(self, names: tuple[str, ...]) -> list[str]:
        """Those of the fields that were asked for."""
        return [name for name in names if getattr(self, name) is not None]


def _check_size(name: str, value: Any, example: str) -> None:
    """Raise `ConfigError` for a number that no float holds, which could not be compared or even printed."""
    try:
        float(value or 0)
    except OverflowError:
        raise ConfigError(f"{name} is a number of hundreds of digits; use {example}") from None


def _needs_tokens(what: str) -> ArgumentsError:
    """An error on an argument that says nothing where no tokens are given."""
    remedy = "give a prefix, a suffix or an infill text"
    return ArgumentsError(f"{what} is about given tokens; {remedy}", "prefix", "suffix", "infill")
