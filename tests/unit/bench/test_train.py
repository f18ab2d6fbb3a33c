import json
import math

import pytest

from rmdm.bench.counts import training_step
from rmdm.bench.sizes import SIZES
from rmdm.cli import main

QUICK = ["--size", "tiny", "--steps", "2", "--warmup", "1", "--matmul", "32", "--device", "cpu", "--json"]


def bench(capsys, *flags):
    assert main(["bench", "train", *QUICK, *flags]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_both_arms_of_two_processes_stand_beside_the_floor(tmp_path, capsys):
    profile = tmp_path / "profile.txt"
    outcome, shown = bench(capsys, "--process", "mdlm,rmdm", "--batch", "4", "--profile", str(profile))
    rows = outcome["bench"]
    assert [(row["process"], row["arm"]) for row in rows] == [
        ("mdlm", "ours"), ("mdlm", "reference"), ("rmdm", "ours"), ("rmdm", "reference")
    ]  # fmt: skip
    for row in rows:
        step = row["seconds_per_step"]
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / step)
        assert row["needed_operations"] == training_step(SIZES["tiny"], row["process"], 4).operations
        assert row["times_the_floor"] == pytest.approx(step / row["floor_seconds"])
        assert row["share_of_matmul_rate"] == pytest.approx(row["needed_operations"] / step / row["matmul_per_s"])
        assert row["peak_bytes"] is None
    # The same weights, rows and masks: the first loss is the same number in both arms.
    assert rows[0]["first_loss"] == pytest.approx(rows[1]["first_loss"], rel=1e-5)
    assert rows[2]["first_loss"] == pytest.approx(rows[3]["first_loss"], rel=1e-5)
    assert all(row["first_loss"] != pytest.approx(math.log(50), rel=1e-5) for row in rows)
    fast, _, latent, _ = outcome["ratios"]
    assert fast["times_as_fast"] == pytest.approx(rows[1]["seconds_per_step"] / rows[0]["seconds_per_step"])
    assert latent["rmdm_over_mdlm"] == pytest.approx(rows[2]["seconds_per_step"] / rows[0]["seconds_per_step"])
    assert "times as fast as the reference arm" in shown
    text = profile.read_text()
    assert "tiny, mdlm" in text
    assert "tiny, rmdm" in text


def test_the_latent_may_have_another_number_of_groups(capsys):
    outcome, shown = bench(capsys, "--process", "mdlm,rmdm", "--arms", "ours", "--groups", "2")
    assert [row["groups"] for row in outcome["bench"]] == [None, 2]
    assert "an RMDM's latent in 2 groups" in shown


@pytest.mark.parametrize("process", ["sedd", "ar"])
def test_the_other_processes(process, capsys):
    rows = bench(capsys, "--process", process)[0]["bench"]
    assert [row["batch"] for row in rows] == [8, 8]
    assert rows[0]["first_loss"] == pytest.approx(rows[1]["first_loss"], rel=1e-5)


def test_one_arm_has_nothing_to_be_compared_with(capsys):
    outcome, _ = bench(capsys, "--arms", "ours")
    assert outcome["ratios"] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "tinny"], "--size tinny is unknown; did you mean 'tiny'?"),
        (["--process", "mdlm,rdm"], "--process rdm is unknown"),
        (["--arms", ""], "--arms names nothing"),
        (["--batch", "0"], "--batch 0 is below 1"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--warmup", "-1"], "--warmup -1 is below 1"),
        (["--matmul", "0"], "--matmul 0 is below 1"),
        (["--profile", "p.txt", "--arms", "reference"], "--profile is of ours"),
        (["--profile", "/nowhere/at/all.txt", "--size", "tiny"], "/nowhere/at/all.txt"),
    ],
)
def test_bad_flags_are_told_in_one_line(flags, message, capsys):
    assert main(["bench", "train", "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
