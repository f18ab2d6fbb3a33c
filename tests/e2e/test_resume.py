"""Kill, resume, compare: a run that was interrupted is the run that was not."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rmdm.hub import load_model
from rmdm.presets import load_config
from rmdm.training.checkpoint import list_checkpoints, step_of, verify_checkpoint
from tests import warm
from tests.conftest import rmdm, small_flags


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def weights(run: Path) -> dict:
    return load_file(list_checkpoints(run)[-1] / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def start(*args: str, hook: str = "") -> warm.Process:
    return warm.Process(f"{hook}{warm.CLI}", "train", "storyworld-mini", *args)


def wait_for(condition, process: warm.Process) -> None:
    for _ in range(2000):
        if condition():
            return
        if process.poll() is not None:
            pytest.fail(f"ended too early: {process.communicate()}")
        time.sleep(0.03)
    pytest.fail("the run never got there")


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> Path:
    """The run that nothing interrupts; dropout on, so that its draws are resumed too."""
    out = tmp_path_factory.mktemp("whole") / "run"
    rmdm("train", "storyworld-mini", *flags(shards), "--out", str(out), fresh=True)
    return out


def flags(shards: Path, **more: str) -> list[str]:
    # log_every does not divide save_every: an unfinished window of losses must survive the restart as well.
    settings = {"model__dropout": "0.1", "train__steps": "60", "train__save_every": "10", "train__log_every": "3"}
    return small_flags(data__dir=str(shards), **(settings | more))


def test_kill_during_training_then_resume_is_bit_identical(shards, whole, tmp_path):
    out = tmp_path / "run"
    process = start(*flags(shards), "--out", str(out))
    wait_for(lambda: len(list_checkpoints(out)) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(losses(out)) < 20
    done = rmdm("train", "storyworld-mini", *flags(shards), "--out", str(out), "--resume", "auto")
    assert "from step" in done.stdout
    assert_same_run(whole, out)


def test_kill_while_a_checkpoint_is_written_leaves_nothing_corrupt(shards, whole, tmp_path):
    out = tmp_path / "run"
    # A marker file tells when the third checkpoint is half written; the process then waits to be killed.
    hook = (
        "import rmdm.training.checkpoint as c, time, pathlib\n"
        "real = c.dcp.save\n"
        "def slow(state, **kw):\n"
        "    real(state, **kw)\n"
        f"    if len(c.list_checkpoints(pathlib.Path({str(out)!r}))) == 2:\n"
        f"        pathlib.Path({str(tmp_path / 'now')!r}).touch(); time.sleep(600)\n"
        "c.dcp.save = slow\n"
    )
    process = start(*flags(shards), "--out", str(out), hook=hook)
    wait_for((tmp_path / "now").exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((out / "checkpoints").glob(".tmp-step-*")), "the kill was meant to leave a half-written folder"
    rmdm("train", "storyworld-mini", *flags(shards), "--out", str(out), "--resume", "auto")
    assert not list((out / "checkpoints").glob(".tmp-step-*"))
    assert_same_run(whole, out)


def test_a_signal_saves_and_says_how_to_go_on(shards, whole, tmp_path):
    out = tmp_path / "run"
    process = start(*flags(shards, train__save_every="0"), "--out", str(out))
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= 3, process)
    process.send_signal(signal.SIGTERM)
    text = "".join(process.communicate())
    assert process.returncode == 143
    assert f"rmdm train {out} --resume auto" in text
    rmdm("train", str(out), "--resume", "auto")
    assert_same_run(whole, out)


def test_a_closed_terminal_saves(shards, whole, tmp_path):
    out = tmp_path / "run"
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    # Standard output and error are a terminal of its own, with the bar on it.
    hook = (
        "import os, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup, if these tests run under it, is not meant
        "os.setsid()\n"
        f"terminal = os.open({os.ttyname(theirs)!r}, os.O_RDWR)\n"
        "os.dup2(terminal, 1), os.dup2(terminal, 2)\n"
    )
    process = start(*flags(shards, train__save_every="0"), "--out", str(out), hook=hook)
    seen = b""

    def some_steps() -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(ours, 1 << 16)
        return (out / "metrics.jsonl").exists() and len(losses(out)) >= 3

    wait_for(some_steps, process)
    os.close(theirs)
    os.close(ours)
    process.communicate()
    assert process.returncode == 128 + signal.SIGHUP
    assert b"/60" in seen, "there was a bar"
    assert "from step" in rmdm("train", str(out)).stdout
    assert_same_run(whole, out)


def test_training_goes_on_when_nobody_reads_its_lines(shards, whole, tmp_path):
    out, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    hook = f"import os\nos.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)\n"
    process = start(*flags(shards, train__valid_every="10"), "--out", str(out), "--resume", "auto", hook=hook)
    with pipe.open() as lines:
        assert "parameters" in lines.readline()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert_same_run(whole, out)


def test_a_run_that_another_process_trains_is_left_alone(shards, tmp_path):
    out = tmp_path / "run"
    process = start(*flags(shards, train__steps="100000"), "--out", str(out))
    wait_for(lambda: list_checkpoints(out), process)
    process.send_signal(signal.SIGSTOP)
    before = files(out)
    for verb in ("train", "run"):
        refused = rmdm(verb, "storyworld-mini", *flags(shards), "--out", str(out), check=False)
        assert refused.returncode == 2
        assert refused.stderr == (
            f"rmdm: {out} is in use by another process (pid {process.pid} on {socket.gethostname()}); "
            "wait for it, end it, or choose another --out\n"
        )
    refused = rmdm("align", "storyworld-mini", *flags(shards, encoder__name="none"), "--out", str(out), check=False)
    assert "is in use by another process" in refused.stderr
    assert files(out) == before
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = step_of(list_checkpoints(out)[-1])
    assert f"from step {last}" in rmdm("train", str(out), "--train.steps", str(last + 2)).stdout


def files(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_alone_and_says_so(shards, whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    done = rmdm("train", "storyworld-mini", *flags(shards), "--out", str(whole))
    assert "already done" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_while_a_finished_run_s_model_is_renewed_leaves_the_old_or_the_new(whole, tmp_path, moment):
    out = shutil.copytree(whole, tmp_path / "run")
    now = tmp_path / "now"
    hook = (
        "import rmdm.training.checkpoint as c, time, pathlib\n"
        "real = c.exchange\n"
        "def slow(*folders):\n"
        f"    if {moment!r} == 'after': real(*folders)\n"
        f"    pathlib.Path({str(now)!r}).touch(); time.sleep(600)\n"
        "c.exchange = slow\n"
    )
    process = warm.Process(f"{hook}{warm.CLI}", "train", str(out), "--sample.temperature", "0.9")
    wait_for(now.exists, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = list_checkpoints(out)[-1]
    verify_checkpoint(last)
    assert (load_model(out).config.sample.temperature == 0.9) == (moment == "after")
    assert "sample.temperature=0.9" in rmdm("train", str(out), "--sample.temperature", "0.9").stdout
    verify_checkpoint(last)
    assert load_model(out).config.sample.temperature == load_config(out).sample.temperature == 0.9
    assert_same_run(whole, out)


def test_only_the_last_two_checkpoints_are_kept(whole):
    assert [p.name for p in list_checkpoints(whole)] == ["step-00000050", "step-00000060"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(shards, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        out = disk / "run"
        command = ["train", "storyworld-mini", *flags(shards), "--out", str(out)]
        failed = rmdm(*command, check=False)
        assert failed.returncode == 2
        last = failed.stderr.strip().splitlines()
        assert len(last) == 1, failed.stderr
        assert "No space left on device" in last[0]
        assert "--resume auto" in last[0]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        rmdm(*command)
        assert_same_run(whole, out)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
