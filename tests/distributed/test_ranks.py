"""One rank against two (gloo, on the CPU): the same losses, and checkpoints that move between them."""

import json
import sys
from pathlib import Path

import pytest

from rmdm.hub import load_model
from rmdm.training.checkpoint import list_checkpoints, verify_checkpoint
from tests import warm
from tests.conftest import rmdm, small_flags
from tests.unit.training.test_guards import taken
from tests.unit.training.toy import MAIN


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def train(shards: Path, out: Path, *, ranks: int, **overrides: str) -> list[float]:
    flags = small_flags(data__dir=str(shards), model__dropout="0.1", train__device="cpu", **overrides)
    rmdm("train", "storyworld-mini", *flags, "--out", str(out), ranks=ranks)
    return losses(out)


@pytest.fixture(scope="module")
def single(shards, tmp_path_factory) -> list[float]:
    return train(shards, tmp_path_factory.mktemp("single") / "run", ranks=1)


@pytest.fixture(scope="module")
def straight(shards, tmp_path_factory) -> list[float]:
    return train(shards, tmp_path_factory.mktemp("straight") / "run", ranks=1, optim__schedule="constant")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one(shards, single, tmp_path, parallel):
    double = train(shards, tmp_path / "run", ranks=2, train__parallel=parallel, train__sample_every="6")
    assert double == pytest.approx(single, abs=1e-5)
    assert single[0] - single[-1] > 0.05, "the weights must have moved for the comparison to mean something"


@pytest.mark.parametrize("process", ["sedd", "rmdm"])
def test_conditioned_models_can_be_sharded(shards, tmp_path, process):
    flags = {"process": process, "latent__independent": "true", "latent__draw": "prior", "train__sample_every": "6"}
    one = train(shards, tmp_path / "one", ranks=1, **flags)
    two = train(shards, tmp_path / "two", ranks=2, train__parallel="fsdp", **flags)
    assert two == pytest.approx(one, abs=1e-5)


def test_muon_has_the_same_updates_on_two_ranks_and_after_a_change_of_their_number(shards, tmp_path):
    flags = {"optim__name": "muon", "optim__schedule": "constant"}
    one = train(shards, tmp_path / "one", ranks=1, **flags)
    two = train(shards, tmp_path / "two", ranks=2, train__parallel="fsdp", train__steps="4", **flags)
    rest = train(shards, tmp_path / "two", ranks=1, **flags)
    assert two == rest[:4]
    assert rest == pytest.approx(one, abs=1e-5)


def test_tied_embeddings_can_be_sharded(shards, tmp_path):
    one = train(shards, tmp_path / "one", ranks=1, model__tie_embeddings="true")
    two = train(shards, tmp_path / "two", ranks=2, model__tie_embeddings="true", train__parallel="fsdp")
    assert two == pytest.approx(one, abs=1e-5)


def test_run_goes_through_all_stages_under_torchrun(tmp_path):
    flags = small_flags(data__dir=str(tmp_path / "shards"), train__device="cpu", train__steps="4")
    code = f"import rmdm.evaluation.consistency as c; c.STORIES = 16\n{warm.CLI}"
    command = ["run", "storyworld-mini", *flags, "--out", str(tmp_path / "run"), "--json"]
    done = warm.fresh("--no-python", sys.executable, "-c", code, *command, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(objects) == 1, "one rank speaks for all"
    assert objects[0]["train"]["step"] == 4
    assert [row["steps"] for row in objects[0]["stories"]] == [1, 2, 4, 8, 16, 32, None]


def test_two_ranks_agree_when_padding_is_not_counted(shards, tmp_path):
    # The ranks then hold different numbers of tokens, and only an all-reduced denominator gives the same loss.
    one = train(shards, tmp_path / "one", ranks=1, data__pad_in_loss="false")
    two = train(shards, tmp_path / "two", ranks=2, data__pad_in_loss="false", train__micro_batch="4")
    assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(("first", "then", "parallel"), [(2, 1, "fsdp"), (1, 2, "fsdp"), (2, 1, "ddp"), (1, 2, "ddp")])
def test_a_checkpoint_resumes_on_another_number_of_ranks(shards, straight, tmp_path, first, then, parallel):
    out = tmp_path / "run"
    half = train(shards, out, ranks=first, train__steps="4", train__parallel=parallel, optim__schedule="constant")
    both = train(shards, out, ranks=then, train__steps="12", train__parallel=parallel, optim__schedule="constant")
    assert both[:4] == half
    assert both == pytest.approx(straight, abs=1e-5)


def train_toy(out: Path, *, ranks: int, parallel: str) -> list[float]:
    done = warm.run(MAIN, str(out), parallel, ranks=ranks, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(out)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one_for_another_task(tmp_path, parallel):
    # Its loss holds a Jacobian-vector product, so the module runs twice in a step, once inside torch.func.
    one = train_toy(tmp_path / "one", ranks=1, parallel=parallel)
    two = train_toy(tmp_path / "two", ranks=2, parallel=parallel)
    assert two == pytest.approx(one, abs=1e-5)


def test_a_finished_run_s_model_is_renewed_once(shards, tmp_path):
    train(shards, tmp_path / "run", ranks=1, train__steps="4")
    done = rmdm("train", str(tmp_path / "run"), "--sample.temperature", "0.9", ranks=2)
    assert done.stdout.count("its model now has sample.temperature=0.9") == 1
    verify_checkpoint(list_checkpoints(tmp_path / "run")[-1])
    assert load_model(tmp_path / "run").config.sample.temperature == 0.9


HOLD = """
import sys
from pathlib import Path
from rmdm.errors import TrainingError
from rmdm.training.distributed import world
from rmdm.training.guards import alone
with world("cpu") as here:
    try:
        with alone(Path(sys.argv[1]), here), alone(Path(sys.argv[1]), here):
            print("held")
    except TrainingError as error:
        print(error)
"""


def test_all_ranks_hold_a_run_or_all_are_refused(shards, tmp_path):
    out = tmp_path / "run"
    command = ["train", "storyworld-mini", *small_flags(data__dir=str(shards), train__device="cpu"), "--out", str(out)]
    with taken(out):
        refused = warm.run(HOLD, str(out), ranks=2)
        assert refused.returncode == 0, refused.stderr
        assert refused.stdout.count("run is in use by another process (pid 4711 on elsewhere)") == 2
        assert rmdm(*command, ranks=2, check=False).returncode == 2
        assert [path.name for path in out.iterdir()] == [".lock"], "nothing was written"
    assert warm.run(HOLD, str(out), ranks=2).stdout == "held\n" * 2
    rmdm(*command, ranks=2)
