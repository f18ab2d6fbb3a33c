"""RMDM on the command line: latents of stage I in stage II, arms that share them, and the table of their stories."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rmdm.backbone.dit import Causes
from rmdm.cli import main
from rmdm.hub import load_model
from rmdm.meanflow.flow import Flow, fingerprint
from rmdm.presets import load_config
from rmdm.training.checkpoint import file_signature, list_checkpoints, verify_checkpoint
from tests.stage_one import align_flags, kill_when, prepare_stories, run, save_bert

STEPS = ["--steps", "2,4", "--n", "24"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Shards, embeddings, and `one`: an aligned run of both directions."""
    folder = tmp_path_factory.mktemp("rmdm")
    shards = prepare_stories(folder / "shards")
    (folder / "encoder").write_text(str(save_bert(folder / "bert", shards)))
    for verb in ("encode", "align"):
        out = ["--out", str(folder / "one")] if verb == "align" else []
        run(verb, "storyworld-mini", *flags(folder, process="mdlm"), *out)
    return folder


def flags(place: Path, **more: str) -> list[str]:
    own = {"process": "rmdm", "meanflow__direction": "both", "latent__draw": "flow", "train__steps": "8"} | more
    return align_flags(place / "shards", (place / "encoder").read_text(), **own)


def train(place: Path, name: str, **more: str) -> Path:
    shared = {"latent__flow": str(place / "one")} | more
    run("train", "storyworld-mini", *flags(place, **shared), "--out", str(place / name))
    return place / name


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("draw", ["flow", "prior"])
def test_arms_share_a_stage_one_and_their_stories_are_measured(place, draw, capsys):
    out = train(place, f"arm-{draw}", latent__draw=draw)
    model = load_model(out)
    assert (model.folder / "flow" / "flow.safetensors").is_file()
    assert main(["eval", "stories", str(out), *STEPS, "--ceiling", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    arms = [(row["arm"], row["steps"]) for row in said["stories"]]
    own = "storyworld-mini"
    assert arms == [
        (own, 2),
        (own, 4),
        (f"{own}, true latents", 2),
        (f"{own}, true latents", 4),
        ("true stories", None),
    ]
    assert said["stories"][-1]["consistent"] == 1.0
    assert main(["eval", "stories", str(out), *STEPS, "--ceiling"]) == 0
    assert "already done" in capsys.readouterr().out
    how = ["--sampler", "entropy", "--temperature", "0.7", "--guidance", "1.5"]
    assert main(["eval", "stories", str(out), *STEPS, *how]) == 0
    table = capsys.readouterr().out
    assert "already done" not in table
    assert "written by: entropy, temperature 0.7, guidance 1.5" in table
    assert main(["eval", "stories", str(out), *STEPS, "--temperature", "0"]) == 2
    assert "--temperature 0.0 is not a positive number" in capsys.readouterr().err


def test_latents_of_rows_reach_the_loss(place):
    told = losses(train(place, "told", latent__sigma="0.1", train__steps="60", optim__lr="1e-2"))
    blind = losses(
        train(place, "blind", latent__independent="true", latent__draw="prior", train__steps="60", optim__lr="1e-2")
    )
    assert told[0] == pytest.approx(blind[0], abs=1e-5), "conditions start at zero"
    assert sum(told[-10:]) < sum(blind[-10:]) - 0.1


def test_encoding_online_gives_the_cache_s_losses_up_to_its_rounding(place):
    cached = losses(train(place, "cached"))
    online = losses(train(place, "online", latent__source="online"))
    assert online == pytest.approx(cached, abs=2e-3)


def test_a_run_that_was_killed_goes_on_to_the_same_bits(place):
    whole = train(place, "whole")
    out = place / "killed"
    command = ["train", "storyworld-mini", *flags(place, latent__flow=str(place / "one")), "--out", str(out)]
    kill_when(lambda: bool(list_checkpoints(out)), *command)
    run(*command)
    assert losses(out) == losses(whole)
    one, other = (load_model(folder).backbone.state_dict() for folder in (whole, out))
    assert all(torch.equal(one[name], other[name]) for name in one)


def own(place: Path, name: str, **more: str) -> Path:
    """A trained run with a copy of the flow as its own."""
    shutil.copytree(place / "one", place / name)
    return train(place, name, latent__flow="null", **more)


def as_once(run: Path, name: str) -> None:
    """Have the last checkpoint name its latents as versions before did."""
    meta = list_checkpoints(run)[-1] / "meta.json"
    told = json.loads(meta.read_text())
    told["data"]["latent"] = name
    meta.write_text(json.dumps(told))


@pytest.mark.parametrize("recorded", ["now", "once"])
def test_another_flow_of_the_same_embeddings_reaches_the_model_and_takes_no_training(place, recorded, capsys):
    out = own(place, f"own-{recorded}")
    if recorded == "once":
        as_once(out, f"{fingerprint(out / 'flow')[:16]} e")
    weights = (load_model(out).folder / "model.safetensors").read_bytes()
    run("align", str(out), "--meanflow.draw_steps", "2")
    assert load_config(out).meanflow.draw_steps == 2
    assert Flow.load(load_model(out).folder / "flow").settings.draw_steps == 4
    said = run("train", str(out)).stdout
    assert (
        f"train: already done, {list_checkpoints(out)[-1]}; its model now has meanflow.draw_steps=2 (was 4), " in said
    )
    assert said.endswith(f"the flow of {out / 'flow'}\n")
    release = load_model(out).folder
    assert fingerprint(release / "flow") == fingerprint(out / "flow")
    assert Flow.load(release / "flow").settings.draw_steps == 2
    assert (release / "model.safetensors").read_bytes() == weights
    verify_checkpoint(release.parent)
    assert "its model now has" not in run("run", str(out)).stdout
    assert fingerprint(release / "flow") == fingerprint(out / "flow"), "the run's config asks for the flow it has"
    run("train", str(out), "--train.steps", "10")
    assert load_model(out).step == 10


def test_the_drawing_flow_of_other_embeddings_is_refused(place, capsys):
    out = own(place, "elsewhere")
    as_once(out, f"{fingerprint(out / 'flow')[:16]} e")
    told = list_checkpoints(out)[-1] / "model" / "flow" / "flow.json"
    told.unlink()  # a link to the run's own
    told.write_text(json.dumps({"cache": "0" * 64}))
    meta = told.parents[2] / "meta.json"
    files = json.loads(meta.read_text())
    files["files"]["model/flow/flow.json"] = file_signature(told)
    meta.write_text(json.dumps(files))
    assert main(["train", str(out)]) == 2
    assert "was trained with another latent" in capsys.readouterr().err


def test_z0_is_of_the_flow_that_made_it(place, capsys):
    out = own(place, "z0", latent__draw="prior")
    assert main(["align", str(out), "--meanflow.transport_steps", "3"]) == 2
    assert "is not to change: meanflow.transport_steps=3 (it has 4); use another --out" in capsys.readouterr().err
    other = place / "other-z0"
    shutil.copytree(place / "one", other)
    run("align", str(other), "--latent.draw", "prior", "--meanflow.transport_steps", "3")
    assert main(["train", str(out), "--latent.flow", str(other)]) == 2
    assert "was trained with another latent" in capsys.readouterr().err
    assert main(["train", str(out)]) == 0
    assert "already done" in capsys.readouterr().out


def test_an_rmdm_starts_from_an_mdlm(place, capsys):
    parent = train(place, "parent", process="mdlm")
    assert main(["eval", "stories", str(parent), *STEPS, "--ceiling"]) == 0
    assert "has no latent, so there is no ceiling" in capsys.readouterr().out
    child = train(place, "child", train__init_from=str(parent), optim__lr="1e-12", train__steps="1")
    mdlm, rmdm = load_model(parent).backbone, load_model(child).backbone
    x_BL, keys_B = torch.randint(0, 50, (3, 32)), torch.arange(3)
    expected = mdlm.logits(mdlm(x_BL))
    assert expected.std() > 1e-3
    causes = Causes(keys_B, torch.randn(3, rmdm.latent.groups, rmdm.latent.dim))
    for h_BLD in (rmdm(x_BL, causes=causes), rmdm(x_BL, c_BGC=rmdm.latent.without(3))):
        torch.testing.assert_close(rmdm.logits(h_BLD), expected, atol=1e-5, rtol=1e-5)
    assert rmdm.condition(causes).std() > 1e-3, "a latent that says nothing would prove nothing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent__dim": "3"}, "has 4 groups of 4"),
        ({"train__init_from": "/no/such/run"}, "/no/such/run does not exist"),
        ({"latent__flow": "/no/such/run"}, "/no/such/run holds no finished flow"),
        ({"latent__groups": "5"}, "does not divide data.length"),
    ],
)
def test_what_does_not_fit_is_one_line(place, capsys, changes, message):
    out = place / "refused"
    shared = {"latent__flow": str(place / "one")} | changes
    assert main(["train", "storyworld-mini", *flags(place, **shared), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_trunk_of_another_shape_is_no_start(place, capsys):
    parent = train(place, "parent2", process="mdlm")
    wider = flags(place, latent__flow=str(place / "one"), train__init_from=str(parent), model__width="48")
    assert main(["train", "storyworld-mini", *wider, "--out", str(place / "refused2")]) == 2
    error = capsys.readouterr().err
    assert f"train.init_from={parent} has model.width=32 (here 48); add --model.width 32" in error
    assert error.count("\n") == 1
