"""Noise made on the device is standard normal, and a function of the row's key, the place and the stream alone."""

import pytest
import torch
from scipy import stats

from rmdm.backbone.noise import bits31, mix32, normal

ROWS, SHAPE = 2048, (4, 16)


def keys(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


# A person may number rows as they like: whole numbers in sequence, or in steps of 2^32, must do as well as hashes.
KEYS = {
    "hashed": keys(ROWS),
    "in sequence": torch.arange(ROWS),
    "high half": torch.arange(ROWS) << 32,
    "negative": -torch.arange(1, ROWS + 1),
}


@pytest.mark.parametrize("kind", KEYS)
def test_moments_and_law_are_those_of_a_standard_normal(kind):
    x = normal(KEYS[kind], SHAPE, 3)
    assert x.shape == (ROWS, *SHAPE)
    assert x.dtype == torch.float32
    assert torch.isfinite(x).all()
    n = x.numel()
    flat = x.double().flatten()
    assert abs(flat.mean()) < 4 * n**-0.5
    assert abs(flat.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((flat**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((flat**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert stats.kstest(flat.numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("kind", KEYS)
def test_rows_and_places_are_independent(kind):
    x = normal(KEYS[kind], SHAPE, 3).flatten(1).double()
    K = x.shape[1]
    across = x.T @ x / ROWS - torch.eye(K, dtype=torch.float64)
    assert across.abs().max() < 6 * ROWS**-0.5, "two places of a row move together"
    neighbours = (x[1:] * x[:-1]).mean(1)
    assert neighbours.abs().max() < 6 * K**-0.5, "two rows that follow each other are alike"
    assert abs(neighbours.mean()) < 5 * (ROWS * K) ** -0.5
    squares = (x**2 - 1) / 2**0.5
    assert ((squares[1:] * squares[:-1]).mean()).abs() < 5 * (ROWS * K) ** -0.5
    # Sums over a row would spread too much or too little if its numbers hung together.
    assert stats.kstest((x.sum(1) / K**0.5).numpy(), "norm").pvalue > 1e-3


def test_streams_are_unlike_each_other():
    a, b = (normal(KEYS["hashed"], SHAPE, stream).double() for stream in (7, 8))
    assert abs((a * b).mean()) < 4 * a.numel() ** -0.5
    assert abs(((a**2 - 1) * (b**2 - 1)).mean() / 2) < 4 * a.numel() ** -0.5
    assert not (a == b).any(dim=(1, 2)).all()


def test_a_row_is_the_same_in_any_batch_and_in_any_order():
    whole = normal(KEYS["hashed"], SHAPE, 5)
    parts = torch.cat([normal(part, SHAPE, 5) for part in KEYS["hashed"].split(300)])
    assert torch.equal(parts, whole)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(normal(KEYS["hashed"][order], SHAPE, 5), whole[order])
    assert torch.equal(normal(KEYS["hashed"], (64,), 5), whole.flatten(1)), "the shape only folds the row"


def test_both_halves_of_a_key_count():
    low, high = torch.tensor([5]), torch.tensor([5 + (1 << 40)])
    assert not torch.equal(normal(low, SHAPE, 0), normal(high, SHAPE, 0))
    # These two keys fold to the same 32 bits for one of the two streams of bits; the other must tell them apart.
    a = torch.tensor([1])
    b = torch.tensor([(1 << 32) | 0])
    assert torch.equal(bits31(a, 8, 0), bits31(b, 8, 0))
    assert not torch.equal(normal(a, SHAPE, 0), normal(b, SHAPE, 0))


def test_the_finaliser_is_a_bijection_whose_bits_are_fair():
    x = torch.arange(1 << 16, dtype=torch.int32)
    mixed = mix32(x)
    assert mixed.dtype == torch.int32
    assert len(mixed.unique()) == len(x)
    share = torch.stack([((mixed >> bit) & 1).double().mean() for bit in range(32)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / len(x) ** 0.5
    bits = bits31(KEYS["hashed"], 64, 0)
    assert bits.min() >= 0
    assert bits.max() > 2**31 - 2**18
