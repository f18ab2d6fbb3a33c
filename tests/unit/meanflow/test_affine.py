"""Affine maps of whole rows: moments, inverses, and rows too long for a full matrix."""

import pytest
import torch

from rmdm.errors import DataError
from rmdm.meanflow import affine
from rmdm.meanflow.affine import Affine, Enter, RowMoments

N, G, D = 4000, 2, 3
K = G * D


def rows(seed: int = 0, n: int = N) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator, dtype=torch.float64)
    drawn = torch.randn(n, K, generator=generator, dtype=torch.float64)
    return (drawn @ mix + torch.arange(K)).view(n, G, D)


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = x.double().flatten(1)
    return flat.mean(0), torch.cov(flat.T)


def test_moments_stream_to_those_of_all_rows_at_once():
    x = rows()
    streamed = RowMoments.of(x.split(700))
    mean, covariance = moments(x)
    assert streamed.count == N
    torch.testing.assert_close(streamed.mean_K, mean)
    torch.testing.assert_close(streamed.covariance, covariance)


def test_whitening_gives_mean_0_and_unit_covariance_and_is_symmetric():
    x = rows()
    map_ = Affine.whitening(RowMoments.of([x]))
    mean, covariance = moments(map_.apply(x))
    torch.testing.assert_close(mean, torch.zeros(K).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(covariance, torch.eye(K).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(map_.matrix, map_.matrix.T)
    turned = map_.apply(x).flatten(1) @ torch.linalg.qr(torch.randn(K, K, dtype=torch.float64))[0]
    scale = x.flatten(1) - x.flatten(1).mean(0)
    assert (map_.apply(x).flatten(1) - scale).norm() < (turned - scale).norm(), "it moves rows least"


def test_inverse():
    x = rows()
    map_ = Affine.whitening(RowMoments.of([x]))
    torch.testing.assert_close(map_.inverse().apply(map_.apply(x)), x)


def test_the_map_keeps_the_precision_and_shape_of_its_input():
    x = rows(n=50).float()
    map_ = Affine.whitening(RowMoments.of([rows()]))
    assert map_.matrix.dtype == torch.float64
    assert map_.apply(x).dtype == torch.float32
    assert map_.apply(x).shape == x.shape


def test_a_direction_without_variance_is_left_as_it_is():
    x = rows()
    x[..., 2] = 7.0
    map_ = Affine.whitening(RowMoments.of([x]))
    white = map_.apply(x)
    assert torch.isfinite(white).all()
    assert white.abs().max() < 20, "rounding is not blown up to unit variance"
    torch.testing.assert_close(map_.inverse().apply(white), x)


def test_too_few_rows_for_a_covariance_are_refused_by_number():
    with pytest.raises(DataError, match=r"6 embeddings of 6 numbers are too few.*fewer groups or a smaller latent.dim"):
        RowMoments.of([rows(n=6)], "embeddings")
    assert RowMoments.of([rows(n=7)]).count == 7
    with pytest.raises(DataError, match="NaN"):
        RowMoments.of([rows().index_fill(0, torch.tensor([3]), float("nan"))])


def test_long_rows_get_one_factor_a_number(monkeypatch):
    monkeypatch.setattr(affine, "LARGEST", K - 1)
    x = rows()
    found = RowMoments.of(x.split(700))
    mean, covariance = moments(x)
    torch.testing.assert_close(found.mean_K, mean)
    torch.testing.assert_close(found.covariance, covariance.diagonal(), rtol=1e-3, atol=0)
    map_ = Affine.whitening(found)
    assert map_.matrix.shape == (K,)
    white = map_.apply(x).flatten(1)
    torch.testing.assert_close(white.mean(0), torch.zeros(K).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(white.var(0), torch.ones(K).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(map_.inverse().apply(map_.apply(x)), x)


def test_a_constant_number_of_a_long_row_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(affine, "LARGEST", 1)
    x = rows()
    x[..., 0] = 0.0
    assert not Affine.whitening(RowMoments.of([x])).apply(x)[..., 0].any()


def test_the_layer_applies_the_map_in_float32_also_under_autocast():
    x = rows(n=64).float()
    map_ = Affine.whitening(RowMoments.of([rows()]))
    layer = Enter(map_)
    assert not list(layer.parameters())
    assert not layer.state_dict(), "it is made again from the flow's own file"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer(x)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, map_.apply(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(Enter(None)(x), x)


def test_a_whitening_is_stored_by_its_upper_half_and_any_other_map_whole():
    map_ = Affine.whitening(RowMoments.of([rows()]))
    stored = map_.tensors()
    K = len(map_.offset_K)
    assert stored["half"].shape == (K * (K + 1) // 2,)
    again = Affine.of_tensors(stored)
    torch.testing.assert_close(again.matrix, map_.matrix, rtol=0, atol=1e-12)
    assert torch.equal(again.offset_K, map_.offset_K)
    skew = Affine(torch.arange(4.0).view(2, 2).double(), torch.ones(2).double())
    assert skew.tensors().keys() == {"matrix", "offset"}
    assert torch.equal(Affine.of_tensors(skew.tensors()).matrix, skew.matrix)
