"""Token rows to embeddings: in batches of similar length, tokenised ahead, whitened, noise where there is no text."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.config import Config
from rmdm.data.order import uniform
from rmdm.data.shards import Split, TokenRows
from rmdm.encoders.encoder import Encoder, Pieces
from rmdm.encoders.offsets import check_groups
from rmdm.encoders.whitening import Whitening
from rmdm.errors import DataError

EMPTY_STREAM = 0x656D7074
"""Stream of the noise in groups without text ("empt" in ASCII)."""
SPLITS: tuple[Split, ...] = ("train", "valid")


@dataclass(frozen=True)
class Batch:
    """Rows that go through the encoder together."""

    places_B: NDArray[np.int64]
    """Where they stand among the rows asked for."""
    pieces: list[Pieces]
    present_BG: NDArray[np.bool_]
    """Which groups have text."""


class RowEncoder:
    """Embeddings of one split's rows by their numbers. The same request always runs in the same batches."""

    def __init__(self, config: Config, tokens: TokenRows, encoder: Encoder) -> None:
        check_groups(config.latent.groups, tokens.length)
        self.tokens, self.encoder, self.groups = tokens, encoder, config.latent.groups
        self.budget = config.encoder.batch_tokens // (16 if encoder.device.type == "cpu" else 1)

    def batches(self, rows: NDArray[np.int64]) -> list[Batch]:
        """Tokenise rows and cut them, longest first, in batches of at most `budget` tokens with their padding."""
        pieces = self.encoder.pieces(self.tokens.take(rows), self.tokens.lengths(rows), self.groups)
        present_nG = np.zeros((len(rows), self.groups), dtype=np.bool_)
        for place, piece in enumerate(pieces):
            present_nG[place, piece.group_N] = True
        lengths = np.array([len(piece.ids_T) for piece in pieces], dtype=np.int64)
        order, out, start = np.argsort(-lengths, kind="stable"), [], 0
        while start < len(order):
            count = max(1, self.budget // max(1, int(lengths[order[start]])))
            places = order[start : start + count]
            out.append(Batch(places, [pieces[i] for i in places], present_nG[places]))
            start += count
        return out

    def stream(
        self, jobs: Iterable[NDArray[np.int64]], transform: Callable[[Tensor], Tensor] = lambda e: e
    ) -> Iterator[tuple[int, Batch, Tensor]]:
        """(job, batch, transform(e_BGD)) for every batch of every job, which is an array of row numbers.

        A thread tokenises the next job meanwhile, and a batch is handed out when the next is under way: a GPU need not
        wait for what the host does with the result.
        """
        waiting: tuple[int, Batch, Tensor, NDArray[np.int64], Tensor] | None = None
        with ThreadPoolExecutor(1, "tokenise") as pool:
            ahead = ((rows, pool.submit(self.batches, rows)) for rows in jobs)
            following = next(ahead, None)
            for job in itertools.count():
                if following is None:
                    break
                (rows, tokenised), following = following, next(ahead, None)
                for batch in tokenised.result():
                    e_BGD = self.encoder.embed(batch.pieces, self.groups)
                    bad_B = ~torch.isfinite(e_BGD).flatten(1).all(1)
                    ready, waiting = waiting, (job, batch, transform(e_BGD), rows[batch.places_B], bad_B)
                    if ready is not None:
                        yield self._checked(*ready)
            if waiting is not None:
                yield self._checked(*waiting)

    def _checked(
        self, job: int, batch: Batch, out: Tensor, rows_B: NDArray[np.int64], bad_B: Tensor
    ) -> tuple[int, Batch, Tensor]:
        bad = np.sort(rows_B[bad_B.cpu().numpy()])
        if len(bad):
            named = ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
            raise DataError(
                f"embeddings of {self.tokens.split} rows {named} hold NaN or infinity ({self.encoder.name}); "
                "check the encoder, or use encoder.precision fp32; what is already encoded stays"
            )
        return job, batch, out


def fill_empty(
    z_nGK: NDArray[np.float32], present_nG: NDArray[np.bool_], rows_n: NDArray[np.int64], split: str
) -> None:
    """Put N(0, 1) noise, a function of the row's number, where a group has no text.

    A constant would be an atom, which no flow can spread out; noise is Gaussian already and says nothing. The paper's
    latents say that there is padding: docs/paper-map.md, "Groups of padding".
    """
    _, groups, dim = z_nGK.shape
    place, group = np.nonzero(~present_nG)
    counters = ((rows_n[place] * groups + group) * dim)[:, None] + np.arange(dim)
    u = uniform(0, SPLITS.index(split), EMPTY_STREAM, counters) + 2.0**-54
    z_nGK[place, group] = torch.special.ndtri(torch.from_numpy(u)).numpy()


class OnlineLatents:
    """Rows encoded as they are taken: what `LatentRows` reads from a cache, without one (and without its rounding)."""

    def __init__(self, config: Config, tokens: TokenRows, encoder: Encoder, whitening: Whitening) -> None:
        if encoder.device.type == "cuda":
            # A thread may embed while another compiles a step of training; torch 2.11 takes that for nested tracing.
            torch._dynamo.config.error_on_nested_fx_trace = False
        self._rows = RowEncoder(config, tokens, encoder)
        self._whitening = whitening.to(encoder.device)
        self.groups, self.dim, self.split = config.latent.groups, whitening.dim, tokens.split

    @staticmethod
    def open(
        config: Config, shards: Path | str, split: Split, encoder: Encoder, whitening: Whitening
    ) -> "OnlineLatents":
        """Open one split of the token shards."""
        return OnlineLatents(config, TokenRows.open(shards, split), encoder, whitening)

    def __len__(self) -> int:
        return len(self._rows.tokens)

    def take(self, indices: NDArray[np.integer]) -> NDArray[np.float32]:
        """Whitened embeddings of rows by number, in the order asked for: (n, G, D)."""
        indices = np.asarray(indices, dtype=np.int64)
        out = np.empty((len(indices), self.groups, self.dim), dtype=np.float32)
        present = np.zeros(out.shape[:2], dtype=np.bool_)
        for _, batch, z_BGK in self._rows.stream([indices], self._whitening.apply):
            out[batch.places_B], present[batch.places_B] = z_BGK.cpu().numpy(), batch.present_BG
        fill_empty(out, present, indices, self.split)
        return out
