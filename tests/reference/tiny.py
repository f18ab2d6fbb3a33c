"""A network small enough to enumerate, with random weights so that no property holds by accident."""

import itertools

import torch

from rmdm.backbone.dit import DiT
from rmdm.config import ModelConfig


def tiny_backbone(vocab: int, length: int, *, causal: bool = False, seed: int = 0) -> DiT:
    torch.manual_seed(seed)
    model = DiT(ModelConfig(layers=2, width=16, heads=2), vocab, length, causal=causal)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def log_probs(model: DiT, x: tuple[int, ...], masked: tuple[int, ...]) -> torch.Tensor:
    """log p(. | x with `masked` hidden), (L, V) in float64."""
    row = torch.tensor([[model.mask_id if i in masked else token for i, token in enumerate(x)]])
    return model.logits(model(row))[0].double().log_softmax(dim=-1)


def subsets(length: int, size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(length), size))
