import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from rmdm.errors import DataError
from rmdm.meanflow import report
from rmdm.meanflow.compare import compare_draws, nearest_distances
from rmdm.meanflow.gaussianity import normal

N, G, D = 1200, 3, 6


def clustered(n: int, seed: int) -> torch.Tensor:
    """Rows that look like whitened embeddings: clusters that the groups of a row share, unit variance on every axis."""
    which = torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(seed))
    centres = normal((6, 1, D), 99)
    centres = (centres - centres.mean(0)) / centres.std(0, correction=0)
    return math.sqrt(0.7) * centres[which] + math.sqrt(0.3) * normal((n, G, D), seed + 1)


@pytest.fixture(scope="module")
def measured() -> dict[str, report.Gaussianity]:
    e_NGD = clustered(N, 5)
    return {
        report.WHITENED_ROW: report.measure(e_NGD, e_NGD, sigma=1.0, slices=32),
        report.FLOOR_ROW: report.measure(normal((N, G, D), 0), train_NGD=normal((N, G, D), 4), slices=32),
    }


def failed(g: report.Gaussianity) -> set[str]:
    return {failure.figure for failure in report.gate(g)}


def test_a_true_gaussian_passes_and_clusters_fail(measured):
    assert report.gate(measured[report.FLOOR_ROW]) == []
    assert {"W1 on axes", "correlation between groups", "classifier accuracy"} <= failed(measured[report.WHITENED_ROW])


def test_a_true_gaussian_passes_whatever_its_size():
    for n, shape in [(100, (1, 4)), (400, (2, 64)), (5000, (4, 8))]:
        for seed in range(3):
            assert report.gate(report.measure(normal((n, *shape), seed), classify=False)) == []


@pytest.mark.parametrize(
    ("spoil", "figure"),
    [
        (lambda z: torch.cat([z[..., :-1], 0.9 * z[..., -1:]], dim=-1), "variance"),
        (lambda z: z * torch.exp(0.15 * normal((len(z), 1, 1), 8)), "spread of the norm"),
        (lambda z: (z + 0.5 * z.roll(1, 1)) / math.sqrt(1.25), "correlation between groups"),
        (lambda z: torch.cat([z[..., :-1], z[..., -1:].sign() * 0.6 + z[..., -1:] * 0.4], dim=-1), "W1 on axes"),
        (lambda z: z + 0.08, "W1 on slices"),
    ],
)
def test_each_fault_is_named(spoil, figure):
    z_NGD = normal((16_384, 2, 4), 3)
    assert report.gate(report.measure(z_NGD, classify=False, slices=64)) == []
    assert figure in failed(report.measure(spoil(z_NGD), classify=False, slices=64))


def test_at_the_size_of_the_issue_the_limits_are_the_issues():
    g = report.measure(normal((100, 4, 128), 0), classify=False, slices=2)
    g = dataclasses.replace(g, rows=16_384, correlation=dataclasses.replace(g.correlation, floor=0.006))
    assert dataclasses.astuple(report.Limits.of(g)) == (0.05, 1.5, 1.5, 1.5, 0.15, 0.03, 0.55)
    few = report.Limits.of(dataclasses.replace(g, rows=1024))
    assert few.variance == pytest.approx(stats.chi2(1024).isf(0.0025 / 512) / 1024 - 1, rel=0.02)


def test_the_classifier_is_trained_on_other_rows_where_there_are_some(measured):
    assert (measured[report.FLOOR_ROW].classifier.trained, measured[report.FLOOR_ROW].classifier.rows) == (2 * N, 2 * N)
    assert (measured[report.WHITENED_ROW].classifier.trained, measured[report.WHITENED_ROW].classifier.rows) == (N, N)


def test_recovery_is_reported(measured):
    assert measured[report.WHITENED_ROW].recovery.z0 == pytest.approx(1, abs=1e-4)
    assert 0.3 < measured[report.WHITENED_ROW].recovery.noisy < 0.9
    assert measured[report.FLOOR_ROW].recovery is None


def test_the_text_fits_the_screen_names_every_latent_and_ends_with_the_gate(measured):
    text = report.render({**measured, "z_0 robust, 16 steps": measured[report.FLOOR_ROW]}, "z_0 robust, 16 steps")
    lines = text.splitlines()
    assert lines[0] == "Latents: 1,200 rows of valid, 3 groups x 6 dimensions"
    assert max(map(len, lines)) <= 100
    assert text.replace("±", "").isascii()
    assert sum(line.startswith(report.WHITENED_ROW) for line in lines) == 2
    assert lines[-1].startswith("z_0 robust, 16 steps: gate: passed (weak, 1,200 rows")
    assert "distrust" not in text
    failing = report.render(measured, report.WHITENED_ROW)
    assert max(map(len, failing.splitlines())) <= 100
    assert "  classifier accuracy " in failing


def test_a_control_within_its_noise_is_within_the_range_that_is_shown(measured):
    """Given a control just below what is expected, when its noise allows for that, then so does the printed range."""
    whitened = measured[report.WHITENED_ROW]
    unsure = dataclasses.replace(
        whitened, classifier=dataclasses.replace(whitened.classifier, value=0.719, stderr=0.028)
    )
    said = "0.719 ±0.028, expected 0.716 to 1.000, it is far from Gaussian: as it should be"
    assert report.controls({report.WHITENED_ROW: unsure}) == [f"control {report.WHITENED_ROW}: {said}"]


def test_a_classifier_that_fails_its_controls_is_not_trusted(measured):
    swapped = {report.FLOOR_ROW: measured[report.WHITENED_ROW], report.WHITENED_ROW: measured[report.FLOOR_ROW]}
    assert [line.endswith("distrust the classifier") for line in report.controls(swapped)] == [True, True]


def test_one_group_has_dashes_for_correlation():
    g = report.measure(normal((200, 1, 4), 0), classify=False, slices=4)
    line = report.table({"one": g}).splitlines()[2]
    assert line.split()[-2:] == ["-", "-"]
    assert "without the classifier" in report.verdict(g)


def test_figures_go_to_json_and_back(measured):
    values = json.loads(json.dumps(report.to_json(measured[report.WHITENED_ROW])))
    assert values["w1_axes"]["mean_ratio"] == pytest.approx(values["w1_axes"]["mean"] / values["w1_axes"]["floor_mean"])
    assert {failure["figure"] for failure in values["gate"]} == failed(measured[report.WHITENED_ROW])


def test_draws_of_the_same_law_meet_the_floor_and_wrong_ones_do_not():
    held, train = clustered(1000, 20), clustered(3000, 30)
    good = compare_draws(clustered(1000, 40), held, train.numpy().astype(np.float16), slices=32)
    assert abs(good.classifier.value - 0.5) < 4 * good.classifier.stderr
    assert good.w1_slices.mean_ratio == pytest.approx(1, abs=0.35)
    assert good.correlation_gap < 2 * good.correlation_floor
    assert good.nearest.ratio == pytest.approx(1, abs=0.05)
    assert good.nearest.closer < 0.04
    wrong = compare_draws(normal((1000, G, D), 1), held, train, slices=32)
    assert wrong.classifier.value > 0.9
    assert wrong.w1_axes.mean_ratio > 1.5
    assert wrong.correlation_gap > 0.5
    text = report.render_draws({"1": wrong, "4": good})
    assert text.startswith("Draws against held-out e: 1,000 rows of valid, 3 groups x 6 dimensions")
    assert max(map(len, text.splitlines())) <= 100
    assert json.loads(json.dumps(report.to_json(good)))["nearest"]["ratio"] == good.nearest.ratio


def test_copies_of_training_rows_are_caught():
    train = clustered(3000, 30)
    found = compare_draws(train[:1000] + 0.01 * normal((1000, G, D), 2), clustered(1000, 20), train, slices=4)
    assert found.nearest.ratio < 0.1
    assert found.nearest.closer > 0.95


def test_nearest_rows_are_exact_across_chunks():
    query, train = normal((20, 2, 3), 1), normal((57, 2, 3), 2) + 50
    train[41] = query[7]
    expected = torch.cdist(query.flatten(1).double(), train.flatten(1).double()).min(1).values
    found = nearest_distances(query, train, chunk=10)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)
    assert found[7] == 0


def test_training_rows_may_be_a_read_only_memmap_but_not_nan(tmp_path):
    np.save(tmp_path / "train.npy", normal((50, 2, 3), 2).numpy())
    train = np.load(tmp_path / "train.npy", mmap_mode="r")
    found = nearest_distances(normal((5, 2, 3), 1), train, chunk=20)
    assert torch.allclose(found, nearest_distances(normal((5, 2, 3), 1), normal((50, 2, 3), 2)))
    spoiled = normal((50, 2, 3), 2)
    spoiled[33, 0, 0] = float("nan")
    with pytest.raises(DataError, match="training rows 30 to 40 hold NaN"):
        nearest_distances(normal((5, 2, 3), 1), spoiled, chunk=10)
    with pytest.raises(DataError, match="classifier's training rows has NaN or infinity in 1 of 50"):
        report.measure(normal((100, 2, 3), 0), train_NGD=spoiled, slices=4)


def test_mismatched_rows_are_refused():
    with pytest.raises(DataError, match="90 rows of embeddings for 100 rows"):
        report.measure(normal((100, 2, 4), 0), normal((90, 2, 4), 1), classify=False, slices=4)
    with pytest.raises(DataError, match=r"shapes \(2, 4\), \(2, 4\), \(2, 5\)"):
        compare_draws(normal((100, 2, 4), 0), normal((100, 2, 4), 1), normal((100, 2, 5), 1))
