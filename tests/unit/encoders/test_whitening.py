"""Whitening is scikit-learn's PCA(whiten=True), however the data is scaled, offset, cut in pieces or stored."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from rmdm.encoders.whitening import Moments, Whitening
from rmdm.errors import ConfigError, DataError


def correlated(n: int, channels: int, seed: int = 0, offset: float = 1e5) -> torch.Tensor:
    """Vectors with scales over three orders of magnitude and offsets a million times the smallest."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, channels)) * np.logspace(-1.5, 1.5, channels)
    return torch.from_numpy(
        x @ np.linalg.qr(random.normal(size=(channels, channels)))[0] + offset * random.normal(size=channels)
    )


def moments_of(e_ND: torch.Tensor, pieces: int = 1) -> Moments:
    moments = Moments.zero(e_ND.shape[1])
    for piece in e_ND.tensor_split(pieces):
        moments.add(piece)
    return moments


@pytest.mark.parametrize("pieces", [1, 7, 400])
def test_it_is_the_pca_of_scikit_learn(pieces):
    e_ND = correlated(400, 24)
    pca = PCA(n_components=10, whiten=True, svd_solver="full").fit(e_ND.numpy())
    ours = Whitening.fit(moments_of(e_ND, pieces), 10)
    theirs = torch.from_numpy(pca.transform(e_ND.numpy()))
    z_NK = ours.apply(e_ND)
    signs = (z_NK * theirs).sum(0).sign()
    assert (z_NK - theirs * signs).abs().max() < 1e-6
    assert ours.kept == pytest.approx(pca.explained_variance_ratio_.sum(), abs=1e-9)
    back = torch.from_numpy(pca.inverse_transform(pca.transform(e_ND.numpy())))
    assert (ours.unapply(z_NK) - back).abs().max() < 1e-6


def test_raw_sums_of_squares_would_fail_on_this_data():
    e_ND = correlated(400, 24)
    naive = e_ND.T @ e_ND / 400 - torch.outer(e_ND.mean(0), e_ND.mean(0))
    exact = torch.from_numpy(np.cov(e_ND.numpy().T, bias=True))
    ours = moments_of(e_ND, 7).scatter_DD / 400
    assert (naive - exact).abs().max() > 1e-5
    assert (ours - exact).abs().max() < 1e-8


def test_whitened_vectors_are_uncorrelated_and_of_variance_one():
    e_ND = correlated(500, 16, offset=1e3)
    z_NK = Whitening.fit(moments_of(e_ND), 16).apply(e_ND)
    assert torch.allclose(torch.cov(z_NK.T), torch.eye(16).double(), atol=1e-6)
    assert z_NK.mean(0).abs().max() < 1e-6


def test_merging_in_any_grouping_counts_each_vector_once():
    e_ND = correlated(90, 5)
    left, right, whole = moments_of(e_ND[:31]), moments_of(e_ND[31:], 3), moments_of(e_ND)
    left.merge(right)
    left.merge(Moments.zero(5))
    left.add(e_ND[:0])
    assert left.count == whole.count == 90
    assert torch.allclose(left.mean_D, whole.mean_D, rtol=1e-12)
    assert torch.allclose(left.scatter_DD, whole.scatter_DD, rtol=1e-8, atol=1e-6)


def test_signs_do_not_depend_on_the_order_of_the_rows():
    e_ND = correlated(300, 6)
    forward, backward = Whitening.fit(moments_of(e_ND), 4), Whitening.fit(moments_of(e_ND.flip(0), 5), 4)
    assert torch.allclose(forward.matrix_KD, backward.matrix_KD, rtol=1e-6)
    assert (forward.matrix_KD.gather(1, forward.matrix_KD.abs().argmax(1, keepdim=True)) > 0).all()


def test_it_is_the_same_after_saving(tmp_path: Path):
    e_ND = correlated(100, 6)
    saved = Whitening.fit(moments_of(e_ND), 4).with_scale(e_ND)
    saved.save(tmp_path / "w.safetensors")
    loaded = Whitening.load(tmp_path / "w.safetensors")
    assert loaded.kept == saved.kept
    for name in ("mean_D", "matrix_KD", "inverse_DK", "scale_K"):
        assert torch.equal(getattr(loaded, name), getattr(saved, name))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_float32_in_float32_out_but_computed_in_float64():
    e_ND = correlated(200, 6).float()
    whitening = Whitening.fit(moments_of(e_ND), 3)
    assert whitening.apply(e_ND).dtype == torch.float32
    assert torch.equal(whitening.apply(e_ND), whitening.apply(e_ND.double()).float())


def test_damage_and_absence_are_told(tmp_path: Path):
    with pytest.raises(DataError, match=r"w\.safetensors is missing; run `rmdm encode`"):
        Whitening.load(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(DataError, match=r"is damaged .* run `rmdm encode` again"):
        Whitening.load(tmp_path / "w.safetensors")


def test_directions_without_variance_are_counted():
    e_ND = correlated(200, 12, offset=1e3).float()
    e_ND[:, [2, 5]] = torch.tensor([0.1, 3e4])
    e_ND[:, 7] = e_ND[:, 6]
    with pytest.raises(
        DataError,
        match=r"latent.dim=10, but the embeddings of toy vary in only 9 directions \(2 of 12 channels are constant\); "
        "use latent.dim 9 or less",
    ):
        Whitening.fit(moments_of(e_ND, 7), 10, "the embeddings of toy")
    assert Whitening.fit(moments_of(e_ND, 7), 9).dim == 9


def test_a_direction_of_rounding_alone_is_no_direction():
    e_ND = torch.from_numpy(np.random.default_rng(0).normal(size=(300, 6))).float()
    e_ND[:, 2:] = 0.7
    e_ND *= 1 + 1e-7 * torch.from_numpy(np.random.default_rng(1).normal(size=(300, 1))).float()
    assert e_ND[:, 3].std() > 0
    with pytest.raises(DataError, match=r"vary in only 2 directions \(4 of 6 channels are constant\)"):
        Whitening.fit(moments_of(e_ND), 3)


def test_embeddings_that_are_all_the_same_are_told():
    with pytest.raises(
        DataError, match=r"vary in only 0 directions \(4 of 4 channels are constant\); use another encoder"
    ):
        Whitening.fit(moments_of(torch.full((50, 4), 0.3)), 2)


def test_too_few_vectors_are_told():
    with pytest.raises(
        DataError, match=r"latent.dim=8, but these embeddings are only 8 vectors.*; use latent.dim 7 or"
    ):
        Whitening.fit(moments_of(correlated(8, 16)), 8)
    assert Whitening.fit(moments_of(correlated(9, 16)), 8).dim == 8


def test_more_dimensions_than_channels_are_told():
    with pytest.raises(ConfigError, match=r"latent.dim=17 is outside 1..16, .*; use latent.dim 16 or less"):
        Whitening.fit(moments_of(correlated(50, 16)), 17)


def test_nan_is_never_taken_in():
    e_ND = correlated(10, 4)
    e_ND[3, 1] = float("nan")
    moments = Moments.zero(4)
    with pytest.raises(DataError, match="NaN or infinity"):
        moments.add(e_ND)
    assert moments.count == 0
