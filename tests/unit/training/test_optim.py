import copy
import itertools
import math

import pytest
import torch

from rmdm.backbone.dit import DiT
from rmdm.config import ModelConfig, OptimConfig
from rmdm.training.optim import build_optimizer, ema_decay, learning_rate, update_ema


def test_constant_schedule_warms_up_and_stays():
    config = OptimConfig(lr=1.0, warmup=4, schedule="constant")
    assert [learning_rate(config, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(config, 99, 100) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_falling_schedules_end_at_the_final_rate(schedule):
    config = OptimConfig(lr=1.0, warmup=10, schedule=schedule, final_lr=0.1)
    rates = [learning_rate(config, step, 110) for step in range(110)]
    assert rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[59] == pytest.approx(0.55, abs=0.01)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_cooldown_is_the_last_share_of_the_steps():
    config = OptimConfig(lr=1.0, warmup=0, schedule="linear", cooldown=0.2, final_lr=0.0)
    assert learning_rate(config, 79, 100) == 1.0
    assert learning_rate(config, 89, 100) == pytest.approx(0.5)


def test_ema_warms_up_to_its_limit():
    assert ema_decay(0.9999, 0) == 0.1
    assert ema_decay(0.9999, 90) == 0.91
    assert ema_decay(0.9999, 10**9) == 0.9999


def test_ema_is_the_weighted_mean():
    module = torch.nn.Linear(3, 2)
    average = copy.deepcopy(module)
    before = average.weight.detach().clone()
    with torch.no_grad():
        module.weight += 1
    update_ema(average, module, 0.75)
    torch.testing.assert_close(average.weight, before + 0.25)


def test_weight_decay_touches_the_matrices_of_the_blocks_only():
    model = DiT(ModelConfig(layers=1, width=16, heads=2), 10, 4)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2, weight_decay=0.5))
    decayed, rest = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    block = model.blocks[0]
    assert decayed == {id(w) for w in (block.qkv.weight, block.out.weight, block.up.weight, block.down.weight)}
    assert {id(model.embed.weight), id(model.head.weight), id(block.modulation)} <= rest
    assert len(decayed) + len(rest) == len(list(model.parameters()))
    assert not math.isclose(optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[1]["weight_decay"])
