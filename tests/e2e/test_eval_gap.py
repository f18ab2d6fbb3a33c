"""`rmdm eval gap` as people run it."""

import json

import numpy as np
import pytest

from rmdm.cli import main
from tests.conftest import rmdm, small_flags
from tests.release import WORDS, save_release


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gap")
    random = np.random.default_rng(0)
    (folder / "texts.txt").write_text("\n".join(" ".join(random.choice(WORDS, 14)) for _ in range(10)))
    for process in ("mdlm", "rmdm", "ar"):
        save_release(folder / process, process)
    return folder


def test_arms_are_measured_with_and_without_their_latent(place, capsys):
    command = ["eval", "gap", str(place / "rmdm"), str(place / "mdlm"), "--data", str(place / "texts.txt")]
    command += ["--blocks", "2,8", "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["gap"]
    assert [(row["arm"], row["given"], row["block"]) for row in rows] == [
        *[("tiny-rmdm", given, block) for given in ("without z", "with z", "change") for block in (2, 8)],
        *[("tiny-mdlm", "without z", block) for block in (2, 8)],
    ]
    assert all(row["low"] < row["gap"] < row["high"] for row in rows)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.count("already done") == 2
    assert "the model's own estimate" in said
    assert "may be negative" in said


def test_blocks_longer_than_any_text_are_left_out_by_name(place, capsys):
    command = ["eval", "gap", str(place / "mdlm"), "--data", str(place / "texts.txt"), "--device", "cpu"]
    assert main([*command, "--blocks", "2,500,600"]) == 0
    assert "has 500 tokens of text; 500, 600 left out" in capsys.readouterr().out


def test_toys_need_no_run(capsys):
    assert main(["eval", "gap", "--toys", "--json"]) == 0
    captured = capsys.readouterr()
    toys = json.loads(captured.out.splitlines()[-1])["toys"]
    assert toys["rho"] == pytest.approx(1 / 3)
    assert toys["proposition_2_total"] == pytest.approx(toys["proposition_2_joint"])
    assert "Proposition 2" in captured.err


def test_rows_that_are_no_whole_stories_are_measured_without_their_law(tmp_path, capsys):
    out, data = str(tmp_path / "run"), str(tmp_path / "data")
    flags = small_flags(train__steps="2", data__dir=data, train__device="cpu", data__layout="packed", data__length="64")
    for verb in ("prepare", "train"):
        rmdm(verb, "storyworld-mini-mdlm", *flags, "--out", out)
    for kind, of_law in (("gap", "exact law"), ("ppl", "law")):
        more = ["--rows", "6", "--blocks", "2,8"] if kind == "gap" else []
        assert main(["eval", kind, out, *more, "--device", "cpu", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])[kind]
        (law,) = (row for row in rows if row["given" if kind == "gap" else "figure"] == of_law)
        assert "whole stories" in law["note"]
        assert all(row["note"] is None for row in rows if row is not law)


def test_stories_have_the_exact_law_beside_them(shards, tmp_path, capsys):
    out = tmp_path / "run"
    flags = small_flags(train__steps="2", data__dir=str(shards), train__device="cpu")
    rmdm("train", "storyworld-mini", *flags, "--out", str(out))
    assert main(["eval", "gap", str(out), "--rows", "6", "--blocks", "2,8", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["gap"]
    exact = [row for row in rows if row["given"] == "exact law"]
    assert [(row["arm"], row["block"]) for row in exact] == [("true law", 2), ("true law", 8)]
    assert all(row["gap"] >= 0 for row in exact)
    assert main(["eval", "ppl", str(out), "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["ppl"]
    by_arm = {(row["arm"], row["pad"]): row["nats"] for row in rows}
    assert by_arm["true law", "counted"] < by_arm["storyworld-mini", "counted"]


@pytest.mark.parametrize(
    ("runs", "flags", "message"),
    [
        ([], [], "no run is named; give a run directory, or --toys"),
        (["ar"], [], "is autoregressive and writes one token at a time"),
        (["mdlm", "ar"], ["--seed", "7"], "is autoregressive and writes one token at a time"),
        (["mdlm", "nowhere"], ["--seed", "7"], "nowhere does not exist"),
        (["mdlm"], ["--blocks", "1,2"], "--blocks 1,2 is no list of numbers of 2 and more"),
        (["mdlm"], ["--blocks", "64"], "no row has 64 tokens of text; use smaller --blocks"),
        (["mdlm"], ["--rows", "0"], "--rows 0 is below 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(place, capsys, runs, flags, message):
    names = [str(place / name) for name in runs]
    assert main(["eval", "gap", *names, "--data", str(place / "texts.txt"), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == "", "nothing is measured before"
