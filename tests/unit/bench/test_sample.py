import json

import pytest

from rmdm.bench.sample import default_steps
from rmdm.cli import main
from rmdm.hub import load_model
from tests.release import save_release


@pytest.mark.parametrize("process", ["mdlm", "rmdm", "ar"])
def test_rows_are_of_whole_requests_and_measured_once(process, tmp_path, capsys):
    out = save_release(tmp_path / "run", process)
    command = ["bench", "sample", str(out), "--batch", "3", "--repeats", "2", "--json"]
    steps = [] if process == "ar" else ["--steps", "2,5"]
    assert main([*command, *steps]) == 0
    first = capsys.readouterr()
    rows = json.loads(first.out)["bench"]
    model = load_model(out)
    assert [row["steps"] for row in rows] == ([model.backbone.length] if process == "ar" else [2, 5])
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(3 * model.backbone.length / row["seconds"])
        assert row["seconds_per_step"] == pytest.approx(row["seconds"] / row["steps"])
        assert row["weight_bytes"] >= 4 * row["parameters"] == 4 * sum(p.numel() for p in model.backbone.parameters())
        assert (row["latent_seconds"] is not None) == (process == "rmdm")
        assert row["peak_bytes"] is None
    assert main([*command, *steps]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["bench"] == rows
    assert "already done" in again.err


def test_steps_default_to_powers_of_two_up_to_the_length(tmp_path):
    model = load_model(save_release(tmp_path / "run", "mdlm"))
    assert model.backbone.length == 16
    assert default_steps(model) == [4, 8, 16]


def test_a_missing_run_is_told_before_another_is_measured(tmp_path, capsys):
    run = save_release(tmp_path / "run", "mdlm")
    assert main(["bench", "sample", str(run), str(tmp_path / "nowhere"), "--repeats", "1"]) == 2
    captured = capsys.readouterr()
    assert "nowhere does not exist" in captured.err
    assert captured.out == ""


def test_bad_flags_are_told_in_one_line(tmp_path, capsys):
    assert main(["bench", "sample", str(tmp_path), "--batch", "0"]) == 2
    assert "--batch 0 is below 1" in capsys.readouterr().err
