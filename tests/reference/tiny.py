"""A network small enough to enumerate, with random weights so that no property holds by accident."""

import itertools
from collections.abc import Iterable

import numpy as np
import torch
from scipy.stats import chisquare

from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.backbone.time import Time
from rmdm.config import LatentConfig, ModelConfig

Row = tuple[int, ...]
Law = dict[Row, float]


def tiny_backbone(
    vocab: int, length: int, *, causal: bool = False, seed: int = 0, groups: int | None = None, time: bool = False
) -> DiT:
    """With `groups`, a model with a latent of 4 numbers a group, of which it sees 3; with `time`, one told the time."""
    torch.manual_seed(seed)
    condition = None
    if groups is not None:
        condition = Latent(LatentConfig(groups=groups, dim=4, project=3, width=8), seed)
    elif time:
        condition = Time(8)
    model = DiT(ModelConfig(layers=2, width=16, heads=2), vocab, length, causal=causal, condition=condition)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def log_probs(model: DiT, x: Row, masked: Row, c_BGC: torch.Tensor | None = None) -> torch.Tensor:
    """log p(. | x with `masked` hidden), (L, V) in float64."""
    row = torch.tensor([[model.mask_id if i in masked else token for i, token in enumerate(x)]])
    return model.logits(model(row, c_BGC=c_BGC))[0].double().log_softmax(dim=-1)


def subsets(length: int, size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(length), size))


def p_value(rows: Iterable[Row], law: Law, least: float = 5.0) -> float:
    """Of the chi-square test that the rows follow the law; outcomes expected fewer than `least` times are one cell."""
    counts = dict.fromkeys(law, 0)
    total = 0
    for row in rows:
        counts[row] += 1
        total += 1
    observed, expected = np.array(list(counts.values())), np.array(list(law.values())) * total
    if (observed[expected == 0] > 0).any():
        return 0.0
    rare = expected < least
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert kept.sum() > 1
    return float(chisquare(observed[kept], expected[kept]).pvalue)
