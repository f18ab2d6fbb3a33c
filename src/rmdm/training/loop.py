"""The training loop: batches in, checkpoints out; once in a while it validates, samples and saves.

What is trained is a `Task`: stage I and stage II go through the same loop.
"""

import copy
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rmdm.errors import ConfigError
from rmdm.precision import of_training
from rmdm.presets import save_config
from rmdm.training.checkpoint import load_checkpoint, save_checkpoint
from rmdm.training.distributed import Parallel, World, blocks, reshard, shard, whole
from rmdm.training.guards import check_finite, repeatable, signals
from rmdm.training.metrics import Ledger, MetricsLog
from rmdm.training.optim import build_optimizer, ema_decay, learning_rate, update_ema
from rmdm.training.progress import Progress
from rmdm.training.resume import find_resume
from rmdm.training.steps import Plan, Prefetcher, Step
from rmdm.training.task import M, Task, Validation, WarmStart


@dataclass(frozen=True)
class Result:
    """What a training run ended with."""

    step: int
    finished: bool
    """False when a signal stopped it early."""
    loss: float
    validation: Validation | None
    checkpoint: Path
    seconds: float
    units_per_second: float
    """Tokens or rows, as the task counts, start-up and pauses included."""
    signal: int
    """The signal that stopped it, if one did."""


class Trainer(Generic[M]):
    """Everything one rank holds during training; who `resumes` will load a checkpoint and needs no other start."""

    def __init__(self, task: Task[M], out: Path, world: World, *, resumes: bool = False) -> None:
        self.task, self.out, self.world = task, out, world
        train = task.settings
        on_gpu = world.device.type == "cuda"
        self.plan = Plan.make(
            task.config.seed, train.batch, world.rank, world.size, train.micro_batch, section=task.section,
            most=None if on_gpu else task.most_rows,
        )  # fmt: skip
        self.dtype = of_training(train.precision, world.device)

        objective = task.build()
        if isinstance(task, WarmStart) and not resumes:
            task.warm_start(objective)
        objective = objective.to(world.device)
        self.parameters = sum(p.numel() for p in objective.parameters())
        self.ema = copy.deepcopy(objective).requires_grad_(False).eval() if task.optim.ema else None
        sharded = train.parallel == "fsdp" and world.size > 1
        if wants_compile(train.compile, world):
            if sharded:
                for block in blocks(objective):
                    block.compile(dynamic=False)
            else:
                objective.compile(dynamic=False, fullgraph=True, mode=self.compile_mode(on_gpu))
        if self.ema is not None and sharded:
            shard(self.ema, self.dtype)
        self.parallel = Parallel(objective, world, train.parallel, self.dtype)
        self.objective = objective
        self.optimizer = build_optimizer(objective, task.optim)
        # A GPU must not wait for the host each step: there a flag on the device blocks the update after a bad loss and
        # the host learns of it a few steps later. Elsewhere the host looks before each update.
        self.checks_on_device = on_gpu and not sharded
        self.bad = torch.zeros((), device=world.device)
        self.lag = 2 if on_gpu else 0

    def compile_mode(self, on_gpu: bool) -> str | None:
        """CUDA graphs for a task whose kernels end sooner than the host can start the next.

        Gradients of a graph live until its next replay, so neither micro-batches nor DDP's buckets may hold them.
        """
        whole = self.plan.micro_batch * self.plan.size == self.plan.batch
        return "reduce-overhead" if on_gpu and self.task.is_small and whole and self.world.size == 1 else None

    @property
    def averaged(self) -> M:
        """The weights to validate, sample and release."""
        return self.ema if self.ema is not None else self.objective

    def update(self, item: Step, stop: bool) -> Tensor:
        """One optimiser step; returns (loss, gradient norm, stop requests) over all ranks, on the device."""
        optim, world = self.task.optim, self.world
        counted = world.sum(torch.tensor(float(item.counted)))
        # Both DDP and FSDP average gradients over ranks, so each rank's share is scaled up by their number.
        per_unit = torch.full((), world.size / counted.item(), device=world.device)
        loss = torch.zeros((), device=world.device)
        for index, batch in enumerate(item.micro):
            with self.parallel.accumulating(last=index == len(item.micro) - 1):
                with self.autocast():
                    part = self.parallel.module(batch.to(world.device), per_unit)
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), optim.clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        stats = world.sum(torch.stack([loss / world.size, norm / world.size, torch.full_like(loss, float(stop))]))
        if self.checks_on_device:
            self.bad = torch.maximum(self.bad, (~torch.isfinite(stats).all()).float())
            setattr(self.optimizer, "found_inf", self.bad)  # noqa: B010  (torch reads it without declaring it)
        else:
            check_finite(item.step, stats.tolist(), self.out, self.task.section)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(optim, item.step, self.task.settings.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            update_ema(self.ema, self.objective, ema_decay(optim.ema, item.step))
        return stats

    def autocast(self) -> torch.autocast:
        """bf16 matrix products where the config asks for them."""
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def validate(self) -> Validation | None:
        """Figures on held-out rows; every rank computes them alike."""
        with self.autocast():
            result = self.task.validate(self.averaged)
        reshard(self.averaged)
        return result

    def samples(self) -> list[str]:
        """What the averaged weights make."""
        with self.autocast(), whole(self.averaged):
            return self.task.samples(self.averaged)

    def save(self, step: int, window: list[list[float]]) -> Path:
        """Write a checkpoint with everything needed to go on after `step`."""
        return save_checkpoint(
            self.out, step, self.parallel.module, self.ema, self.optimizer, self.world,
            meta={"window": window, "data": self.task.identity, "steps": self.task.settings.steps},
            release=partial(self.task.release, step=step), again=self.task.again(self.out),
        )  # fmt: skip

    def batches(self, first: int) -> Prefetcher:
        """The batches of steps first..steps-1, built ahead."""
        build = partial(self.task.step, plan=self.plan)
        return Prefetcher(first, self.task.settings.steps, build, pin=self.world.device.type == "cuda")

    def load(self, path: Path) -> dict[str, Any]:
        """Go back to a checkpoint."""
        return load_checkpoint(path, self.parallel.module, self.ema, self.optimizer)


def train(task: Task[M], out: Path, world: World, *, resume: str, show: Callable[[str], None]) -> Result:
    """Train until `settings.steps`, a signal, or an error; `resume` is auto, never or a checkpoint's folder.

    Checkpoints, metrics.jsonl and the config go to `out`.
    """
    settings, steps = task.settings, task.settings.steps
    units_a_step = settings.batch * task.units_a_row
    start_from = find_resume(task, out, resume)
    trainer = Trainer(task, out, world, resumes=start_from is not None)
    meta: dict[str, Any] = {"step": 0, "window": []}
    if start_from is not None:
        meta = trainer.load(start_from)
    first = done = int(meta["step"])
    if first >= steps:
        raise ConfigError(f"{start_from} is already at step {first}; raise {task.section}train.steps={steps} to go on")
    world.barrier()  # every rank has read the old config before it is replaced
    if world.is_main:
        save_config(task.config, out)
    valid: Validation | None = None
    checkpoint = out
    began = time.perf_counter()

    def report(step: int, loss: float, norm: float, rate: float) -> None:
        lr = learning_rate(task.optim, step - 1, steps)
        log.write(step=step, loss=loss, grad_norm=norm, lr=lr, **{f"{task.unit}_per_s": round(rate, 1)})
        progress.update(step, loss=loss, rate=rate, seconds_left=(steps - step) * units_a_step / rate)

    check = partial(check_finite, out=out, section=task.section)
    ledger = Ledger(first, meta["window"], settings.log_every, steps, units_a_step, check, report)
    if world.is_main:
        show(describe(trainer, first))
    with (
        signals() as caught,
        repeatable(world),
        MetricsLog(
            out / "metrics.jsonl", first, tensorboard=settings.tensorboard, enabled=world.is_main, section=task.section
        ) as log,
        Progress(task.name, first, steps, unit=task.unit, enabled=world.is_main, show=show) as progress,
        trainer.batches(first) as batches,
    ):
        trainer.objective.train()
        for item in batches:
            ledger.push(item.step, trainer.update(item, stop=bool(caught)))
            ledger.settle(trainer.lag)
            done = item.step + 1
            last = done == steps or ledger.stopping
            # once in a while: validate, sample, save
            if (every(settings.valid_every, done) or last) and not ledger.stopping:  # who is told to stop saves at once
                ledger.settle(0)
                valid = trainer.validate()
                if valid is not None:
                    log.write(step=done, **valid.figures)
                    progress.note(f"step {done}: {valid.line}")
            if every(task.sample_every, done) and not ledger.stopping:
                for text in trainer.samples():
                    progress.note(f"step {done}: {text}")
            if every(settings.save_every, done) or last:
                ledger.settle(0)
                checkpoint = trainer.save(done, ledger.window)
            if ledger.stopping:
                break
            if any(every(n, done) for n in (settings.valid_every, task.sample_every, settings.save_every)):
                ledger.settle(0)
                ledger.resume_clock(done)
    seconds = time.perf_counter() - began
    rate = (done - first) * units_a_step / max(seconds, 1e-9)
    return Result(done, done == steps, ledger.loss, valid, checkpoint, seconds, rate, caught[0] if caught else 2)


def wants_compile(setting: bool | None, world: World) -> bool:
    """Whether to compile the step: as the config says, where there is a compiler for this device's code."""
    if world.device.type == "cuda":
        return setting is not False
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return bool(setting) and compiler is not None


def every(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens at `step`."""
    return bool(interval) and step % interval == 0


def describe(trainer: Trainer[M], first: int) -> str:
    """One line on what is about to be trained, and where."""
    world, settings = trainer.world, trainer.task.settings
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else f"CPU x{os.cpu_count()}"
    how = "fsdp" if settings.parallel == "fsdp" else "ddp"
    ranks = f", {world.size} ranks ({how})" if world.size > 1 else ""
    start = f", from step {first}" if first else ""
    what = trainer.task.describe(trainer.parameters)
    return f"{what}; {settings.steps:,} steps of {settings.batch} rows on {where}{ranks}{start}"
