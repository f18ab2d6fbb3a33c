"""A finished run is not trained again, and its model follows the settings that take no training."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rmdm import links
from rmdm.cli import main
from rmdm.hub import load_model
from rmdm.presets import load_config
from rmdm.share.export import export
from rmdm.stages import train_stage
from rmdm.training import checkpoint as checkpoints
from rmdm.training import renew
from rmdm.training.checkpoint import list_checkpoints, verify_checkpoint
from tests.conftest import small_flags
from tests.stage_one import files_under


@pytest.fixture
def run(shards, tmp_path, capsys) -> Path:
    """A finished run of four steps."""
    out = tmp_path / "run"
    flags = small_flags(data__dir=str(shards), train__steps="4", train__device="cpu")
    assert main(["train", "storyworld-mini", *flags, "--out", str(out)]) == 0
    capsys.readouterr()
    return out


def again(run: Path, capsys, *changes: str, rc: int = 0) -> str:
    """Train it once more, with changes; what is said."""
    assert main(["train", str(run), *changes]) == rc
    said = capsys.readouterr()
    return said.out if rc == 0 else said.err


def warmer(run: Path) -> None:
    """Ask for another temperature, where an interrupt is not turned into an exit status."""
    config = load_config(run)
    train_stage(replace(config, sample=replace(config.sample, temperature=0.9)), run, "auto", lambda _: None)


def weights(run: Path) -> bytes:
    return (load_model(run).folder / "model.safetensors").read_bytes()


def test_settings_of_writing_reach_the_model_without_training(run, capsys):
    before, last = weights(run), list_checkpoints(run)[-1]
    said = again(run, capsys, "--sample.temperature", "0.9", "--sample.sampler", "entropy")
    old = load_config("storyworld-mini").sample.temperature
    assert said == (
        f'train: already done, {last}; its model now has sample.sampler="entropy" (was "balanced"), '
        f"sample.temperature=0.9 (was {old})\n"
    )
    model = load_model(run)
    assert (model.config.sample.temperature, model.config.sample.sampler) == (0.9, "entropy")
    assert load_config(run).sample == model.config.sample
    assert weights(run) == before
    verify_checkpoint(last)
    assert list(last.parent.glob(".*")) == []
    assert main(["sample", str(run), "--n", "1", "--steps", "2", "--device", "cpu", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    assert (settings["temperature"], settings["sampler"]) == (0.9, "entropy")
    export(str(run), run.parent / "released", lambda _: None)
    assert load_model(run.parent / "released").config.sample == model.config.sample


def test_without_a_change_nothing_is_written(run, capsys):
    again(run, capsys, "--sample.temperature", "0.9")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert again(run, capsys) == f"train: already done, {list_checkpoints(run)[-1]}\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_what_tells_of_the_training_stays(run, capsys):
    before = files_under(run)
    said = again(run, capsys, "--train.steps", "2", "--optim.final_lr", "0.5", "--train.log_every", "7")
    assert said == f"train: already done, {list_checkpoints(run)[-1]}\n"
    assert files_under(run) == before


def test_a_renewed_run_trains_on(run, capsys):
    again(run, capsys, "--sample.temperature", "0.9")
    again(run, capsys, "--train.steps", "6")
    model = load_model(run)
    assert (model.step, model.config.sample.temperature) == (6, 0.9)


def test_a_kill_in_an_exchange_that_takes_two_steps_is_made_up_for(run, capsys, monkeypatch):
    (last,) = list_checkpoints(run)[-1:]
    real = os.replace

    def kill(one, other):
        if Path(one).name.startswith(".tmp-step-"):
            raise KeyboardInterrupt
        real(one, other)

    monkeypatch.setattr(links, "exchange_at_once", lambda one, other: False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            warmer(run)
    assert not last.exists()
    assert "sample.temperature=0.9" in again(run, capsys, "--sample.temperature", "0.9")
    assert list_checkpoints(run)[-1] == last
    verify_checkpoint(last)
    assert load_model(run).config.sample.temperature == 0.9
    assert list(last.parent.glob(".*")) == []


def test_a_kill_before_the_config_is_written_is_made_up_for(run, capsys, monkeypatch):
    def kill(config, out):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(renew, "save_config", kill)
        with pytest.raises(KeyboardInterrupt):
            warmer(run)
    assert load_config(run).sample.temperature != 0.9
    assert "sample.temperature=0.9" in again(run, capsys, "--sample.temperature", "0.9")
    assert load_config(run).sample.temperature == load_model(run).config.sample.temperature == 0.9


def test_a_full_disk_is_one_line_and_leaves_the_old_model(run, capsys, monkeypatch):
    before = files_under(run)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "_write_json", full)
    said = again(run, capsys, "--sample.temperature", "0.9", rc=2)
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert files_under(run) == before
