"""A small encoder with fixed random weights that really computes: a table of tokens, pooled over groups.

Run as a module it encodes shards in a process of its own, so that tests can kill it or start it under torchrun.
"""

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.config import Config
from rmdm.data.shards import TokenRows
from rmdm.encoders import cache
from rmdm.encoders.encoder import Pieces
from rmdm.presets import load_config

MAIN = "import sys\nfrom tests.unit.encoders.toy import main\nmain(*sys.argv[1:])\n"
"""The same for a process that starts warm."""


class Toy:
    """Each model token is one token of the encoder; context comes from the token before."""

    context, precision = 4096, "fp32"

    def __init__(self, dim: int = 12, *, seed: int = 0, name: str = "toy", sleep: float = 0.0) -> None:
        self.dim, self.name, self.sleep = dim, name, sleep
        self.fingerprint = f"toy-{seed}-{dim}".ljust(64, "0")
        self.table_VD = torch.randn(4096, dim, generator=torch.Generator().manual_seed(seed)) * 3 + 5
        self.device = torch.device("cpu")
        self.rows = 0
        self.broken: NDArray[np.int64] | None = None
        """A row that gives NaN."""

    def pieces(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        size, out = x_BL.shape[1] // groups, []
        for x_L, length in zip(x_BL, lengths_B, strict=True):
            token_N = np.arange(length)
            group_N = token_N // size
            weight_N = (1 / np.bincount(group_N, minlength=groups)[group_N]).astype(np.float32)
            out.append(Pieces(x_L[:length], token_N, group_N, weight_N))
        return out

    def embed(self, rows: list[Pieces], groups: int) -> Tensor:
        time.sleep(self.sleep)
        self.rows += len(rows)
        e_BGD = torch.zeros(len(rows), groups, self.dim)
        for i, row in enumerate(rows):
            h_TD = self.table_VD[torch.from_numpy(row.ids_T)]
            h_TD = torch.tanh(h_TD + 0.5 * h_TD.roll(1, 0)) + 0.1 * h_TD
            pooled = h_TD[row.token_N] * torch.from_numpy(row.weight_N)[:, None]
            e_BGD[i].index_add_(0, torch.from_numpy(row.group_N), pooled)
            if self.broken is not None and np.array_equal(self.broken[: len(row.ids_T)], row.ids_T):
                e_BGD[i, 0, 0] = float("nan")
        return e_BGD


def toy_config(**latent: object) -> Config:
    """Settings that suit the small corpus of the tests."""
    base = load_config("storyworld-mini")
    values = {"groups": 4, "dim": 8, "fit_rows": 300, **latent}
    return dataclasses.replace(
        base,
        encoder=dataclasses.replace(base.encoder, name="toy", batch_tokens=16 * 256),
        latent=dataclasses.replace(base.latent, **values),
    )


def main(shards: str, folder: str, part_rows: str, sleep: str, broken: str = "") -> None:
    """Encode as one rank of however many there are; the training row `broken` gives NaN."""
    from rmdm.encoders.encode import encode
    from rmdm.training.distributed import world

    set_part_rows(int(part_rows))
    with world("cpu") as here:
        toy = Toy(sleep=float(sleep))
        if broken:
            toy.broken = TokenRows.open(shards, "train").take(np.array([int(broken)]))[0]
        options = {"rank": here.rank, "world": here.size, "barrier": here.barrier}
        encode(toy_config(), Path(shards), toy, folder=Path(folder), progress=False, **options)


def set_part_rows(rows: int) -> None:
    """Smaller parts, so that a small corpus has many."""
    from rmdm.encoders import parts

    cache.PART_ROWS = parts.PART_ROWS = rows


if __name__ == "__main__":
    main(*sys.argv[1:])
