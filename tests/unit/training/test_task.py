"""The loop serves a task that is not stage II."""

import dataclasses
import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from rmdm.errors import CheckpointError, ConfigError, TrainingError
from rmdm.presets import load_config
from rmdm.training.checkpoint import list_checkpoints
from rmdm.training.distributed import World
from rmdm.training.loop import train
from rmdm.training.resume import find_finished, lies_in
from tests.unit.training.toy import ToyTask, toy_config

HERE = World(0, 1, torch.device("cpu"))


def run(task, out, resume="auto"):
    said: list[str] = []
    return train(task, out, HERE, resume=resume, show=said.append), said


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def with_flow(config, **changes):
    return dataclasses.replace(config, meanflow=dataclasses.replace(config.meanflow, **changes))


def test_a_task_keeps_everything_in_its_own_folder_and_counts_its_own_unit(tmp_path):
    out = tmp_path / "run" / "flow"
    result, said = run(ToyTask(toy_config(steps=120, batch=64, valid_every=60)), out)
    assert result.finished
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["flow"]
    assert load_config(out).meanflow.train.batch == 64
    assert "rows_per_s" in lines(out)[0]
    first, second = (line["valid_error"] for line in lines(out) if "valid_error" in line)
    assert second < first
    assert result.validation.figures == {"valid_error": second}
    assert said[0].startswith("toy: 84 parameters; 120 steps of 64 rows on CPU")
    assert said[-1] == f"step 120: error {second:.3f}"


def test_going_on_is_the_same_to_the_bit(tmp_path):
    run(ToyTask(toy_config(steps=12)), tmp_path / "straight")
    run(ToyTask(toy_config(steps=6)), tmp_path / "parts")
    run(ToyTask(toy_config(steps=12)), tmp_path / "parts")
    kept = [
        [{k: v for k, v in x.items() if k != "rows_per_s"} for x in lines(tmp_path / n)] for n in ("straight", "parts")
    ]
    assert kept[0] == kept[1]
    a, b = (load_file(list_checkpoints(tmp_path / n)[-1] / "model/flow.safetensors") for n in ("straight", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_task_says_which_fields_are_fixed_and_which_data_is_its_own(tmp_path):
    config = toy_config(steps=4)
    run(ToyTask(config), tmp_path)
    assert find_finished(ToyTask(config), tmp_path, "auto") == list_checkpoints(tmp_path)[-1]
    assert find_finished(ToyTask(toy_config(steps=6)), tmp_path, "auto") is None
    free = dataclasses.replace(with_flow(config, transport_steps=8), optim=dataclasses.replace(config.optim, lr=0.5))
    assert find_finished(ToyTask(free), tmp_path, "auto") is not None
    with pytest.raises(ConfigError, match=r"was trained with meanflow.recipe='robust', not 'paper'"):
        find_finished(ToyTask(with_flow(config, recipe="paper")), tmp_path, "auto")
    with pytest.raises(ConfigError, match=r"was trained with meanflow.train.batch=8, not 4"):
        run(ToyTask(toy_config(steps=6, batch=4)), tmp_path)
    with pytest.raises(ConfigError, match="was trained with another cache"):
        run(ToyTask(toy_config(steps=6), cache="two"), tmp_path)


def test_a_name_lies_in_itself_and_in_what_is_above_it():
    assert lies_in("meanflow.train.batch", {"meanflow"})
    assert lies_in("meanflow.train.batch", {"meanflow.train"})
    assert lies_in("seed", {"seed"})
    assert not lies_in("meanflow.training", {"meanflow.train"})
    assert not lies_in("train", {"train.batch"})


def test_messages_name_the_tasks_own_fields_and_command(tmp_path, monkeypatch):
    wild = toy_config()
    wild = with_flow(wild, optim=dataclasses.replace(wild.meanflow.optim, lr=1e30))
    with pytest.raises(TrainingError, match=r"try a lower meanflow.optim.lr or a longer meanflow.optim.warmup"):
        run(ToyTask(wild), tmp_path / "wild" / "flow")
    run(ToyTask(toy_config(steps=4)), tmp_path / "done" / "flow")
    with pytest.raises(ConfigError, match=r"already at step 4; raise meanflow.train.steps=4"):
        run(ToyTask(toy_config(steps=4)), tmp_path / "done" / "flow")

    class Full(ToyTask):
        def release(self, folder, weights, step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError) as caught:
        run(Full(toy_config()), tmp_path / "full" / "flow")
    assert str(caught.value).endswith(f"go on with 'rmdm align {tmp_path / 'full'} --resume auto'")
