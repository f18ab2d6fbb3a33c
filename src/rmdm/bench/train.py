"""How fast a model is trained: the loop's own step on random rows, beside the reference arm.

A row: `size`, `process`, `arm`, `batch`, `length`, `vocab`, `parameters`, `steps`, `seconds_per_step`, `tokens_per_s`,
`peak_bytes` (None on a CPU), `first_loss`, `last_loss`, `compiled`, what `Floor.figures` says, and where and when.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmdm.bench.counts import training_step
from rmdm.bench.machine import Machine, clear, forget_peak, memory, peak_bytes, synchronize, timed
from rmdm.bench.profile import begin_profile, profiled
from rmdm.bench.reference import PlainBatch, PlainNetwork, PlainTrainer
from rmdm.bench.sizes import Size, latent_of
from rmdm.bench.workload import stir, training_task
from rmdm.errors import ConfigError
from rmdm.kinds import Show
from rmdm.processes import Batch
from rmdm.tables import grid
from rmdm.training.distributed import World
from rmdm.training.loop import Trainer, wants_compile
from rmdm.training.steps import Plan, Prefetcher, Step

Rows = list[dict[str, Any]]
PROFILED = 3
"""Steps in a profile."""


def bench_training(
    size: Size, machine: Machine, processes: Sequence[str], arms: Sequence[str], batch: int, steps: int, warmup: int,
    profile: Path | None, show: Show, *, graphs: bool = False,
) -> Rows:  # fmt: skip
    """A row for every process and arm; `profile` gets a table of where the product's time goes."""
    rows: Rows = []
    begin_profile(profile)
    for process in processes:
        for arm in arms:
            show(f"bench: {arm}, {process}, {batch} rows a step")
            time_arm = partial(time_product, graphs=graphs) if arm == "ours" else time_reference
            try:
                measured = time_arm(size, process, machine.device, batch, steps, warmup, profile)
            except torch.cuda.OutOfMemoryError:
                show(f"bench: {arm}, {process} left out: {batch} rows a step do not fit in memory; lower --batch")
                continue
            finally:
                clear(machine.device)
            show(f"bench: {arm}, {process}: {1e3 * measured['seconds_per_step']:.1f} ms a step")
            floor = training_step(size, process, batch)
            rows.append(
                {"size": size.name, "process": process, "arm": arm, "batch": batch, "length": size.length,
                 "vocab": size.vocab, "groups": size.groups if process == "rmdm" else None, "steps": steps,
                 "tokens_per_s": batch * size.length / measured["seconds_per_step"], **measured,
                 **floor.figures(machine, measured["seconds_per_step"]), **machine.facts}
            )  # fmt: skip
    if not rows:
        raise ConfigError(f"--batch {batch} does not fit in memory in any arm; use a smaller one")
    return rows


def time_product(
    size: Size, process: str, device: torch.device, batch: int, steps: int, warmup: int, profile: Path | None,
    *, graphs: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The trainer as `rmdm train` builds it; `graphs` has it take the step for a small one."""
    extra = PROFILED if profile is not None else 0
    task = training_task(size, process, batch, warmup + steps + extra)
    task.is_small |= graphs
    world = World(0, 1, device)
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(task, Path(out), world)
        stir(trainer.objective)
        trainer.objective.train()
        with trainer.batches(0) as batches:
            items = iter(batches)
            figures = time_steps(device, lambda: trainer.update(next(items), stop=False)[0], steps, warmup)
            if profile is not None:
                with profiled(device, f"{size.name}, {process}, {batch} rows a step", profile):
                    for _ in range(extra):
                        trainer.update(next(items), stop=False)
    return figures | {"parameters": trainer.parameters, "compiled": wants_compile(task.settings.compile, world)}


def time_reference(
    size: Size, process: str, device: torch.device, batch: int, steps: int, warmup: int, profile: Path | None
) -> dict[str, Any]:
    """The same weights, rows and masks in the plain trainer."""
    task = training_task(size, process, batch, warmup + steps)
    objective = task.build()
    stir(objective)
    network = PlainNetwork(objective.backbone).to(device)
    trainer = PlainTrainer(network, task.optim, warmup + steps)
    plan = Plan.make(task.config.seed, batch, 0, 1, None)
    build = partial(plain_build, task.step, plan)
    with Prefetcher(0, warmup + steps, build, pin=device.type == "cuda") as batches:
        items = iter(batches)

        def update() -> Tensor:
            item = next(items)
            (plain,) = item.micro
            assert isinstance(plain, PlainBatch)
            return trainer.update(item.step, plain, item.counted)

        figures = time_steps(device, update, steps, warmup)
    return figures | {"parameters": trainer.parameters, "compiled": False}


def plain_build(build: Callable[[int, Plan], Step], plan: Plan, step: int) -> Step:
    """A step of the product as the reference arm takes it."""
    item = build(step, plan)
    return replace(item, micro=[PlainBatch.of(batch) for batch in item.micro if isinstance(batch, Batch)])


def time_steps(device: torch.device, update: Callable[[], Tensor], steps: int, warmup: int) -> dict[str, Any]:
    """Seconds a step, the device never waited for in between; `warmup` steps go before, compilation among them."""
    forget_peak(device)
    losses = [update() for _ in range(warmup)]
    synchronize(device)
    seconds = timed(device, lambda: losses.extend(update() for _ in range(steps)))
    return {
        "seconds_per_step": seconds / steps, "peak_bytes": peak_bytes(device),
        "first_loss": float(losses[0]), "last_loss": float(losses[-1]),
    }  # fmt: skip


def ratios(rows: Rows) -> Rows:
    """How many times as fast the product is as the reference arm, and what a latent adds to a step."""
    found = {(row["process"], row["arm"]): row for row in rows}
    compared: Rows = []
    for process, arm in found:
        ours, plain = found.get((process, "ours")), found.get((process, "reference"))
        if arm == "ours" and ours is not None and plain is not None:
            peaks = ours["peak_bytes"], plain["peak_bytes"]
            compared.append({
                "process": process, "times_as_fast": plain["seconds_per_step"] / ours["seconds_per_step"],
                "share_of_memory": peaks[0] / peaks[1] if None not in peaks else None,
            })  # fmt: skip
    for arm in ("ours", "reference"):
        if (("mdlm", arm) in found) and (("rmdm", arm) in found):
            more = found["rmdm", arm]["seconds_per_step"] / found["mdlm", arm]["seconds_per_step"]
            compared.append({"arm": arm, "rmdm_over_mdlm": more})
    return compared


def render(rows: Rows, compared: Rows) -> str:
    """The table, and a line for each comparison."""
    titles = [
        "process", "arm", "ms a step", "tokens/s", "peak", "floor ms", "limit", "times floor", "of matmul", "loss",
    ]  # fmt: skip
    body = [
        [
            row["process"], row["arm"], f"{1e3 * row['seconds_per_step']:.2f}", f"{row['tokens_per_s']:,.0f}",
            memory(row["peak_bytes"]), f"{1e3 * row['floor_seconds']:.3g}", row["floor_limit"],
            f"{row['times_the_floor']:.2f}", f"{100 * row['share_of_matmul_rate']:.1f}%", f"{row['first_loss']:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['size']}: {first['batch']} rows of {first['length']} a step, vocabulary {first['vocab']:,}"
    lines = [title + latent_of(rows), grid([("", each) for each in titles], body)]
    for each in compared:
        if "rmdm_over_mdlm" in each:
            lines.append(f"{each['arm']}: a step of rmdm takes {each['rmdm_over_mdlm']:.3f} times that of mdlm")
        else:
            share = each["share_of_memory"]
            held = f", {share:.2f} of its peak memory" if share is not None else ""
            lines.append(f"{each['process']}: {each['times_as_fast']:.2f} times as fast as the reference arm{held}")
    return "\n".join(lines)
