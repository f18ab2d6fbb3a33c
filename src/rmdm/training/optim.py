"""Optimiser, learning-rate schedule and weight average."""

import math

import torch
from torch import Tensor, nn

from rmdm.config import OptimConfig
from rmdm.training.muon import Muon


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """What the config names; weight decay touches the matrices inside the blocks and not embeddings, head or vectors.

    Muon's own updates are for the same matrices.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if ".blocks." in f".{name}" and name.endswith(".weight")]
    chosen = {id(p) for p in decayed}
    rest = [p for _, p in trained if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if config.name == "muon":
        groups[0]["matrices"] = True
        return Muon(groups, config.lr, config.betas, config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of the update that makes step `step` (from 0): linear warm-up, then the schedule."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    fall = max(1, round(config.cooldown * (steps - config.warmup)))
    done = min(1.0, max(0.0, (step + 1 - (steps - fall)) / fall))
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)


def ema_decay(limit: float, step: int) -> float:
    """Decay after update number `step` (from 0): small at first, so that early weights are forgotten."""
    return min(limit, (1 + step) / (10 + step))


@torch.no_grad()
def update_ema(ema: nn.Module, module: nn.Module, decay: float) -> None:
    """ema <- decay * ema + (1 - decay) * weights, parameter by parameter; works on sharded modules alike."""
    averages: list[Tensor] = list(ema.parameters())
    weights: list[Tensor] = list(module.parameters())
    torch._foreach_lerp_(averages, weights, 1 - decay)
