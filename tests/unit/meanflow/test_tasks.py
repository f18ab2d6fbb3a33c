"""Stage I as tasks of the loop: which rows are learnt from, what decides a run, and what is written."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rmdm.config import Config, FlowModelConfig, LoopConfig, MeanFlowConfig
from rmdm.errors import ConfigError, DataError
from rmdm.meanflow.distil import STATES
from rmdm.meanflow.tasks import DistilTask, FlowTask, batches_of, calibration_rows
from rmdm.training.resume import flatten
from rmdm.training.steps import Plan

SHAPE = FlowModelConfig(layers=1, width=16, heads=2)


class Numbers:
    """Rows whose first number is their own, so that a batch tells which they are."""

    groups, dim = 2, 3

    def __init__(self, n: int) -> None:
        self.values = np.random.default_rng(0).standard_normal((n, 2, 3)).astype(np.float32)
        self.values[:, 0, 0] = np.arange(n)

    def __len__(self) -> int:
        return len(self.values)

    def take(self, indices: np.ndarray) -> np.ndarray:
        return self.values[indices]


def config(recipe: str = "robust", **changes) -> Config:
    flow = MeanFlowConfig(recipe=recipe, model=SHAPE, train=LoopConfig(batch=32, steps=4, valid_rows=16), **changes)
    return Config(name="test", seed=5, meanflow=flow)


def flow_task(recipe: str = "robust", rows: int = 200, **changes) -> FlowTask:
    return FlowTask(config(recipe, **changes), Numbers(rows), Numbers(40), {"cache": "c"}, None, "align")


def row_numbers(step) -> np.ndarray:
    return np.concatenate([batch.e_BGD[:, 0, 0].numpy() for batch in step.micro]).astype(int)


@pytest.mark.parametrize("recipe", ["paper", "robust"])
@pytest.mark.parametrize(("size", "micro"), [(1, 8), (2, 16), (4, 4)])
def test_a_step_is_the_same_however_it_is_dealt(recipe, size, micro):
    task = flow_task(recipe)
    whole = task.step(3, Plan.make(5, 32, 0, 1, None)).micro[0]
    seen = 0
    for rank in range(size):
        plan = Plan.make(5, 32, rank, size, micro)
        step = task.step(3, plan)
        assert step.counted == 32 // size
        for places, batch in zip(plan.places(), step.micro, strict=True):
            assert torch.equal(batch.e_BGD, whole.e_BGD[places])
            assert torch.equal(batch.t_B, whole.t_B[places])
            assert torch.equal(batch.noise_key_B, whole.noise_key_B[places])
            J = len(batch.r_J)
            assert torch.equal(batch.r_J, whole.r_J[places[:J]])
            seen += len(places)
    assert seen == 32


def test_rows_with_r_unlike_t_must_divide_over_micro_batches():
    # Ranks whose shards are gathered in a forward pass must make equally many of them.
    task = flow_task("paper")
    for size, micro in ((2, 1), (2, 3)):
        with pytest.raises(ConfigError, match=r"meanflow.train.batch=12 has 3 rows with r != t.*use a multiple of"):
            task.step(0, Plan.make(5, 12, 1, size, micro))
    assert [len(batch.r_J) for batch in task.step(0, Plan.make(5, 12, 0, 1, 4)).micro] == [1, 1, 1]
    assert len(flow_task("robust").step(0, Plan.make(5, 12, 1, 2, 1)).micro) == 6


def test_the_last_tenth_of_the_rows_is_kept_for_calibration():
    task = flow_task(rows=200)
    assert calibration_rows(200) == 20
    plan = Plan.make(5, 32, 0, 1, None)
    seen = np.concatenate([row_numbers(task.step(step, plan)) for step in range(12)])
    assert seen.max() < 180
    assert len(np.unique(seen)) == 180, "and every other row is learnt from"
    assert calibration_rows(10_000_000) == 16_384


def test_a_row_that_is_not_finite_is_named():
    task = flow_task()
    task.rows.values[77, 1, 2] = np.inf
    plan = Plan.make(5, 180, 0, 1, None)
    with pytest.raises(DataError, match=r"rows \d+ to \d+ are not finite") as caught:
        task.step(0, plan)  # a whole epoch
    first, last = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert first <= 77 <= last


def test_what_decides_the_flow_is_fixed_and_what_comes_after_it_is_free():
    task = flow_task()
    fields = set(flatten(task.config))
    fixed = {field for field in fields if task.fixed(field)}
    assert {"seed", "data.length", "encoder.name", "latent.groups", "latent.dim", "latent.fit_rows"} <= fixed
    assert {"meanflow.recipe", "meanflow.model.width", "meanflow.optim.lr", "meanflow.train.batch"} <= fixed
    assert {
        "meanflow.train.steps",
        "meanflow.transport_steps",
        "meanflow.draw_steps",
        "latent.project",
    } <= fields - fixed
    assert {"train.steps", "optim.lr", "model.width", "name"} <= fields - fixed
    assert not task.fixed("meanflow.direction"), "the velocity serves both directions"
    assert flow_task("paper").fixed("meanflow.direction"), "average velocities are learnt one way or both"


@pytest.mark.parametrize("recipe", ["paper", "robust"])
def test_validation_is_the_loss_on_held_out_rows_and_always_the_same(recipe):
    task = flow_task(recipe)
    module = task.build()
    first = task.validate(module)
    assert first.figures == task.validate(module).figures
    assert f"{first.figures['valid_loss']:.4f} on 16 held-out rows" in first.line
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    assert task.validate(module).figures != first.figures
    task.valid = None
    assert task.validate(module) is None


def test_the_untrained_network_follows_from_the_seed(tmp_path):
    torch.manual_seed(1)
    a = flow_task().build().state_dict()
    torch.manual_seed(2)
    b = flow_task().build().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    other = flow_task()
    other.config = dataclasses.replace(other.config, seed=6)
    assert not torch.equal(other.build().state_dict()["backbone.places"], a["backbone.places"])


def test_a_release_holds_the_network_and_nothing_else(tmp_path):
    task = flow_task()
    task.release(tmp_path / "model", task.build().state_dict(), 4)
    weights = load_file(tmp_path / "model" / "flow.safetensors")
    task.network().load_state_dict(weights)
    assert set(weights) == set(task.network().state_dict())


class Paths(Numbers):
    """Trajectories as stage I stores them: the states of a row one after the other."""

    groups = STATES * 2

    def __init__(self, n: int) -> None:
        self.values = np.random.default_rng(0).standard_normal((n, STATES * 2, 3)).astype(np.float32)


def distil_task(tmp_path, rows: int = 200) -> DistilTask:
    task = flow_task()
    weights = {name: value + 0.25 for name, value in task.network().state_dict().items()}
    save_file(weights, tmp_path / "teacher.safetensors")
    return DistilTask(task.config, Paths(rows), {"teacher": "t"}, "align", tmp_path / "teacher.safetensors")


def test_the_student_starts_as_its_teacher(tmp_path):
    task = distil_task(tmp_path)
    teacher = load_file(tmp_path / "teacher.safetensors")
    module = task.build()
    assert all(torch.equal(value, teacher[name]) for name, value in module.backbone.state_dict().items())
    task.release(tmp_path / "student", module.state_dict(), 4)
    assert set(load_file(tmp_path / "student" / "flow.safetensors")) == set(teacher)
    assert task.settings.steps == task.config.meanflow.distil_steps
    assert task.again(tmp_path / "run" / "flow" / "student") == f"rmdm align {tmp_path / 'run'} --resume auto"


@pytest.mark.parametrize(("size", "micro"), [(1, 8), (2, 16), (4, 2)])
def test_the_students_step_is_the_same_however_it_is_dealt(tmp_path, size, micro):
    task = distil_task(tmp_path)
    whole = task.step(3, Plan.make(5, 32, 0, 1, None)).micro[0]
    assert set((whole.r_B - whole.t_B).tolist()) == {0.25, 0.5, 1.0}
    for rank in range(size):
        plan = Plan.make(5, 32, rank, size, micro)
        for places, batch in zip(plan.places(), task.step(3, plan).micro, strict=True):
            assert torch.equal(batch.z_BGD, whole.z_BGD[places])
            assert torch.equal(batch.target_BGD, whole.target_BGD[places])


def test_the_student_is_validated_on_draws_it_does_not_learn_from(tmp_path):
    task = distil_task(tmp_path)
    module = task.build()
    before = task.validate(module).figures["valid_loss"]
    task.rows.values[: task.learnable] = 0.0
    assert task.validate(module).figures["valid_loss"] == before
    task.rows.values[task.learnable :] *= 2
    assert task.validate(module).figures["valid_loss"] != before


def test_messages_name_the_run_and_the_verb(tmp_path):
    task = flow_task()
    assert task.again(tmp_path / "run" / "flow") == f"rmdm align {tmp_path / 'run'} --resume auto"
    assert task.describe(1_500_000) == "align: robust recipe, 1.50M parameters, 180 rows of 2 x 3"


def test_batches_cover_the_rows_asked_for_in_order():
    rows = Numbers(100)
    parts = list(batches_of(rows, np.arange(10, 95), size=30))
    assert [len(part) for part in parts] == [30, 30, 25]
    assert torch.cat(parts)[:, 0, 0].tolist() == list(range(10, 95))
