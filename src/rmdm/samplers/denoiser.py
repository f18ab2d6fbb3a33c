"""The network as samplers see it: modulations made once a request, the head only where a token is wanted."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.errors import DataError
from rmdm.samplers.categorical import draw_categorical, probabilities
from rmdm.samplers.packing import packed
from rmdm.samplers.settings import SampleSettings
from rmdm.samplers.trunk import MOST_ROOM, Trunk, forward, of_rows

Callback = Callable[[int, Tensor], None]
"""Sees the number of the step that has just been made, and the rows themselves: copy what is to be kept."""

# Logits of one chunk: a few float64 copies of them are held while tokens are drawn.
CHUNK_ELEMENTS = {"cuda": 2**27, "cpu": 2**22}
FIXED_TOKENS = 8192
"""Tokens the network runs on at a time where their number is fixed: enough to fill a GPU."""
FIXED_PLACES, TOGETHER = 128, 4
"""Places the head runs on at a time where their number is fixed, fewer for a very large vocabulary; and how many times
as many tokens are drawn together: each draw takes the host longer than the GPU takes for so few."""

FEW_GROUPS = 4
"""Positions of a group from which on up a CPU copies modulations more cheaply than it runs the network twice."""


@dataclass(frozen=True)
class Barred:
    """Tokens that may not be written at some places, and others that may not at some others."""

    places_L: Tensor
    tokens_V: Tensor
    begins_L: Tensor | None = None
    """Where a word is to begin."""
    inside_V: Tensor | None = None
    """Tokens that go on with one."""

    def at(self, place_N: Tensor) -> Tensor:
        """(N, V), whether a token may not be written at each of N places."""
        barred_NV = self.places_L[place_N, None] & self.tokens_V
        if self.begins_L is None or self.inside_V is None:
            return barred_NV
        return barred_NV | (self.begins_L[place_N, None] & self.inside_V)


@dataclass(frozen=True)
class Ask:
    """What a sampler wants of the network next: logits at places (local_N, place_N) of the rows `x_RL`."""

    x_RL: Tensor
    rows_R: Tensor | None
    """Their numbers in the batch; None: all of it."""
    local_N: Tensor
    """The places come row after row."""
    place_N: Tensor
    count_R: NDArray[np.int64]
    """How many of them each row has, on the host."""
    t_R: Tensor | None = None

    @property
    def at_N(self) -> Tensor:
        """The places counted through the rows."""
        return self.local_N * self.x_RL.shape[1] + self.place_N


class Denoiser:
    """A backbone with the conditions of the B rows of a batch; without a condition, a latent's learned null is used.

    `c_BGC` may be one row for all. With guidance g != 1 the logits are l_null + g (l_z - l_null).

    How a matrix product rounds depends on its shape, and so on how many rows run together. With `block` every product
    has the same shape, whatever the batch: the network runs on exactly that many rows at a time, the head on a fixed
    number of places, both filled up. A row's text then does not depend on the batch even where float ties
    are frequent (bf16 on a GPU), and the network is recorded once. `trunk`, which needs `block`, keeps what was
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
        self.null = self._modulations(backbone.latent.without(1)) if backbone.latent is not None else None
        self.six = self._of_condition(c_BGC) if c_BGC is not None else self.null
        self.guided = guidance != 1 and c_BGC is not None
        self.both = self._with_null() if self.guided else None

    def logits(
        self, x_RL: Tensor, rows_R: Tensor | None, local_N: Tensor, place_N: Tensor, t_R: Tensor | None = None
    ) -> Tensor:
        """Logits (N, V) at places (local_N, place_N) of `x_RL`, the rows numbered `rows_R` in the batch (None: all)."""
        return torch.cat([logits for _, logits in self.chunks(x_RL, rows_R, local_N, place_N, t_R)])

    def chunks(
        self, x_RL: Tensor, rows_R: Tensor | None, local_N: Tensor, place_N: Tensor, t_R: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The same, a slice of N at a time, so that they need never exist all at once; places come row after row."""
        if (local_N.diff() < 0).any():
            raise ValueError("places must come row after row; sort local_N")
        count_R = torch.bincount(local_N, minlength=len(x_RL)).cpu().numpy()
        return self.hidden(Ask(x_RL, rows_R, local_N, place_N, count_R, t_R)).chunks()

    @torch.no_grad()
    def hidden(self, ask: Ask) -> "Hidden":
        """What the head makes the logits of."""
        at_N, null_ND, (R, L) = ask.at_N, None, ask.x_RL.shape
        if self.both is not None:
            last = len(self.both[0]) - 1
            rows_R = ask.rows_R if ask.rows_R is not None else torch.arange(R, device=self.device)
            rows_R = rows_R.clamp(max=last - 1)  # one condition may be for all rows
            twice_R = torch.cat([rows_R, torch.full_like(rows_R, last)])
            x_RL, t_R = ask.x_RL.repeat(2, 1), ask.t_R.repeat(2) if ask.t_R is not None else None
            twice_N, count_R = torch.cat([at_N, at_N + R * L]), np.tile(ask.count_R, 2)
            h_ND, null_ND = self._run(x_RL, self.both, twice_R, t_R, twice_N, count_R).chunk(2)
            return self._hidden(ask, h_ND, null_ND)
        h_ND = self._run(ask.x_RL, self.six, ask.rows_R, ask.t_R, at_N, ask.count_R)
        if self.guided:
            null_ND = self._run(ask.x_RL, self.null, None, ask.t_R, at_N, ask.count_R)
        return self._hidden(ask, h_ND, null_ND)

    def _hidden(self, ask: Ask, h_ND: Tensor, null_ND: Tensor | None) -> "Hidden":
        # Once, since it waits for the device.
        is_new, self.is_checked = not self.is_checked, True
        fixed = self.block is not None
        return Hidden(self.backbone, ask.place_N, h_ND, null_ND, self.guidance, self.barred, fixed, is_new)

    def _of_condition(self, c_BGC: Tensor) -> list[Tensor]:
        """The modulations of all rows, made and packed a block at a time."""
        if self.block is None:
            return self._modulations(c_BGC)
        blocks, last = filled(len(c_BGC), self.block, self.device), (len(c_BGC) - 1) % self.block + 1
        parts = [self._modulations(c_BGC[of]) for of in blocks]
        # Before `cat`, which copies: a view of what it makes would hold the whole block.
        parts[-1] = [each[:last] for each in parts[-1]]
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def _with_null(self) -> list[Tensor] | None:
        """The modulations of the rows and, as one more row, the null's: both passes of a step are then one run.

        None where it does not pay: with a latent for every few tokens a CPU would copy more than the network computes,
        and a recorded pass has a place for so many rows only.
        """
        assert self.six is not None
        assert self.null is not None
        (rows, groups), device = self.six[0].shape[:2], self.device.type
        if (device == "cpu" and FEW_GROUPS * groups > self.backbone.length) or rows >= MOST_ROOM:
            return None
        both = [
            torch.cat([each, null.expand(1, groups, -1, -1)]) for each, null in zip(self.six, self.null, strict=True)
        ]
        self.six = [each[:rows] for each in both]
        return both

    def _modulations(self, c_BGC: Tensor) -> list[Tensor]:
        six = self.backbone.modulations(c_BGC)
        return packed(six) if self.trunk is not None and self.trunk.packs else six

    def _run(
        self,
        x_RL: Tensor,
        six: list[Tensor] | None,
        rows_R: Tensor | None,
        t_R: Tensor | None,
        at_N: Tensor,
        count_R: NDArray[np.int64],
    ) -> Tensor:
        """Hidden states (N, D) at some places of rows numbered `rows_R` among those of `six`."""
        if self.block is None or len(x_RL) == self.block:
            return self._pass(x_RL, six, rows_R, t_R, at_N)
        ends, parts = np.concatenate([[0], np.cumsum(count_R)]), []
        for first, of in zip(range(0, len(x_RL), self.block), filled(len(x_RL), self.block, self.device), strict=True):
            own_N = at_N[ends[first] : ends[min(first + self.block, len(x_RL))]] - first * x_RL.shape[1]
            own_R = rows_R[of] if rows_R is not None else of
            parts.append(self._pass(x_RL[of], six, own_R, t_R[of] if t_R is not None else None, own_N))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _pass(
        self, x_RL: Tensor, six: list[Tensor] | None, rows_R: Tensor | None, t_R: Tensor | None, at_N: Tensor
    ) -> Tensor:
        """The network on one block."""
        if self.trunk is not None:
            return self.trunk(x_RL, six, at_N, rows_R, t_R)
        if self.block is None:
            return forward(self.backbone, x_RL, of_rows(six, rows_R), t_R, at_N)
        return forward(self.backbone, x_RL, of_rows(six, rows_R), t_R).flatten(0, 1)[at_N]


@torch.no_grad()
def hidden_together(asks: Sequence[tuple[Denoiser, Ask]]) -> "list[Hidden]":
    """The answers to what several samplers ask of one network, each with its own condition, from one run of it."""
    if len(asks) == 1:
        return [asks[0][0].hidden(asks[0][1])]
    first = asks[0][0]
    # A guided row runs twice: with its latent, and further down without.
    runs = [(maker, ask, of_rows(maker.six, ask.rows_R)) for maker, ask in asks]
    runs += [(maker, ask, maker.null) for maker, ask in asks if maker.guided]
    x_RL = torch.cat([ask.x_RL for _, ask, _ in runs])
    t_R = torch.cat([ask.t_R for _, ask, _ in runs if ask.t_R is not None]) if asks[0][1].t_R is not None else None
    six = None
    if first.six is not None:
        # The null is one group for the whole row.
        groups = max(len(own[0][0]) for *_, own in runs if own is not None)
        wide = [[part.expand(len(ask.x_RL), groups, -1, -1) for part in own or []] for _, ask, own in runs]
        six = [torch.cat(parts) for parts in zip(*wide, strict=True)]
    starts = np.cumsum([0, *(ask.x_RL.numel() for _, ask, _ in runs)])
    at_N = torch.cat([start + ask.at_N for (_, ask, _), start in zip(runs, starts, strict=False)])
    count_R = np.concatenate([ask.count_R for _, ask, _ in runs])
    found = first._run(x_RL, six, None, t_R, at_N, count_R).split([len(ask.place_N) for _, ask, _ in runs])
    nulls = iter(found[len(asks) :])
    return [
        maker._hidden(ask, h_ND, next(nulls) if maker.guided else None)
        for (maker, ask), h_ND in zip(asks, found, strict=False)
    ]


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
    is_new: bool = False
    """Whether they are a denoiser's first, which `chunks` makes sure are numbers."""

    def at(self, index_M: Tensor) -> "Hidden":
        """Those of some of the places."""
        null_MD = self.null_ND[index_M] if self.null_ND is not None else None
        return replace(self, place_N=self.place_N[index_M], h_ND=self.h_ND[index_M], null_ND=null_MD)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Logits, -inf for barred tokens, a slice of the places at a time.

        Raises `DataError` where a denoiser's first are no numbers.
        """
        for part, logits in self.free_chunks():
            yield part, self.allowed(part, logits)

    def allowed(self, part: slice, logits_NV: Tensor) -> Tensor:
        """Logits of a slice of the places with -inf for the tokens that are barred there."""
        if self.barred is None:
            return logits_NV
        return logits_NV.masked_fill(self.barred.at(self.place_N[part]), -torch.inf)

    @torch.no_grad()
    def free_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """What `chunks` gives, as if no token were barred."""
        if self.is_new:
            check_finite(self.h_ND)
        N, most = len(self.h_ND), CHUNK_ELEMENTS.get(self.h_ND.device.type, 2**22)
        size = max(1, most // self.backbone.vocab_size)
        if self.fixed:
            size = min(size, FIXED_PLACES) * max(1, min(size // FIXED_PLACES, TOGETHER))
        head_PD = self.backbone.head.weight.to(self.h_ND.dtype) if self.fixed else None
        for first in range(0, max(N, 1), size):
            part = slice(first, min(first + size, N))
            logits = self._head(self.h_ND[part], head_PD, min(size, FIXED_PLACES))
            if self.null_ND is not None:
                null = self._head(self.null_ND[part], head_PD, min(size, FIXED_PLACES)).float()
                logits = null + self.guidance * (logits.float() - null)
            yield part, logits

    def _head(self, h_ND: Tensor, head_PD: Tensor | None, size: int) -> Tensor:
        """Logits (N, V); where the number of places is fixed, by products of `size` of them, filled up."""
        if head_PD is None:
            return self.backbone.logits(h_ND)
        N, missing = len(h_ND), max(-len(h_ND) % size, size - len(h_ND))
        h_MD = F.pad(h_ND, (0, 0, 0, missing)) if missing else h_ND
        logits_MP = h_MD.new_empty(len(h_MD), len(head_PD))
        for h_SD, logits_SP in zip(h_MD.split(size), logits_MP.split(size), strict=True):
            torch.mm(h_SD, head_PD.T, out=logits_SP)
        return logits_MP[:N, : self.backbone.vocab_size]


def draw_tokens(hidden: Hidden, noise_N: Tensor, settings: SampleSettings, *, sure: bool) -> tuple[Tensor, Tensor]:
    """A token for each of N places and, if `sure`, its probability under the model at temperature 1."""
    token_N = torch.empty(len(noise_N), device=noise_N.device, dtype=torch.int64)
    p_N = torch.empty_like(noise_N)
    for part, logits in hidden.chunks():
        token_N[part] = draw_categorical(logits, noise_N[part], settings.temperature, settings.top_p)
        if sure:
            p_N[part] = probabilities(logits).gather(1, token_N[part, None]).squeeze(1)
    return token_N, p_N


Steps = Generator[Ask | None, Hidden | None, Tensor]
"""A sampler at work: it asks, is sent the answer, and returns the rows; None asks for nothing but to be sent on."""


def run_steps(steps: Steps, denoiser: Denoiser) -> Tensor:
    """Answer a sampler until it is done."""
    answer: Hidden | None = None
    try:
        while True:
            ask = steps.send(answer)
            answer = denoiser.hidden(ask) if ask is not None else None
    except StopIteration as done:
        return done.value


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
