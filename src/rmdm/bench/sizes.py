"""The sizes that are measured, by name. Nothing here imports torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rmdm.errors import ConfigError, nearest


@dataclass(frozen=True)
class Size:
    """A language model's shape, and how it is fed."""

    name: str
    layers: int
    width: int
    heads: int
    length: int
    vocab: int
    """Tokens of the tokenizer; [MASK] comes on top."""
    groups: int
    """Groups G of the latent of an RMDM."""
    dim: int
    """Dimensions D_z of a group."""
    project: int
    """Dimensions d_z of a group that stage II sees."""
    batch: int
    """Rows of a training step."""
    stored: int
    """Numbers of a group in the cache: D_z, or d_z where latents are stored projected."""
    tie: bool = False
    """Whether the token embedding is the head."""
    mlp_ratio: int = 4
    condition: int = 128
    """Width C of the condition."""


@dataclass(frozen=True)
class FlowSize:
    """Shape of the flow of stage I, and how it is fed."""

    name: str
    layers: int
    width: int
    heads: int
    groups: int
    dim: int
    batch: int
    mlp_ratio: int = 4


@dataclass(frozen=True)
class EncoderSize:
    """Shape of a pretrained encoder."""

    name: str
    kind: str
    """Its class in `transformers`, without `Config` and `Model`."""
    layers: int
    width: int
    heads: int
    hidden: int
    """Width of its MLP."""
    vocab: int
    context: int
    """Entries of its table of positions."""
    tokens: int
    """Tokens of a batch."""


# owt, qwen and lm1b: 12 x 768, with the latents of the presets owt-rmdm and lm1b-rmdm; wiki-small: its presets.
SIZES = {
    size.name: size
    for size in (
        Size("owt", 12, 768, 12, 1024, 50_258, groups=1024, dim=32, project=16, stored=16, batch=64),
        Size("qwen", 12, 768, 12, 1024, 151_936, groups=1024, dim=32, project=16, stored=16, batch=32),
        Size("lm1b", 12, 768, 12, 128, 30_522, groups=4, dim=128, project=32, stored=128, batch=512),
        Size(
            "wiki-small", 6, 384, 6, 128, 8192, groups=16, dim=48, project=48, stored=48, batch=1024, tie=True,
            condition=64,
        ),
        Size("tiny", 2, 16, 2, 16, 50, groups=4, dim=6, project=3, stored=6, batch=8, condition=8),
    )
}  # fmt: skip

FLOW_SIZES = {
    size.name: size
    for size in (
        FlowSize("owt", 12, 768, 12, groups=1024, dim=32, batch=32),
        FlowSize("lm1b", 12, 768, 12, groups=4, dim=128, batch=512),
        FlowSize("wiki-small", 7, 256, 4, groups=16, dim=48, batch=2048),
        FlowSize("tiny", 1, 16, 2, groups=4, dim=8, batch=32),
    )
}

ENCODER_SIZES = {
    size.name: size
    for size in (
        EncoderSize("mpnet", "MPNet", 12, 768, 12, 3072, vocab=30_527, context=514, tokens=65_536),
        EncoderSize("minilm", "Bert", 6, 384, 12, 1536, vocab=30_522, context=512, tokens=65_536),
        EncoderSize("tiny", "Bert", 2, 16, 2, 32, vocab=64, context=512, tokens=512),
    )
}


def find_size(name: str) -> Size:
    """The size of that name."""
    if name not in SIZES:
        raise ConfigError(f"--size {name} is unknown; {nearest(name, SIZES)}")
    return SIZES[name]


def find_flow_size(name: str) -> FlowSize:
    """The flow of that name."""
    if name not in FLOW_SIZES:
        raise ConfigError(f"--size {name} is unknown; {nearest(name, FLOW_SIZES)}")
    return FLOW_SIZES[name]


def find_encoder_size(name: str) -> EncoderSize:
    """The encoder of that name."""
    if name not in ENCODER_SIZES:
        raise ConfigError(f"--size {name} is unknown; {nearest(name, ENCODER_SIZES)}")
    return ENCODER_SIZES[name]


def latent_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """What a table's title says of the latent, where one of its rows has one."""
    groups = next((row["groups"] for row in rows if row["groups"] is not None), None)
    return "" if groups is None else f", an RMDM's latent in {groups:,} groups"
