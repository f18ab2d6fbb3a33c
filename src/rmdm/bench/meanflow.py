"""How fast the flow of stage I is trained: the loop's own step on random rows, beside the same step with eager JVP.

Arms: `ours`, as `rmdm align` runs it, batches built by the loop's thread meanwhile; `prebuilt`, its batches built
beforehand; `no-graphs`, the same compiled without CUDA graphs; `reference`, not compiled, batches built beforehand.

A row: `size`, `arm`, `batch`, `pairs` (rows with r != t), `groups`, `dim`, `parameters`, `steps`, `seconds_per_step`,
`rows_per_s`, `peak_bytes`, `first_loss`, `last_loss`, what `Floor.figures` says, and where and when.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rmdm.bench.counts import flow_step
from rmdm.bench.machine import Machine, clear, memory
from rmdm.bench.sizes import FlowSize
from rmdm.bench.train import time_steps
from rmdm.bench.workload import RandomLatents, stir
from rmdm.config import Config, FlowModelConfig, LatentConfig, LoopConfig, MeanFlowConfig
from rmdm.errors import ConfigError
from rmdm.evaluation.record import Rows
from rmdm.kinds import Show
from rmdm.meanflow.recipes import RECIPES
from rmdm.meanflow.tasks import FlowTask
from rmdm.tables import grid
from rmdm.training.distributed import World
from rmdm.training.loop import Trainer
from rmdm.training.steps import Step

BUILT = 8
"""Batches that are built beforehand and taken in turn."""


def flow_task(size: FlowSize, batch: int, share: float, steps: int, arm: str) -> FlowTask:
    """The loop's own task with the paper's recipe, of which a `share` of the rows has r != t."""
    config = Config(
        latent=LatentConfig(groups=size.groups, dim=size.dim),
        meanflow=MeanFlowConfig(
            recipe="paper",
            model=FlowModelConfig(layers=size.layers, width=size.width, heads=size.heads, mlp_ratio=size.mlp_ratio),
            train=LoopConfig(steps=steps, batch=batch, compile=False if arm == "reference" else None),
        ),
    )
    rows: Any = RandomLatents(4 * batch, size.groups, size.dim)
    task = FlowTask(config, rows, None, {}, None, "align")
    task.recipe = replace(RECIPES["paper"], identity=share)
    task.is_small = task.is_small and arm != "no-graphs"
    return task


def bench_flow(
    size: FlowSize, machine: Machine, arms: Sequence[str], batch: int, share: float, steps: int, warmup: int, show: Show
) -> Rows:
    """A row for every arm."""
    rows: Rows = []
    pairs = round(share * batch)
    for arm in arms:
        show(f"bench: {arm}, {batch} rows a step, {pairs} of them with r != t")
        try:
            measured = time_arm(size, machine.device, arm, batch, share, steps, warmup)
        except torch.cuda.OutOfMemoryError:
            show(f"bench: {arm} left out: {batch} rows a step do not fit in memory; lower --batch")
            continue
        finally:
            clear(machine.device)
        step = measured["seconds_per_step"]
        floor = flow_step(size, batch, pairs, measured["parameters"])
        rows.append(
            {"size": size.name, "arm": arm, "batch": batch, "pairs": pairs, "groups": size.groups, "dim": size.dim,
             "steps": steps, "rows_per_s": batch / step, **measured, **floor.figures(machine, step), **machine.facts}
        )  # fmt: skip
    if not rows:
        raise ConfigError(f"--batch {batch} does not fit in memory in any arm; use a smaller one")
    return rows


def time_arm(
    size: FlowSize, device: torch.device, arm: str, batch: int, share: float, steps: int, warmup: int
) -> dict[str, Any]:
    """One arm."""
    with tempfile.TemporaryDirectory() as out:
        task = flow_task(size, batch, share, warmup + steps, arm)
        trainer: Trainer[Any] = Trainer(task, Path(out), World(0, 1, device))
        stir(trainer.objective)
        trainer.objective.train()
        with trainer.batches(0) if arm == "ours" else built(trainer, warmup + steps) as batches:
            items = iter(batches)
            figures = time_steps(device, lambda: trainer.update(next(items), stop=False)[0], steps, warmup)
    return figures | {"parameters": trainer.parameters}


@contextmanager
def built(trainer: Trainer[Any], steps: int) -> Iterator[list[Step]]:
    """The steps, a few batches in page-locked memory taken in turn."""
    made = []
    for step in range(min(BUILT, steps)):
        item = trainer.task.step(step, trainer.plan)
        is_cuda = trainer.world.device.type == "cuda"
        made.append(replace(item, micro=[batch.pin() for batch in item.micro] if is_cuda else item.micro))
    yield [replace(made[step % len(made)], step=step) for step in range(steps)]


def ratios(rows: Rows) -> Rows:
    """How many times as fast as the reference arm each is."""
    plain = [row["seconds_per_step"] for row in rows if row["arm"] == "reference"]
    return [
        {"arm": row["arm"], "times_as_fast": plain[0] / row["seconds_per_step"]}
        for row in rows
        if plain and row["arm"] != "reference"
    ]


def render(rows: Rows, compared: Rows) -> str:
    """The table, and a line for each comparison."""
    titles = ["arm", "ms a step", "rows/s", "peak", "floor ms", "limit", "times floor", "of matmul", "loss"]
    body = [
        [
            row["arm"], f"{1e3 * row['seconds_per_step']:.2f}", f"{row['rows_per_s']:,.0f}", memory(row["peak_bytes"]),
            f"{1e3 * row['floor_seconds']:.3g}", row["floor_limit"], f"{row['times_the_floor']:.2f}",
            f"{100 * row['share_of_matmul_rate']:.1f}%", f"{row['first_loss']:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = (
        f"{first['size']}: {first['batch']} rows of {first['groups']} x {first['dim']} a step, {first['pairs']} of "
        "them with r != t"
    )
    lines = [f"{each['arm']}: {each['times_as_fast']:.2f} times as fast as the reference arm" for each in compared]
    return "\n".join([title, grid([("", each) for each in titles], body), *lines])
