"""`rmdm bench meanflow`, `encode` and `data` at sizes a CPU takes in seconds."""

import json

import pytest

from rmdm.bench import counts
from rmdm.bench.machine import copy_rate, matmul_rates, memory, spoken
from rmdm.bench.sizes import ENCODER_SIZES, FLOW_SIZES
from rmdm.cli import main

QUICK = ["--size", "tiny", "--matmul", "32", "--warmup", "1", "--device", "cpu", "--json"]


def bench(capsys, *flags):
    assert main(["bench", *flags]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_meanflow_with_eager_jvp_beside_it(capsys):
    outcome, shown = bench(capsys, "meanflow", *QUICK, "--steps", "2", "--batch", "8", "--share", "0.75")
    rows = outcome["bench"]
    assert [row["arm"] for row in rows] == ["ours", "prebuilt", "reference"]
    assert len({row["first_loss"] for row in rows}) == 1
    for row in rows:
        floor = counts.flow_step(FLOW_SIZES["tiny"], 8, 6, row["parameters"])
        assert (row["pairs"], row["needed_operations"], row["needed_bytes"]) == (6, floor.operations, floor.bytes)
        assert row["rows_per_s"] == pytest.approx(8 / row["seconds_per_step"])
    assert [each["arm"] for each in outcome["ratios"]] == ["ours", "prebuilt"]
    assert "6 of them with r != t" in shown


def test_encoding_with_the_uncompiled_encoder_beside_it(capsys):
    outcome, shown = bench(capsys, "encode", *QUICK, "--batches", "2", "--length", "24", "--tokens", "100")
    rows = outcome["bench"]
    assert [(row["arm"], row["rows_are"]) for row in rows] == [
        ("ours", "equal"), ("ours", "unequal"), ("reference", "equal"), ("reference", "unequal")
    ]  # fmt: skip
    for row in rows:
        assert row["batch_rows"] == 4
        assert row["tokens"] == 96 if row["rows_are"] == "equal" else 84 <= row["tokens"] < 96
        most, least = (
            counts.encoding(ENCODER_SIZES["tiny"], row["tokens"], length, 4).operations
            for length in (24, row["tokens"] / row["batch_rows"])
        )
        if row["rows_are"] == "equal":
            assert row["needed_operations"] == most
        else:
            assert least <= row["needed_operations"] < most
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds_per_batch"])
        assert row["difference"] < 1e-5
    assert "times as fast as the reference arm" in shown


def test_tokenising_with_a_bare_loop_beside_it(tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the cat number {n} sat on mat {n % 7} and slept" for n in range(200)) + "\n")
    outcome, shown = bench(capsys, "data", str(corpus), "--rounds", "1", "--vocab-size", "300", "--json")
    ours, plain = outcome["bench"]
    assert (ours["arm"], plain["arm"]) == ("ours", "reference")
    assert ours["tokens"] == plain["tokens"] > 200
    assert ours["bytes"] == len(corpus.read_text()) - 200
    assert ours["peak_rss"] >= ours["peak_pss"] > 0
    assert outcome["ratios"][0]["throughput"] == pytest.approx(plain["seconds"] / ours["seconds"])
    assert str(corpus) in shown
    outcome, _ = bench(
        capsys, "data", str(corpus), "--rounds", "1", "--vocab-size", "300", "--memory-only", "--json"
    )  # fmt: skip
    (alone,) = outcome["bench"]
    assert (alone["tokens"], alone["bytes"], outcome["ratios"]) == (ours["tokens"], None, [])


def test_built_in_stories_need_no_file(capsys):
    outcome, shown = bench(capsys, "data", "--size", "tiny", "--rounds", "1", "--json")
    assert "500 built-in stories" in shown
    assert len(outcome["bench"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["meanflow", "--share", "1.5"], "--share 1.5 is not between 0 and 1"),
        (["meanflow", "--size", "qwen"], "--size qwen is unknown"),
        (["meanflow", "--arms", "eager"], "--arms eager is unknown"),
        (["encode", "--size", "bert"], "--size bert is unknown"),
        (["encode", "--length", "7"], "--length 7 is outside 8..512"),
        (["encode", "--length", "600"], "--length 600 is outside 8..512"),
        (["encode", "--groups", "30", "--length", "32"], "--length 32 is outside 37..512"),
        (["encode", "--batches", "0"], "--batches 0 is below 1"),
        (["data"], "name a path or a size"),
        (["data", "text.txt", "--size", "tiny"], "name a path or a size"),
        (["data", "--size", "huge"], "--size huge is unknown"),
        (["data", "--size", "tiny", "--vocab-size", "10"], "--vocab-size 10 is below 300"),
        (["data", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_bad_flags_are_told_in_one_line(flags, message, capsys):
    assert main(["bench", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]


def test_the_machine_is_measured_in_operations_and_bytes(monkeypatch):
    import torch

    from rmdm.bench import machine

    monkeypatch.setattr(machine, "timed", lambda device, work: (work(), 0.5)[1])
    cpu = torch.device("cpu")
    assert matmul_rates(cpu, 8, torch.float32) == (2 * 8**3 / 0.5, 2 * 8**3 / 0.5)
    assert copy_rate(cpu, 1000) == 2 * 1000 / 0.5


def test_the_matmul_rate_is_the_one_once_the_clocks_have_settled(monkeypatch):
    import torch

    from rmdm.bench import machine

    clock, seconds = iter([0.0, 0.4, 0.9, 1.6]), iter([0.1, 0.15, 0.2])
    monkeypatch.setattr(machine, "median_seconds", lambda *_: next(seconds))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setitem(machine.SETTLING, "cpu", 1.5)
    first, settled = matmul_rates(torch.device("cpu"), 8, torch.bfloat16)
    assert (first, settled) == (2 * 8**3 / 0.1, 2 * 8**3 / 0.2)


def test_figures_are_told_with_their_unit():
    assert spoken(7.5e14, "FLOP/s") == "750 TFLOP/s"
    assert spoken(12, "B/s") == "12 B/s"
    assert spoken(None, "B/s") == "-"
    assert memory(3 * 2**30) == "3.0 GiB"
    assert memory(5 * 2**20) == "5 MiB"
    assert memory(None) == "-"
