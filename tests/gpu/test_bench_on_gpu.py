"""Every kind of `rmdm bench` runs on a GPU, with both its arms, and the reference arm has the product's loss there."""

import json

import pytest
import torch

from rmdm.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = ["--size", "tiny", "--matmul", "512", "--device", "cuda", "--json"]


def bench(capsys, *flags):
    assert main(["bench", *flags, *TINY]) == 0
    return json.loads(capsys.readouterr().out)["bench"]


def test_training(tmp_path, capsys):
    profile = tmp_path / "profile.txt"
    rows = bench(capsys, "train", "--process", "mdlm,rmdm", "--steps", "3", "--profile", str(profile))
    assert [row["arm"] for row in rows] == ["ours", "reference"] * 2
    for row in rows:
        assert row["peak_bytes"] > 0
        assert row["compiled"] == (row["arm"] == "ours")
    for ours, plain in zip(rows[::2], rows[1::2], strict=True):
        assert plain["first_loss"] == pytest.approx(ours["first_loss"], rel=2e-2)
    assert "tiny, rmdm" in profile.read_text()


def test_sampling(capsys):
    rows = bench(capsys, "sample", "--steps", "4,16", "--repeats", "2", "--latency", "--requests", "3")
    assert len(rows) == 8
    assert all(row["peak_bytes"] > 0 for row in rows)


def test_the_flow(capsys):
    rows = bench(capsys, "meanflow", "--steps", "3", "--arms", "ours,prebuilt,no-graphs,reference")
    assert [row["first_loss"] for row in rows] == pytest.approx([rows[-1]["first_loss"]] * 4, rel=5e-2)


def test_encoding(capsys):
    rows = bench(capsys, "encode", "--batches", "3")
    assert [row["compiled"] for row in rows] == [True, True, False, False]
    assert all(row["difference"] < 0.05 for row in rows)
