"""What is measured on: models of a size with random weights, random rows and random latents."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from rmdm.bench.sizes import Size
from rmdm.config import Config, DataConfig, LatentConfig, ModelConfig, OptimConfig, TrainConfig
from rmdm.hub import build_backbone
from rmdm.model import Model
from rmdm.training.language import Corpus, LanguageTask

DRAWN = 0.02
"""Standard deviation of what is added to untrained weights, so that none is zero."""


class RandomRows:
    """Rows of uniformly random tokens in memory."""

    folder = "random rows"

    def __init__(self, n: int, length: int, vocab: int) -> None:
        self.length = length
        self.x_nL = np.random.default_rng(0).integers(vocab, size=(n, length))

    def __len__(self) -> int:
        return len(self.x_nL)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The rows at `indices`."""
        return self.x_nL[indices]


class RandomLatents:
    """Rows of N(0, I) in memory."""

    def __init__(self, n: int, groups: int, dim: int) -> None:
        self.groups, self.dim = groups, dim
        self.z_nGK = np.random.default_rng(0).standard_normal((n, groups, dim), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.z_nGK)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The rows at `indices`."""
        return self.z_nGK[indices]


def config_of(size: Size, process: str, batch: int = 1, steps: int = 1) -> Config:
    """The config of a model of this size, without dropout."""
    return Config(
        name=f"{size.name}-{process}",
        process=process,  # type: ignore[arg-type]
        data=DataConfig(length=size.length),
        model=ModelConfig(
            layers=size.layers, width=size.width, heads=size.heads, mlp_ratio=size.mlp_ratio, tie_embeddings=size.tie
        ),
        latent=LatentConfig(
            groups=size.groups, dim=size.dim, project=size.project, width=size.condition, dropout=0.0
        ),
        optim=OptimConfig(ema=0.9999),
        train=TrainConfig(steps=steps, batch=batch),
    )  # fmt: skip


def training_task(size: Size, process: str, batch: int, steps: int) -> LanguageTask:
    """The loop's own task, on four batches of random rows taken in turn."""
    rows: Any = RandomRows(4 * batch, size.length, size.vocab)
    tokenizer: Any = SimpleNamespace(size=size.vocab)
    latents: Any = None
    if process == "rmdm":
        train = RandomLatents(4 * batch, size.groups, size.stored)
        latents = SimpleNamespace(train=train, valid=None, identity={})
    return LanguageTask(config_of(size, process, batch, steps), Corpus(rows, None, tokenizer), latents=latents)


@torch.no_grad()
def stir(module: nn.Module) -> None:
    """Add noise to the weights, the same to any module of one shape, so that no product is with zeros."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.add_((DRAWN * torch.randn(parameter.shape, generator=generator)).to(parameter.device))


def random_model(size: Size, process: str, device: torch.device) -> Model:
    """A model as it is loaded, but with random weights; its output is not constant, and its latent has its prior."""
    config = config_of(size, process)
    backbone = build_backbone(config, size.vocab)
    stir(backbone)
    tokenizer: Any = SimpleNamespace(size=size.vocab, mask_id=size.vocab)
    return Model(backbone.to(device).eval(), tokenizer, config, 0, Path())
