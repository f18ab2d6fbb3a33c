"""The network as samplers see it: modulations made once a request, the head only where a token is wanted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.errors import DataError
from rmdm.samplers.trunk import Trunk, forward

Callback = Callable[[int, Tensor], None]
"""Sees the number of the step that has just been made, and the rows themselves: copy what is to be kept."""

# Logits of one chunk: a few float64 copies of them are held while tokens are drawn.
CHUNK_ELEMENTS = {"cuda": 2**27, "cpu": 2**22}
FIXED_TOKENS = 8192
"""Tokens the network runs on at a time where their number is fixed: enough to fill a GPU."""
FIXED_PLACES = 256
"""Places the head runs on at a time where their number is fixed; fewer for a very large vocabulary."""


@dataclass(frozen=True)
class Barred:
    """Tokens that may not be written at some places."""

    places_L: Tensor
    tokens_V: Tensor


class Denoiser:
    """A backbone with the conditions of the B rows of a batch; without a condition, a latent's learned null is used.

    `c_BGC` may be one row for all. With guidance g != 1 the logits are l_null + g (l_z - l_null).

    How a matrix product rounds depends on its shape, and so on how many rows run together. With `block` every product
    has the same shape, whatever the batch: the network runs on exactly that many rows at a time, the head on a fixed
    number of places, both filled up. A row's text then does not depend on the batch even where float ties
    are frequent (bf16 on a GPU), and a compiled network is compiled once. `trunk`, which needs `block`, keeps what was
    recorded of the network for other batches.
    """

    @torch.no_grad()
    def __init__(
        self,
        backbone: DiT,
        c_BGC: Tensor | None = None,
        guidance: float = 1.0,
        block: int | None = None,
        barred: Barred | None = None,
        trunk: Trunk | None = None,
    ) -> None:
        self.backbone, self.guidance, self.block, self.barred = backbone, guidance, block, barred
        self.trunk = trunk
        self.mask_id, self.device = backbone.mask_id, backbone.embed.weight.device
        self.is_checked = False
        if c_BGC is not None and backbone.latent is None:
            raise ValueError("a condition was given to a model without a latent")
        self.null = backbone.modulations(backbone.latent.without(1)) if backbone.latent is not None else None
        self.six = self._modulations(c_BGC) if c_BGC is not None else self.null
        self.guided = guidance != 1 and c_BGC is not None

    def logits(
        self, x_RL: Tensor, rows_R: Tensor | None, local_N: Tensor, place_N: Tensor, t_R: Tensor | None = None
    ) -> Tensor:
        """Logits (N, V) at places (local_N, place_N) of `x_RL`, the rows numbered `rows_R` in the batch (None: all)."""
        return torch.cat([logits for _, logits in self.chunks(x_RL, rows_R, local_N, place_N, t_R)])

    def chunks(
        self, x_RL: Tensor, rows_R: Tensor | None, local_N: Tensor, place_N: Tensor, t_R: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The same, a slice of N at a time, so that they need never exist all at once."""
        return self.hidden(x_RL, rows_R, local_N, place_N, t_R).chunks()

    @torch.no_grad()
    def hidden(
        self, x_RL: Tensor, rows_R: Tensor | None, local_N: Tensor, place_N: Tensor, t_R: Tensor | None = None
    ) -> "Hidden":
        """What the head makes the logits of."""
        h_ND = self._run(x_RL, self._of_rows(rows_R), t_R)[local_N, place_N]
        null_ND = self._run(x_RL, self.null, t_R)[local_N, place_N] if self.guided else None
        if not self.is_checked:  # once, since it waits for the device
            check_finite(h_ND)
            self.is_checked = True
        return Hidden(self.backbone, place_N, h_ND, null_ND, self.guidance, self.barred, self.block is not None)

    def _modulations(self, c_BGC: Tensor) -> list[Tensor]:
        if self.block is None:
            return self.backbone.modulations(c_BGC)
        parts = [self.backbone.modulations(c_BGC[of]) for of in filled(len(c_BGC), self.block, self.device)]
        return [torch.cat(each)[: len(c_BGC)] for each in zip(*parts, strict=True)]

    def _run(self, x_RL: Tensor, six: list[Tensor] | None, t_R: Tensor | None) -> Tensor:
        """Hidden states (R, L, D)."""
        if self.block is None:
            return forward(self.backbone, x_RL, six, t_R)
        parts = []
        for of in filled(len(x_RL), self.block, self.device):
            some = [each[of] if len(each) > 1 else each for each in six] if six is not None else None
            some_t = t_R[of] if t_R is not None else None
            if self.trunk is None:
                parts.append(forward(self.backbone, x_RL[of], some, some_t))
            else:
                h_RLD = self.trunk(x_RL[of], some, some_t)
                parts.append(h_RLD.clone() if len(x_RL) > self.block else h_RLD)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _of_rows(self, rows_R: Tensor | None) -> list[Tensor] | None:
        """The modulations of some rows; those of a single row hold for all."""
        if self.six is None or rows_R is None or len(self.six[0]) == 1:
            return self.six
        return [each[rows_R] for each in self.six]


@dataclass(frozen=True)
class Hidden:
    """Hidden states at N wanted places, and those without the latent where guidance needs them."""

    backbone: DiT
    place_N: Tensor
    h_ND: Tensor
    null_ND: Tensor | None
    guidance: float
    barred: Barred | None = None
    fixed: bool = False
    """Whether the head runs on the same number of places whatever N is."""

    def at(self, index_M: Tensor) -> "Hidden":
        """Those of some of the places."""
        null_MD = self.null_ND[index_M] if self.null_ND is not None else None
        return replace(self, place_N=self.place_N[index_M], h_ND=self.h_ND[index_M], null_ND=null_MD)

    @torch.no_grad()
    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Logits, a slice of the places at a time."""
        N, most = len(self.h_ND), CHUNK_ELEMENTS.get(self.h_ND.device.type, 2**22)
        size = max(1, most // self.backbone.vocab_size)
        size = min(size, FIXED_PLACES) if self.fixed else size
        for first in range(0, max(N, 1), size):
            part = slice(first, min(first + size, N))
            logits = self._head(self.h_ND[part], size)
            if self.null_ND is not None:
                null = self._head(self.null_ND[part], size).float()
                logits = null + self.guidance * (logits.float() - null)
            if self.barred is not None:
                barred_NV = self.barred.places_L[self.place_N[part], None] & self.barred.tokens_V
                logits = logits.masked_fill(barred_NV, -torch.inf)
            yield part, logits

    def _head(self, h_ND: Tensor, size: int) -> Tensor:
        if not self.fixed:
            return self.backbone.logits(h_ND)
        return self.backbone.logits(F.pad(h_ND, (0, 0, 0, size - len(h_ND))))[: len(h_ND)]


def check_finite(x: Tensor) -> None:
    """Raise where a network gave something else than numbers."""
    if not torch.isfinite(x).all():
        raise DataError("the model gives NaN or infinity; its weights are damaged, or the latent is far too large")


def fixed_rows(backbone: DiT) -> int | None:
    """The block for a model on a GPU, where rounding shows in the text; on a CPU it hardly ever does."""
    is_cuda = backbone.embed.weight.is_cuda
    return max(1, FIXED_TOKENS // backbone.length) if is_cuda else None


def in_blocks(function: Callable[[Tensor], Tensor], x_B: Tensor, block: int | None) -> Tensor:
    """`function` of the rows of `x_B`, on exactly `block` of them at a time, filled up."""
    if block is None:
        return function(x_B)
    return torch.cat([function(x_B[of]) for of in filled(len(x_B), block, x_B.device)])[: len(x_B)]


def filled(count: int, block: int, device: torch.device) -> list[Tensor]:
    """Numbers 0..count-1 in blocks of one size, the last of which repeats its last number."""
    return [torch.arange(i, i + block, device=device).clamp_(max=count - 1) for i in range(0, count, block)]


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device; the copy to a GPU does not wait for what the GPU is still doing."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
