"""`rmdm eval ppl` as people run it: every kind of model, each figure named for what it is."""

import json
import math

import numpy as np
import pytest

from rmdm.cli import main
from tests.release import WORDS, byte_tokenizer, save_release

MODELS = {
    "mdlm": ("mdlm", {}),
    "sedd": ("sedd", {}),
    "ar": ("ar", {}),
    "indep": ("rmdm", {"latent__independent": True}),
    "prior": ("rmdm", {"latent__sigma": 0.5}),
    "flow": ("rmdm", {"latent__draw": "flow", "latent__dropout": 0.0}),
    "packed": ("mdlm", {"data__layout": "packed"}),
    "mute": ("mdlm", {"data__pad_in_loss": False}),
    "sharp": ("rmdm", {"latent__sigma": 0.0, "latent__dropout": 0.0}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppl")
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, size)) for size in random.integers(3, 14, 24)]
    (folder / "lm1b-few.txt").write_text("\n".join(lines))
    for name, (process, changes) in MODELS.items():
        save_release(folder / name, process, **changes)
    save_release(folder / "bytes", "ar", byte_tokenizer(), data__layout="packed")
    return folder


def measured(place, capsys, *names: str, flags: tuple[str, ...] = ()) -> list[dict]:
    runs = [str(place / name) for name in names]
    data = ["--data", "lm1b", "--data-dir", str(place), "--device", "cpu", "--json"]
    assert main(["eval", "ppl", *runs, *data, *flags]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["ppl"]


def named(rows: list[dict], pad: str | None) -> dict[tuple, dict]:
    return {(row["figure"], row["tau"]): row for row in rows if row["pad"] == pad}


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("mdlm", {("bound", None): "bound"}),
        ("sedd", {("bound", None): "bound"}),
        ("ar", {("exact", None): "exact"}),
        ("indep", {("prior", 1.0): "bound", ("null", None): "bound"}),
        (
            "prior",
            {
                ("conditional", None): "no bound", ("kl", 1.0): "bound", ("kl", "paper"): "bound",
                ("shuffled", None): "no bound",
                ("prior", 1.0): "bound", ("prior", "paper"): "bound", ("family", 1.0): "bound", ("null", None): "bound",
            },
        ),
        ("flow", {("conditional", None): "no bound", ("shuffled", None): "no bound", ("flow", 1.0): "bound"}),
    ],
)  # fmt: skip
def test_models_have_the_figures_that_are_theirs(place, capsys, name, figures):
    rows = measured(place, capsys, name)
    counted, not_counted = named(rows, "counted"), named(rows, "not counted")
    assert {key: row["kind"] for key, row in counted.items()} == figures
    exact = {"bound": "share"} if name != "ar" else {}
    assert {key: row["kind"] for key, row in not_counted.items()} == {k: exact.get(v, v) for k, v in figures.items()}
    for row in rows:
        if row["nats"] is None:
            assert "no valid bound by this route" in row["note"]
            continue
        assert row["ppl"] == pytest.approx(math.exp(row["nats"]))
        assert row["ppl_low"] < row["ppl"] < row["ppl_high"]
        assert (row["draw_error"] is None) == (name == "ar")
        assert row["bits_per_byte"] == pytest.approx(row["nats"] * row["tokens"] / math.log(2) / row["bytes"])
        assert row["tokens"] == row["rows"] * 16 or row["pad"] == "not counted"
    assert (name == "flow") == any(row["nats"] is None for row in rows)


def test_the_latent_s_divergence_is_what_separates_bound_and_conditional_figure(place, capsys):
    for pad in ("counted", "not counted"):
        rows = named(measured(place, capsys, "prior"), pad)
        conditional = rows["conditional", None]["nats"]
        for tau in (1.0, "paper"):
            row = rows["kl", tau]
            assert row["nats"] - conditional == pytest.approx(row["kl"])
            assert row["kl"] > 0.1
        assert rows["family", 1.0]["rows"] == 18
        assert "a chosen on 6 rows of the set, the figure is of the other 18" in rows["family", 1.0]["note"]


def test_a_latent_without_noise_has_an_infinite_divergence(place, capsys):
    rows = measured(place, capsys, "sharp")
    notes = [row["note"] for row in rows if row["figure"] == "kl"]
    assert notes == ["sigma=0 makes the latent's KL infinite"]
    assert named(rows, "counted")["family", 1.0]["a"] < 1


def test_packed_rows_have_no_pad_and_models_untaught_in_pad_are_not_asked(place, capsys):
    rows = measured(place, capsys, "packed", "mute")
    assert [(row["arm"], row["pad"], row["kind"]) for row in rows] == [
        ("tiny-mdlm", None, "bound"),
        ("tiny-mdlm", "not counted", "share"),
    ]
    assert rows[0]["tokens"] == rows[1]["tokens"]


def test_what_was_measured_is_kept_and_the_table_says_what_is_what(place, capsys):
    measured(place, capsys, "prior")
    assert (place / "prior" / "eval" / "ppl-lm1b.json").is_file()
    command = ["eval", "ppl", *(str(place / name) for name in ("prior", "flow", "ar", "bytes")), "--device", "cpu"]
    assert main([*command, "--data", "lm1b", "--data-dir", str(place)]) == 0
    said = capsys.readouterr().out
    assert "already done" in said
    for phrase in (
        "no bound", "<= ", "not counted", "± texts", "± draws", "[1]", "tokenizers differ, so that only bits/byte",
        "no valid bound by this route", "tiny-ar (",
    ):  # fmt: skip
        assert phrase in said
    assert max(map(len, said.splitlines())) < 140


def test_another_precision_is_measured_again(place, capsys, monkeypatch):
    first = measured(place, capsys, "mdlm")
    monkeypatch.setenv("RMDM_PRECISION", "bf16")
    second = measured(place, capsys, "mdlm")
    assert [rows[0]["precision"] for rows in (first, second)] == ["fp32", "bf16, head fp32"]
    assert first[0]["nats"] != second[0]["nats"]


def test_a_changed_request_is_measured_again(place, capsys):
    first = measured(place, capsys, "mdlm")
    again = measured(place, capsys, "mdlm", flags=("--rows", "6"))
    assert [row["rows"] for row in again] == [6, 6]
    assert again[0]["set_rows"] == first[0]["rows"] == 24


@pytest.mark.parametrize(
    ("second", "message"),
    [("nowhere", "nowhere does not exist"), ("packed", "has 3 tokens, fewer than one row of 16")],
)
def test_mistakes_about_the_last_run_are_told_before_the_first_is_measured(place, capsys, second, message):
    text = place / f"{second}.txt"
    text.write_text("anna was")
    assert main(["eval", "ppl", str(place / "mdlm"), str(place / second), "--data", f"lm1b,{text}",
                 "--data-dir", str(place), "--seed", "7", "--device", "cpu"]) == 2  # fmt: skip
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "short.txt"], "has 3 tokens, fewer than one row of 16; use a longer text"),
        (["--data", "lm1x"], "'lm1x' is no set, file or folder; did you mean 'lm1b'?"),
        (["--data", "/no/file.txt"], "/no/file.txt does not exist"),
        (["--draws", "0"], "--draws 0 is below 1"),
        (["--data", ","], "--data names no set"),
        ([], "the run's held-out rows are not at hand"),
    ],
)
def test_what_cannot_be_done_is_one_line(place, capsys, monkeypatch, flags, message):
    (place / "short.txt").write_text("anna was")
    monkeypatch.chdir(place)
    assert main(["eval", "ppl", str(place / "packed"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
