import json

import pytest

from rmdm.bench.counts import request
from rmdm.bench.sizes import SIZES
from rmdm.cli import main
from tests.release import save_release

QUICK = ["--size", "tiny", "--matmul", "32", "--device", "cpu", "--repeats", "1", "--json"]


def bench(capsys, *flags):
    assert main(["bench", "sample", *flags]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_whole_requests_of_both_arms_stand_beside_the_floor(capsys):
    outcome, shown = bench(capsys, *QUICK, "--steps", "4,20", "--batch", "3", "--reference-steps", "5")
    rows = outcome["bench"]
    assert [(row["process"], row["steps"], row["arm"]) for row in rows] == [
        (process, steps, arm) for process in ("mdlm", "rmdm") for steps in (4, 20) for arm in ("ours", "reference")
    ]
    for row in rows:
        steps = row["steps"]
        assert row["tokens_per_s"] == pytest.approx(3 * 16 / row["seconds"])
        assert row["seconds_per_step"] == pytest.approx(row["seconds"] / steps)
        assert row["measured_steps"] == (min(steps, 5) if row["arm"] == "reference" else steps)
        floor = request(SIZES["tiny"], row["process"], 3, steps, 4)
        assert (row["needed_operations"], row["needed_bytes"]) == (floor.operations, floor.bytes)
        assert row["floor_seconds_per_step"] == pytest.approx(row["floor_seconds"] / steps)
        assert row["times_the_floor"] == pytest.approx(row["seconds_per_step"] / row["floor_seconds_per_step"])
    assert "inferred from its first 5 steps" in shown
    rate = {(row["process"], row["steps"], row["arm"]): row["tokens_per_s"] for row in rows}
    by = {(each.get("process", each.get("arm")), each["steps"]): each for each in outcome["ratios"]}
    assert by["mdlm", 20]["times_as_fast"] == pytest.approx(
        rate["mdlm", 20, "ours"] / rate["mdlm", 20, "reference"]
    )  # fmt: skip
    assert by["ours", 4]["rmdm_over_mdlm"] == pytest.approx(rate["rmdm", 4, "ours"] / rate["mdlm", 4, "ours"])


def test_the_latent_may_have_another_number_of_groups(capsys):
    flags = ["--process", "mdlm,rmdm", "--arms", "ours", "--steps", "4", "--batch", "1"]
    rows, shown = {}, {}
    for groups in (2, 8):
        outcome, shown[groups] = bench(capsys, *QUICK, *flags, "--groups", str(groups))
        rows[groups] = outcome["bench"]
        assert [row["groups"] for row in rows[groups]] == [None, groups]
    assert "an RMDM's latent in 8 groups" in shown[8]
    assert rows[2][0]["needed_operations"] == rows[8][0]["needed_operations"]
    assert rows[2][1]["needed_operations"] < rows[8][1]["needed_operations"]


def test_a_profile_is_of_one_request(tmp_path, capsys):
    profile = tmp_path / "profile.txt"
    flags = ["--arms", "ours", "--steps", "4,20", "--batch", "3", "--profile", str(profile)]
    bench(capsys, *QUICK, *flags)
    text = profile.read_text()
    assert "tiny, mdlm, 3 texts, 4 steps" in text
    assert "tiny, rmdm, 3 texts, 4 steps" in text
    assert "aten::" in text


def test_latency_is_of_single_texts(capsys):
    outcome, shown = bench(
        capsys, *QUICK, "--process", "rmdm", "--arms", "ours", "--steps", "4", "--latency", "--requests", "5"
    )
    (row,) = outcome["latency"]
    assert (row["arm"], row["steps"], row["requests"]) == ("tiny-rmdm", 4, 5)
    assert 0 < row["median_seconds"] <= row["p95_seconds"]
    assert "one text of 16 tokens at a time" in shown


def test_latency_of_runs_leaves_their_record_as_it_is(tmp_path, capsys):
    out = save_release(tmp_path / "run", "mdlm")
    command = [str(out), "--steps", "2", "--repeats", "1", "--json"]
    rows = bench(capsys, *command)[0]["bench"]
    outcome, shown = bench(capsys, *command, "--latency", "--requests", "2")
    assert "already done" in shown
    assert outcome["bench"] == rows == json.loads((out / "eval" / "bench.json").read_text())["rows"]
    assert [row["arm"] for row in outcome["latency"]] == ["tiny-mdlm"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to measure"),
        (["RUN", "--size", "tiny"], "--size tiny and RUN cannot be measured together"),
        (["RUN", "--arms", "ours"], "--arms has no effect on runs"),
        (["RUN", "--profile", "p.txt"], "--profile has no effect on runs"),
        (["--size", "tiny", "--profile", "p.txt", "--arms", "reference"], "--profile is of ours"),
        (["--size", "tiny", "--profile", "/nowhere/at/all.txt"], "/nowhere/at/all.txt"),
        (["RUN", "--reference-steps", "3"], "--reference-steps has no effect on runs"),
        (["RUN", "--groups", "4"], "--groups has no effect on runs"),
        (["--size", "tiny", "--groups", "5"], "--groups 5 does not divide rows of 16 tokens"),
        (["--size", "tiny", "--groups", "0"], "--groups 0 is below 1"),
        (["--size", "tiny", "--process", "ar"], "--process ar is unknown"),
        (["--size", "tiny", "--process", ""], "--process names nothing"),
        (["--size", "tiny", "--steps", "four"], "--steps four is no list of numbers"),
        (["--size", "tiny", "--reference-steps", "0"], "--reference-steps 0 is below 1"),
        (["--size", "tiny", "--requests", "3"], "--requests has no effect without --latency"),
        (["--size", "tiny", "--latency", "--requests", "0"], "--requests 0 is below 1"),
        (["--size", "large"], "--size large is unknown"),
    ],
)
def test_bad_flags_are_told_in_one_line(flags, message, capsys):
    assert main(["bench", "sample", "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
