"""Samplers: plain functions from a backbone and a seed to token rows, each with a callback."""

import torch
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.samplers.ancestral import sample_ancestral
from rmdm.samplers.ar import sample_ar

__all__ = ["sample_ancestral", "sample_ar", "sample_rows"]


def sample_rows(backbone: DiT, n: int, steps: int, seed: int, temperature: float = 1.0, batch: int = 64) -> Tensor:
    """`n` rows from the sampler that fits the backbone, in batches of `batch`; the batch does not change the rows."""
    parts = []
    for first in range(0, n, batch):
        count = min(batch, n - first)
        if backbone.causal:
            parts.append(sample_ar(backbone, count, seed, temperature=temperature, first_row=first))
        else:
            parts.append(sample_ancestral(backbone, count, steps, seed, temperature=temperature, first_row=first))
    return torch.cat(parts)
