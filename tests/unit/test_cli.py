import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmdm import cli
from rmdm.arguments import step_counts
from rmdm.cli import main, read_overrides
from rmdm.config import Config, field_names
from rmdm.errors import ConfigError
from rmdm.presets import load_config, resolve_config, save_config
from rmdm.settings_help import settings_help
from rmdm.verbs import run_out


def test_help_lists_the_verbs_without_importing_torch():
    code = "import sys; from rmdm.cli import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False\n")
    for verb in ("run", "prepare", "train", "sample", "presets"):
        assert f"\n  {verb} " in out


@pytest.mark.parametrize("verb", ["sample", "serve", "card"])
def test_help_tells_of_the_package_s_model_without_importing_torch(verb):
    code = "import sys; from rmdm.cli import main\ntry: main(sys.argv[1:])\nfinally: sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", code, verb, "--help"]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "default: the one that comes with the package" in " ".join(out.split())


def test_help_of_a_verb_shows_the_fields_with_the_presets_values(capsys):
    assert main(["train", "storyworld-mini", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--optim.lr" in out
    assert "Peak learning rate." in out
    assert "--resume" in out
    assert out.count("usage:") == 1
    assert "--train.steps INT\n      Optimiser steps. (default: 480)" in out
    assert "--train.micro_batch INT or null\n" in out


@pytest.mark.parametrize(
    ("verb", "sections"),
    [
        ("prepare", ["data"]),
        ("encode", ["data", "encoder", "latent"]),
        ("align", ["data", "encoder", "latent", "meanflow"]),
        ("train", ["data", "encoder", "latent", "meanflow", "model", "optim", "train", "sample"]),
    ],
)
def test_help_shows_the_settings_that_a_verb_uses(verb, sections, capsys):
    assert main([verb, "storyworld-mini", "--help"]) == 0
    out = capsys.readouterr().out
    shown = dict.fromkeys(re.findall(r"^  --(\w+)\.", out, re.MULTILINE))
    assert list(shown) == sections
    assert "\n  --seed INT\n" in out
    assert ("accepted too" in out) == (verb != "train")


def test_help_explains_every_setting():
    out = settings_help(load_config("storyworld-mini"))
    explained = re.findall(r"^  --([\w.]+) .+\n      \S", out, re.MULTILINE)
    assert sorted(explained) == sorted(field_names(Config))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "unknown verb 'trian'; did you mean 'train'?"),
        (["run"], "needs a preset first"),
        (["run", "--out", "x"], "needs a preset first"),
        (["run", "storyworld-mni"], "did you mean 'storyworld-mini'?"),
        (["run", "storyworld-mini", "--optim.lrr", "1"], "unknown flag '--optim.lrr'; did you mean '--optim.lr'?"),
        (["run", "storyworld-mini", "--lr", "1"], "flag '--lr'; did you mean '--optim.lr' or '--meanflow.optim.lr'?"),
        (["run", "storyworld-mini", "--vocab-sze", "1"], "did you mean '--data.tokenizer.vocab_size'?"),
        (
            ["run", "storyworld-mini", "--precision", "1"],
            "did you mean '--encoder.precision' or '--train.precision' or",
        ),
        (["run", "storyworld-mini", "--zzz", "1"], "unknown flag '--zzz'; 'rmdm run PRESET --help' lists all"),
        (
            ["train", "storyworld-mini", "--out", "/proc/foo"],
            "--out /proc/foo cannot be made (",
        ),
        (["run", "storyworld-mini", "--outt", "1"], "unknown flag '--outt'; did you mean '--out'?"),
        (["train", "storyworld-mini", "--out", ""], "--out is empty; name a place, such as runs/first"),
        (["report", "runs/a", "--out", ""], "--out is empty"),
        (["card", "runs/a", "--out="], "--out is empty"),
        (["train", "storyworld-mini", "--name", ""], "name='' is no name of a folder"),
        (["train", ""], "'' names no preset, model or folder; name one, such as runs/first"),
        (["run", "storyworld-mini", ""], "'' names no preset"),
        (["sample", ""], "'' names no preset, model or folder"),
        (["eval", "ppl", ""], "'' names no preset, model or folder"),
        (["push", "runs/a", ""], "'' names no preset, model or folder"),
        (["latents", "runs/a", ""], "'' names no preset, model or folder"),
        (["run", "storyworld-mini", "--optim.lr"], "--optim.lr needs a value"),
        (["run", "storyworld-mini", "--optim.lr", "abc"], "rmdm: --optim.lr abc: input should be a valid number"),
        (
            ["run", "storyworld-mini", "--optim.betas", "0.9"],
            "--optim.betas 0.9: input should be a valid tuple; use 0.9",
        ),
        (["run", "storyworld-mini", "--train.steps", "1e3"], "as an integer; use 480, for example"),
        (["run", "storyworld-mini", "--data.length", "null"], "--data.length null: input should be a valid integer; "),
        (["run", "storyworld-mini", "--data.pad_in_loss", "3"], "unable to interpret input; use true, for example"),
        (["run", "storyworld-mini", "--train.micro-batch", "x"], "as an integer; use null, for example"),
        (["run", "storyworld-mini", "--data.layout", "x"], "'padded' or 'packed'"),
        (["run", "storyworld-mini", "extra"], "'extra' is no preset"),
        (["train", "storyworld-mini", "extra"], "unexpected argument 'extra'"),
        (["sample", "x", "--step", "3"], "unknown argument '--step' for 'rmdm sample'; did you mean '--steps'?"),
        (["sample", "x", "--temp", "1"], "unknown argument '--temp' for 'rmdm sample'; did you mean '--temperature'?"),
        (["run", "storyworld-mini", "--micro", "1"], "unknown flag '--micro'; did you mean '--train.micro_batch' or"),
        (["sample", "x", "--n", "many"], "invalid int value: 'many'"),
        (["sample", "/no/such/run"], "/no/such/run does not exist"),
        (["sample", "/tmp", "--n", "0"], "--n 0 is below 1"),
        (["sample", "/tmp", "--steps", "0"], "--steps 0 is below 1"),
        (["presets", "nothing-like-it"], "is no preset"),
        (["serve", "--rows", "0"], "--rows 0 is below 1; use 64, for example"),
        (["serve", "--queue", "-1"], "--queue -1 is below 1; use 256, for example"),
        (["serve", "--max-body", "0"], "--max-body 0 is below 1; use 1048576, for example"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args, message, capsys):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("rmdm: ")


def test_json_mistakes_are_json_too(capsys):
    assert main(["run", "storyworld-mni", "--json"]) == 2
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["ok"] is False
    assert "did you mean" in last["error"]


def test_json_of_presets_is_the_last_line_and_alone_on_stdout(capsys):
    assert main(["presets", "--json"]) == 0
    captured = capsys.readouterr()
    listing = json.loads(captured.out)
    assert listing["ok"] is True
    assert {"storyworld-mini", "lm1b-mdlm"} <= {entry["name"] for entry in listing["presets"]}
    assert "storyworld-mini" in captured.err


def test_overrides_are_spelled_as_in_yaml():
    words = ["--optim.lr=1e-4", "--optim.betas", "0.9", "0.95", "--data.path", "null", "--train.micro-batch", "4"]
    found = read_overrides(words, set())
    assert found == {"optim.lr": "1e-4", "optim.betas": ["0.9", "0.95"], "data.path": None, "train.micro_batch": "4"}
    assert read_overrides(["--optim.betas", "[0.9, 0.95]"], set()) == {"optim.betas": [0.9, 0.95]}
    with pytest.raises(ConfigError, match="unknown flag"):
        read_overrides(["--optim.beta", "1"], set())


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_a_lack_of_memory_is_told_in_a_line_and_no_other_error_hidden(error, is_told, monkeypatch, capsys):
    def fail(args, wants_json):
        raise error

    monkeypatch.setattr(cli, "dispatch", fail)
    if not is_told:
        with pytest.raises(RuntimeError, match="shape mismatch"):
            main(["presets"])
        return
    assert main(["presets"]) == 2
    assert capsys.readouterr().err.startswith("rmdm: out of memory; ask for less at a time")


def test_a_folder_that_is_no_run_gets_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "storyworld-mini").mkdir()
    config = load_config("storyworld-mini")
    assert run_out("storyworld-mini", None, config) == Path("runs/storyworld-mini")
    save_config(config, tmp_path / "storyworld-mini")
    assert run_out("storyworld-mini", None, config) == Path("storyworld-mini")


def test_numbers_of_steps_have_an_upper_limit_everywhere():
    with pytest.raises(ConfigError, match=r"--steps 4,1000001 holds a number above 1000000"):
        step_counts("4,1000001")
    with pytest.raises(ConfigError, match=r"sample\.steps=1000001 is outside 1\.\."):
        resolve_config("storyworld-mini", {"sample.steps": 1_000_001})


@pytest.mark.parametrize(("verb", "goes_on"), [("train", True), ("sample", False)])
def test_only_verbs_that_go_on_say_so_when_interrupted(verb, goes_on, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rmdm.cli.dispatch", interrupted)
    assert main([verb]) == 130
    said = capsys.readouterr().err
    assert said.startswith("rmdm: interrupted")
    assert ("the same command goes on" in said) == goes_on


def test_a_terminal_s_encoding_never_ends_a_command(monkeypatch):
    """Given a terminal that has no sign but ASCII's, when a text holds others, then they are spelled out."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli, "dispatch", lambda args, wants_json: print("1885\N{EN DASH}1653"))
    assert main(["sample"]) == 0
    sys.stdout.flush()
    assert written.getvalue() == rb"1885\u20131653" + b"\n"
