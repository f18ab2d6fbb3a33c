"""Stage II that starts from another model: what is taken over, what is not, and how such a run goes on."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rmdm.backbone.latent import projection
from rmdm.config import Config
from rmdm.errors import ConfigError
from rmdm.hub import load_model
from rmdm.presets import load_config, save_config
from rmdm.training.distributed import World
from rmdm.training.language import Corpus, LanguageTask
from rmdm.training.loop import train
from tests.conftest import small_config

HERE = World(0, 1, torch.device("cpu"))


def run(config: Config, out: Path, shards: Path) -> dict[str, torch.Tensor]:
    """Train and return the released weights."""
    config = with_section(config, "data", dir=str(shards))
    train(LanguageTask(config, Corpus.open(shards)), out, HERE, resume="auto", show=lambda text: None)
    return load_model(out).backbone.state_dict()


def with_section(config: Config, section: str, **changes: Any) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})


def child(parent: Path | str | None, process: str = "mdlm", steps: int = 8) -> Config:
    return small_config(process, steps=steps, init_from=None if parent is None else str(parent))


def rmdm(**latent: Any) -> Config:
    """An RMDM that needs no stage I."""
    own = {"independent": True, "draw": "prior", "groups": 4, "dim": 8, "project": 3} | latent
    return with_section(child(None, "rmdm", 4), "latent", **own)


@pytest.fixture(scope="module")
def parent(shards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("start") / "parent"
    run(small_config(steps=4), out, shards)
    return out


def test_a_run_that_started_elsewhere_goes_on_when_its_parent_is_gone(shards, parent, tmp_path):
    straight = run(child(parent), tmp_path / "straight", shards)
    lost = shutil.copytree(parent, tmp_path / "lost")
    run(child(lost, steps=4), tmp_path / "parts", shards)
    shutil.rmtree(lost)
    parts = run(with_section(load_config(tmp_path / "parts"), "train", steps=8), tmp_path / "parts", shards)
    assert all(torch.equal(parts[name], straight[name]) for name in straight)
    fresh = run(small_config(steps=8), tmp_path / "fresh", shards)
    assert not torch.equal(fresh["head.weight"], straight["head.weight"])


def test_a_run_s_config_means_the_same_in_any_directory(shards, parent, tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.chdir(parent.parent)
    run(with_section(child("parent", steps=2), "latent", flow="flows/one"), out, shards)
    saved = load_config(out)
    assert (saved.train.init_from, saved.latent.flow) == (str(parent), str(parent.parent / "flows" / "one"))
    assert load_model(out).config.train.init_from == str(parent)
    run(child(f"../{parent.parent.name}/parent", steps=4), out, shards)
    save_config(child("parent", steps=4), out)
    run(child(parent, steps=6), out, shards)
    monkeypatch.chdir(tmp_path)
    run(with_section(load_config(out), "train", steps=8), out, shards)
    assert load_model(out).step == 8


@pytest.mark.parametrize(("first", "then"), [(None, "parent"), ("parent", None), ("parent", "other")])
def test_another_start_is_not_resumed_into(first, then, shards, parent, tmp_path):
    folders = {"parent": parent, "other": shutil.copytree(parent, tmp_path / "other"), None: None}
    run(child(folders[first], steps=2), tmp_path / "run", shards)
    with pytest.raises(ConfigError, match=r"was trained with train.init_from=\S+, not \S+; use the old") as said:
        run(child(folders[then], steps=4), tmp_path / "run", shards)
    assert str(folders[then]) in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("changes", "found", "flags"),
    [
        ({"mlp_ratio": 5.6}, "model.mlp_ratio=4.0 (here 5.6)", "--model.mlp_ratio 4.0"),
        ({"heads": 4}, "model.heads=2 (here 4)", "--model.heads 2"),
        ({"tie_embeddings": True}, "model.tie_embeddings=False (here True)", "--model.tie_embeddings false"),
        ({"learned_positions": False}, "model.learned_positions=True (here False)", "--model.learned_positions true"),
        (
            {"layers": 3, "width": 48},
            "model.layers=2 (here 3), model.width=32 (here 48)",
            "--model.layers 2 --model.width 32",
        ),
    ],
)
def test_another_trunk_is_named_by_its_settings(changes, found, flags, shards, parent, tmp_path):
    with pytest.raises(ConfigError) as said:
        run(with_section(child(parent), "model", **changes), tmp_path, shards)
    assert str(said.value) == f"train.init_from={parent} has {found}; add {flags}"


def test_dropout_may_differ(shards, parent, tmp_path):
    run(with_section(child(parent, steps=1), "model", dropout=0.0), tmp_path, shards)
    assert load_model(tmp_path).step == 1


def test_an_rmdm_of_another_seed_keeps_its_own_projection(shards, tmp_path):
    parents = run(rmdm(), tmp_path / "parent", shards)
    heir = with_section(rmdm(), "train", init_from=str(tmp_path / "parent"), steps=1)
    heir = dataclasses.replace(with_section(heir, "optim", lr=1e-12), seed=1)
    mine = run(heir, tmp_path / "child", shards)
    assert torch.equal(mine["latent.matrix"], projection(8, 3, 1).float())
    assert not torch.equal(mine["latent.matrix"], parents["latent.matrix"])
    learnt = [name for name in parents if name != "latent.matrix"]
    torch.testing.assert_close([mine[name] for name in learnt], [parents[name] for name in learnt], atol=1e-6, rtol=0)
    assert parents["blocks.0.condition.weight"].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rmdm(width=16), r"has latent.width=64 \(here 16\); add --latent.width 64$"),
        (lambda: rmdm(project=None), r"has latent.project=3 \(here None\); add --latent.project 3$"),
        (lambda: child(None), "has process=rmdm, whose condition has no place in mdlm; start from an mdlm$"),
    ],
)
def test_a_condition_that_does_not_fit_is_no_start(make, message, shards, tmp_path):
    run(rmdm(), tmp_path / "parent", shards)
    with pytest.raises(ConfigError, match=message):
        run(with_section(make(), "train", init_from=str(tmp_path / "parent")), tmp_path / "child", shards)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ar", "mdlm", "has process=ar, which sees other parts of a row than mdlm; start from an mdlm$"),
        ("mdlm", "ar", "has process=mdlm, which sees other parts of a row than ar; start from an ar$"),
        ("ar", "sedd", "has process=ar, which sees other parts of a row than sedd; start from a sedd$"),
        ("mdlm", "sedd", "has process=mdlm, whose logits mean .* and sedd's do not; start from a sedd$"),
    ],
)
def test_weights_of_another_meaning_are_no_start(old, new, message, shards, tmp_path):
    run(small_config(old, steps=1), tmp_path / "parent", shards)
    with pytest.raises(ConfigError, match=message):
        run(small_config(new, init_from=str(tmp_path / "parent")), tmp_path / "child", shards)
