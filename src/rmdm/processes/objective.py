"""What all objectives share: a batch of inputs and selected positions, and the weighted loss over them.

A process decides on the host what the network sees and which positions it must predict, so that every random draw is a
function of (seed, step, row) and every shape is known before the device starts.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rmdm.backbone.cross_entropy import linear_cross_entropy, linear_nll
from rmdm.backbone.dit import Causes, DiT

# Streams of the counter-based generator, one for each kind of draw.
TIME_STREAM, MASK_STREAM, DROPOUT_STREAM = 1, 2, 3


@dataclass(frozen=True)
class Draw:
    """Where the random draws of some rows come from: row b of the global batch of `batch` rows, at (seed, step)."""

    seed: int
    step: int
    rows_B: np.ndarray
    """Places of these rows in the global batch."""
    batch: int
    """Rows in the global batch."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass, shapes static for a given number of rows."""

    x_BL: Tensor
    """What the network sees."""
    select_N: Tensor
    """Flat positions b * L + l to predict, all different; those that fill up the shape weigh 0."""
    target_N: Tensor
    """Their true tokens."""
    weight_N: Tensor
    """Their weights in the bound, before division by the token count; padding has 0."""
    noise_key_B: Tensor
    """One key a row for dropout and for the latent's noise."""
    t_B: Tensor | None = None
    """The time, for models that are told it."""
    z_BGK: Tensor | None = None
    """The rows' embeddings or latents, for models that are given them."""

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`; from pinned memory the copy does not wait."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """The same batch in page-locked memory."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: move(x) for name, x in held.items() if x is not None})


class Process(Protocol):
    """An objective: how rows become a batch, and whether attention is causal."""

    causal: bool
    is_bound: bool
    """Whether exp(loss) bounds the perplexity from above (True) or equals it (False)."""

    def batch(self, x_BL: np.ndarray, counted_BL: np.ndarray, mask_id: int, draw: Draw) -> Batch:
        """Build the batch for clean rows `x_BL`; only positions with `counted_BL` enter the loss."""
        ...


class Objective(nn.Module):
    """The training module: backbone, then head and cross-entropy on the selected positions only.

    A backbone that is told the time is SEDD's: its loss is the score entropy.
    """

    def __init__(self, backbone: DiT) -> None:
        super().__init__()
        self.backbone = backbone
        self.score_entropy = backbone.time is not None

    def forward(self, batch: Batch, per_token: Tensor) -> Tensor:
        """sum_n weight_n * -log p(target_n) * per_token, the mean nats a token when per_token = 1 / tokens."""
        h_ND = self.selected(batch, batch.noise_key_B if self.training else None)
        head, vocab = self.backbone.head.weight, self.backbone.vocab_size
        weight_N = batch.weight_N * per_token
        return linear_cross_entropy(h_ND, head, batch.target_N, weight_N, vocab, self.score_entropy)

    @torch.no_grad()
    def nll(self, batch: Batch) -> Tensor:
        """-log p(target_n), or the score entropy, for each selected position."""
        h_ND = self.selected(batch, None)
        head, vocab = self.backbone.head.weight, self.backbone.vocab_size  # after the forward pass: a shard before it
        return linear_nll(h_ND, head, batch.target_N, vocab, self.score_entropy)

    def selected(self, batch: Batch, noise_key_B: Tensor | None) -> Tensor:
        """Hidden states at the selected positions, (N, D)."""
        causes = Causes(batch.noise_key_B, batch.z_BGK, batch.t_B)
        return self.backbone(batch.x_BL, noise_key_B, causes=causes, at_N=batch.select_N)
