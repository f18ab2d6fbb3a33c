"""Stage I on the command line: encode, align and report; killed anywhere it ends with the same flow and z_0."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rmdm.cli import main
from rmdm.encoders.cache import LatentRows
from rmdm.errors import DataError
from rmdm.evaluation import consistency
from rmdm.meanflow.flow import Flow
from rmdm.meanflow.rows import open_stage_one
from rmdm.presets import load_config
from rmdm.training.checkpoint import list_checkpoints
from rmdm.training.language import Corpus
from tests.stage_one import align_flags, files_under, kill_when, prepare_stories, run, save_bert

HOLD = (
    "import pathlib, time\n"
    "def hold(marker):\n"
    "    pathlib.Path(marker).touch()\n"
    "    time.sleep(600)\n"
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Shards with embeddings beside them, the encoder, and `whole`: a run of both directions that nothing stops."""
    folder = tmp_path_factory.mktemp("align")
    shards = prepare_stories(folder / "shards")
    (folder / "encoder").write_text(str(save_bert(folder / "bert", shards)))
    run("encode", "storyworld-mini", *flags(folder), fresh=True)
    run("align", "storyworld-mini", *flags(folder), "--out", str(folder / "whole"))
    return folder


def flags(place: Path, **more: str) -> list[str]:
    encoder = (place / "encoder").read_text()
    return align_flags(place / "shards", encoder, **({"meanflow__direction": "both"} | more))


@pytest.fixture
def copy(place, tmp_path) -> Path:
    """The same shards and embeddings elsewhere, without flow and z_0."""
    shutil.copytree(place, tmp_path / "copy", ignore=shutil.ignore_patterns("whole", "bert", "*z0-*"))
    return tmp_path / "copy"


def align(place: Path, **more: str) -> str:
    """Align to the end."""
    return run("align", "storyworld-mini", *flags(place, **more), "--out", str(place / "run")).stdout


def result(place: Path, name: str) -> dict[str, bytes]:
    """The finished flow and the z_0 arrays."""
    flow, cache = place / name / "flow", next(place.glob("shards/latents-*"))
    found = {path.name: path.read_bytes() for path in flow.glob("flow.*")}
    return found | {path.name: path.read_bytes() for path in cache.glob("*z0-*") if path.is_file()}


def losses(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return [{k: v for k, v in line.items() if k != "rows_per_s"} for line in whole if "loss" in line]


def finish(copy: Path, place: Path) -> str:
    """Go on with the run and compare with the one that nothing stopped."""
    done = run("align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"), "--resume", "auto")
    expected, found = result(place, "whole"), result(copy, "run")
    assert found.keys() == expected.keys()
    assert len([name for name in found if name.startswith(("train.z0-", "valid.z0-"))]) == 2
    assert [name for name in found if found[name] != expected[name]] == []
    for part in ("flow", "flow/student"):
        assert losses(copy / "run" / part) == losses(place / "whole" / part)
    assert not list(copy.glob("shards/latents-*/*.parts"))
    return done.stdout


def test_killed_while_the_flow_is_trained(place, copy):
    flow = copy / "run" / "flow"
    kill_when(
        lambda: len(losses(flow)) >= 10, "align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"),
        hook="import time, rmdm.meanflow.tasks as t; real = t.FlowTask.step\n"
        "def slow(*a, **k):\n    time.sleep(0.1); return real(*a, **k)\nt.FlowTask.step = slow\n",
    )  # fmt: skip
    assert not (flow / "flow.json").exists()
    assert 8 <= len(losses(flow)) < 24
    assert "from step" in finish(copy, place)


def test_killed_while_the_student_is_trained(place, copy):
    student = copy / "run" / "flow" / "student"
    kill_when(
        lambda: len(losses(student)) >= 10, "align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"),
        hook="import time, rmdm.meanflow.tasks as t; real = t.DistilTask.batch\n"
        "def slow(*a, **k):\n    time.sleep(0.1); return real(*a, **k)\nt.DistilTask.batch = slow\n",
    )  # fmt: skip
    assert list_checkpoints(copy / "run" / "flow")[-1].name == "step-00000024"
    assert 8 <= len(losses(student)) < 24
    assert "from step" in finish(copy, place)


def test_killed_between_the_two_trainings_while_trajectories_are_written(place, copy):
    now = copy / "now"
    hook = (
        HOLD + "import rmdm.encoders.cache as c; real = c.RowsWriter.write\n"
        "def write(self, part, *a):\n"
        f"    if self.spec.kind == 'paths' and part == 2: hold({str(now)!r})\n"
        "    real(self, part, *a)\n"
        "c.RowsWriter.write = write\n"
    )
    kill_when(now.exists, "align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"), hook=hook)
    assert len(list((copy / "run" / "flow" / "student").glob("train.paths.parts/0*.json"))) == 2
    finish(copy, place)


def test_killed_between_two_parts_of_z0(place, copy):
    now = copy / "now"
    hook = (
        HOLD + "import rmdm.encoders.cache as c; real = c.RowsWriter.write\n"
        "def write(self, part, *a):\n"
        f"    if self.spec.kind.startswith('z0') and part == 3: hold({str(now)!r})\n"
        "    real(self, part, *a)\n"
        "c.RowsWriter.write = write\n"
    )
    kill_when(now.exists, "align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"), hook=hook)
    cache = next(copy.glob("shards/latents-*"))
    assert len(list(cache.glob("train.z0-*.parts/0*.json"))) == 3
    assert not list(cache.glob("manifest-z0-*.json")), "half an array must not count as one"
    flow = (copy / "run" / "flow" / "flow.safetensors").stat().st_mtime_ns
    finish(copy, place)
    assert (copy / "run" / "flow" / "flow.safetensors").stat().st_mtime_ns == flow, "only z_0 was left to do"


def test_killed_while_the_flow_is_saved(place, copy):
    now = copy / "now"
    hook = HOLD + f"import rmdm.meanflow.flow as f\nf.write_json = lambda *a: hold({str(now)!r})\n"
    kill_when(now.exists, "align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"), hook=hook)
    assert not (copy / "run" / "flow" / "flow.json").exists()
    finish(copy, place)


def test_killed_after_more_training_the_old_flow_does_not_pass_for_the_new(place, copy):
    out, one_way = copy / "run", {"meanflow__direction": "align"}
    align(copy, meanflow__train__steps="8", **one_way)
    before = (out / "flow" / "flow.safetensors").read_bytes()
    now = copy / "now"
    hook = HOLD + f"a.finish = lambda *x: hold({str(now)!r})\n"
    kill_when(now.exists, "align", "storyworld-mini", *flags(copy, **one_way), "--out", str(out), hook=hook)
    align(copy, **one_way)
    assert (out / "flow" / "flow.safetensors").read_bytes() != before
    assert json.loads((out / "flow" / "flow.json").read_text())["step"] == 24


def test_what_is_finished_is_left_alone_and_said_so(place):
    def times() -> dict[Path, int]:
        # config.yaml of the run is written anew, with the same content.
        paths = [p for p in place.rglob("*") if p.is_file() and p.name != "config.yaml"]
        return {p: p.stat().st_mtime_ns for p in paths}

    before = times()
    done = run("align", "storyworld-mini", *flags(place), "--out", str(place / "whole"))
    assert "made before" in done.stdout
    assert times() == before
    again = run("align", str(place / "whole"), fresh=True)
    assert "made before" in again.stdout, "the run directory is a preset of its own"
    assert times() == before


def test_z0_is_what_the_flow_makes_of_e(place):
    cache = next(place.glob("shards/latents-*"))
    flow = Flow.load(place / "whole" / "flow")
    kind = next(cache.glob("manifest-z0-*.json")).stem.removeprefix("manifest-")
    for split in ("train", "valid"):
        e, z = LatentRows.open(cache, split), LatentRows.open(cache, split, kind)
        assert len(z) == len(e)
        rows = np.arange(len(e))
        torch.testing.assert_close(
            torch.from_numpy(z.take(rows)), flow.to_latent(torch.from_numpy(e.take(rows))), rtol=1e-3, atol=2e-3
        )
    z = torch.from_numpy(LatentRows.open(cache, "train", kind).take(np.arange(500))).flatten(1).double()
    assert ((z.var(0) - 1).abs() < 0.25).all()
    assert (z.mean(0).abs() < 0.1).all()


def test_more_transport_steps_take_no_training(place, copy):
    shutil.copytree(place / "whole", copy / "run")
    trained = files_under(copy / "run" / "flow" / "checkpoints")
    align(copy, meanflow__transport_steps="8")
    assert files_under(copy / "run" / "flow" / "checkpoints") == trained
    assert json.loads((copy / "run" / "flow" / "flow.json").read_text())["transport_steps"] == 8
    assert result(copy, "run").keys() != result(place, "whole").keys(), "another flow's z_0 has another name"


def test_a_checkpoint_can_be_named_also_when_several_networks_are_trained(place, copy):
    out = copy / "run"
    align(copy, meanflow__train__steps="8", meanflow__direction="align")
    for network in ("flow", "flow/student"):
        checkpoint = list_checkpoints(out / "flow")[-1] if network == "flow" else list_checkpoints(out / network)[-1]
        more = {"flow": {"meanflow__distil_steps": "8"}, "flow/student": {"meanflow__transport_steps": "5"}}[network]
        run("align", "storyworld-mini", *flags(copy, **more), "--out", str(out), "--resume", str(checkpoint))
    assert result(copy, "run").keys() != result(place, "whole").keys()
    assert Flow.load(out / "flow").settings.transport_steps == 5
    assert losses(out / "flow" / "student") == losses(place / "whole" / "flow" / "student")


def test_the_report_on_a_run(place, capfd):
    assert main(["latents", str(place / "whole"), "--rows", "100", "--quick", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert printed["rows"] == 100, "the other hundred held-out rows teach the classifier"
    assert printed["gated"] == "z_0 robust, 4 steps"
    saved = json.loads((place / "whole" / "latents" / "report.json").read_text())
    assert saved["latents"].keys() == printed["latents"].keys()
    assert "z_0 robust, 4 steps" in (place / "whole" / "latents" / "report.txt").read_text()


def test_few_held_out_rows_make_no_report_and_do_not_stop_a_run(place, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(consistency, "STORIES", 16)
    few = {"data__dir": str(tmp_path / "few"), "data__stories": "320", "data__holdout": "20", "train__steps": "4"}
    few |= {"process": "rmdm", "latent__draw": "prior"}
    words = align_flags(tmp_path, place / "bert", **few)
    assert main(["run", "storyworld-mini", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    printed = capfd.readouterr()
    outcome = json.loads(printed.out.splitlines()[-1])
    assert "latents: no report" in printed.err
    assert outcome["align"]["finished"]
    assert outcome["train"]["step"] == 4


def test_the_command_it_names_when_interrupted_goes_on(copy, place):
    def some_steps() -> bool:
        metrics = copy / "run" / "flow" / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) >= 3

    slow = "import rmdm.meanflow.tasks as t, time; o = t.FlowTask.batch\n"
    slow += "t.FlowTask.batch = lambda *a: (time.sleep(0.05), o(*a))[1]\n"
    args = ("align", "storyworld-mini", *flags(copy), "--out", str(copy / "run"))
    said = kill_when(some_steps, *args, hook=slow, signal=2)
    named = said.split("go on with: rmdm ")[1].split()
    run(*named)
    assert result(copy, "run") == result(place, "whole")


def test_latents_belong_to_rows_and_not_to_a_folder(place, copy):
    config, cpu = load_config(place / "whole" / "flow"), torch.device("cpu")
    shards = copy / "shards"
    tokenizer = Corpus.open(shards).tokenizer
    stage_one = open_stage_one(config, place / "whole", shards, tokenizer, cpu)
    assert len(stage_one.train) == len(LatentRows.open(stage_one.cache, "train"))
    manifest = json.loads((shards / "manifest.json").read_text(encoding="utf-8"))
    manifest["source"]["train"] = "0" * 64
    (shards / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DataError, match="not of those in"):
        open_stage_one(config, place / "whole", shards, tokenizer, cpu)
