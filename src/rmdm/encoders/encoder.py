"""What every encoder does: rows of model tokens in, one pooled embedding a group out.

Two halves, so that one thread can tokenise while the device works: `pieces` runs on the host and touches no weights,
`embed` runs on the device.

Shapes: B rows, L positions of the model, T tokens of the encoder, G groups, D channels of the encoder.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """One row as the encoder reads it."""

    ids_T: NDArray[np.int64]
    """The encoder's tokens, its special tokens included."""
    token_N: NDArray[np.int64]
    group_N: NDArray[np.int64]
    weight_N: NDArray[np.float32]
    """Entries of the sparse pooling matrix: encoder token token_n counts weight_n in group group_n. Weights of a group
    that has text sum to 1; a group of padding alone has no entry."""


class Encoder(Protocol):
    """A frozen network that embeds text."""

    name: str

    dim: int
    """Channels D of its output, after `encoder.channels`."""
    precision: str
    """Of its matrix products: "bf16" or "fp32"."""
    context: int
    """Most tokens it can read, special tokens included."""
    fingerprint: str
    """Of weights, tokenizer and settings that change its output; not of where it lies."""

    @property
    def device(self) -> torch.device:
        """Where it computes and its output lies."""
        ...

    def pieces(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        """Tokenise rows for the encoder and say how its tokens pool into groups of L / groups positions each.

        `lengths_B` counts the positions that are text; the rest is padding and enters no mean.
        """
        ...

    def embed(self, rows: list[Pieces], groups: int) -> Tensor:
        """Pooled last hidden states e_BGD, float32, on `device`; zeros where a group has no text.

        Whether they are finite is left to whoever takes them off the device: looking would hold up the next batch.
        """
        ...
