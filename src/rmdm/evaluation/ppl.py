"""Perplexity of held-out rows: exact for autoregressive models, an upper bound for masked diffusion.

Given latents that were made of the rows themselves, it is neither: the paper's conditional perplexity.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from rmdm.data.order import permuted
from rmdm.data.shards import TokenRows
from rmdm.processes import Draw, Objective, Process
from rmdm.training.batches import Latents, counted, with_latents

# Validation draws come from a seed of their own, so that every evaluation of a run masks the same positions.
VALIDATION_SEED = 2**32 + 1


@dataclass(frozen=True)
class Perplexity:
    """Mean negative log-likelihood (or its bound) in nats a token, and how it was counted."""

    nats: float
    tokens: int
    is_bound: bool
    is_whole: bool = True
    """Whether all positions count; the text's share of a bound on text and PAD is no bound."""

    @property
    def ppl(self) -> float:
        """exp(nats)."""
        return math.exp(min(self.nats, 700.0))


@torch.no_grad()
def perplexity(
    objective: Objective,
    process: Process,
    rows: TokenRows,
    *,
    limit: int,
    pad_in_loss: bool,
    latents: Latents | None = None,
    batch: int = 64,
    seed: int = VALIDATION_SEED,
) -> Perplexity:
    """Score the first `limit` rows; t is stratified over all of them together, in a random order.

    Without that order the first rows would always be seen with few masks and the last with many, and rows that lie
    near each other are alike.
    """
    device = next(objective.parameters()).device
    n = min(limit, len(rows))
    total, tokens, is_whole = 0.0, 0, True
    was_training = objective.training
    objective.eval()
    try:
        # Dealing rows out with a stride keeps the strata of a batch evenly spaced, as the mask capacity expects.
        chunks = -(-n // batch)
        for first in range(chunks):
            places = np.arange(first, n, chunks)
            chosen = permuted(seed, np.zeros_like(places), places, n)
            x_BL = rows.take(chosen)
            counted_BL = counted(rows, chosen, pad_in_loss)
            built = process.batch(x_BL, counted_BL, objective.backbone.mask_id, Draw(seed, 0, places, n))
            built = with_latents(built, latents, chosen).to(device)
            nll_N = objective.nll(built).double()
            total += float((nll_N * built.weight_N).sum())
            tokens += int(counted_BL.sum())
            is_whole = is_whole and bool(counted_BL.all())
    finally:
        objective.train(was_training)
    return Perplexity(total / tokens, tokens, process.is_bound, is_whole)
