"""The training loop: batches in, checkpoints out; once in a while it validates, samples and saves."""

import copy
import dataclasses
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rmdm.config import Config, load_config, save_config
from rmdm.data.shards import Manifest, TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import CheckpointError, ConfigError, TrainingError
from rmdm.evaluation.ppl import Perplexity, perplexity
from rmdm.hub import build_backbone, save_model
from rmdm.processes import PROCESSES, Objective
from rmdm.samplers import sample_rows
from rmdm.training.batches import Plan, Prefetcher, Step
from rmdm.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, step_of, verify_checkpoint
from rmdm.training.distributed import Parallel, World, reshard, shard
from rmdm.training.metrics import Ledger, MetricsLog
from rmdm.training.optim import build_optimizer, ema_decay, learning_rate, update_ema
from rmdm.training.progress import Progress

# Fields that may change between a run and its continuation: where things are, how often they are reported, and how long
# to go on (a falling learning rate then follows the new length from there). Which data is meant, the checkpoint tells.
FREE_FIELDS = {"name", "description", "sample", "train", "data.dir", "data.path", "data.workers", "optim.final_lr"}
FIXED_TRAIN_FIELDS = {"train.batch"}


@dataclass(frozen=True)
class Result:
    """What a training run ended with."""

    step: int
    finished: bool
    """False when a signal stopped it early."""
    loss: float
    validation: Perplexity | None
    checkpoint: Path
    seconds: float
    tokens_per_second: float
    signal: int
    """The signal that stopped it, if one did."""


def data_identity(manifest: Manifest) -> dict[str, Any]:
    """What tells one prepared corpus from another."""
    return {"tokenizer": manifest.tokenizer["fingerprint"], "source": manifest.source}


@dataclass(frozen=True)
class Corpus:
    """Prepared data: rows to train on, rows to validate on, and the tokenizer that made them."""

    rows: TokenRows
    valid_rows: TokenRows | None
    tokenizer: Tokenizer
    identity: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of tokenizer and source, kept in every checkpoint."""

    @staticmethod
    def open(folder: Path) -> "Corpus":
        """Open a folder that `rmdm prepare` wrote."""
        rows = TokenRows.open(folder, "train")
        valid = TokenRows.open(folder, "valid") if rows.manifest.splits["valid"].rows else None
        return Corpus(rows, valid, Tokenizer.load(folder / "tokenizer"), data_identity(rows.manifest))


class Trainer:
    """Everything one rank holds during training."""

    def __init__(self, config: Config, out: Path, corpus: Corpus, world: World) -> None:
        self.config, self.out, self.world = config, out, world
        self.process = PROCESSES[config.process]
        self.rows, self.valid_rows, self.tokenizer = corpus.rows, corpus.valid_rows, corpus.tokenizer
        self.identity = corpus.identity
        train = config.train
        self.plan = Plan.make(config.seed, train.batch, world.rank, world.size, train.micro_batch)
        on_gpu = world.device.type == "cuda"
        precision = train.precision if train.precision != "auto" else ("bf16" if on_gpu else "fp32")
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        objective = Objective(build_backbone(config, self.tokenizer.size)).to(world.device)
        self.parameters = sum(p.numel() for p in objective.parameters())
        self.ema = copy.deepcopy(objective).requires_grad_(False).eval() if config.optim.ema else None
        sharded = train.parallel == "fsdp" and world.size > 1
        if wants_compile(train.compile, world):
            if sharded:
                for block in objective.backbone.blocks:
                    block.compile(dynamic=False)
            else:
                objective.compile(dynamic=False, fullgraph=True)
        if self.ema is not None and sharded:
            shard(self.ema, self.dtype)
        self.parallel = Parallel(objective, world, train.parallel, self.dtype)
        self.objective = objective
        self.optimizer = build_optimizer(objective, config.optim)
        # A GPU must not wait for the host each step: there a flag on the device blocks the update after a bad loss and
        # the host learns of it a few steps later. Elsewhere the host looks before each update.
        self.checks_on_device = on_gpu and not sharded
        self.bad = torch.zeros((), device=world.device)
        self.lag = 2 if on_gpu else 0

    @property
    def averaged(self) -> Objective:
        """The weights to validate, sample and release."""
        return self.ema if self.ema is not None else self.objective

    def update(self, item: Step, stop: bool) -> Tensor:
        """One optimiser step; returns (loss, gradient norm, stop requests) over all ranks, on the device."""
        config, world = self.config, self.world
        tokens = world.sum(torch.tensor(float(item.tokens)))
        # Both DDP and FSDP average gradients over ranks, so each rank's share is scaled up by their number.
        per_token = torch.full((), world.size / tokens.item(), device=world.device)
        loss = torch.zeros((), device=world.device)
        for index, batch in enumerate(item.micro):
            with self.parallel.accumulating(last=index == len(item.micro) - 1):
                with self.autocast():
                    part = self.parallel.module(batch.to(world.device), per_token)
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), config.optim.clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        stats = world.sum(torch.stack([loss / world.size, norm / world.size, torch.full_like(loss, float(stop))]))
        if self.checks_on_device:
            self.bad = torch.maximum(self.bad, (~torch.isfinite(stats).all()).float())
            setattr(self.optimizer, "found_inf", self.bad)  # noqa: B010  (torch reads it without declaring it)
        else:
            check_finite(item.step, stats.tolist(), self.out)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, item.step, config.train.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            update_ema(self.ema, self.objective, ema_decay(config.optim.ema, item.step))
        return stats

    def autocast(self) -> torch.autocast:
        """bf16 matrix products where the config asks for them."""
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def validate(self) -> Perplexity | None:
        """Bound (or exact value) on held-out rows; every rank computes it alike."""
        if self.valid_rows is None:
            return None
        with self.autocast():
            result = perplexity(
                self.averaged,
                self.process,
                self.valid_rows,
                limit=self.config.train.valid_rows,
                pad_in_loss=self.config.data.pad_in_loss,
            )
        reshard(self.averaged)
        return result

    def samples(self, n: int) -> list[str]:
        """Texts from the averaged weights; the same seed each time, so that they can be watched getting better."""
        with self.autocast():
            settings = self.config.sample
            x_BL = sample_rows(self.averaged.backbone, n, settings.steps, self.config.seed, settings.temperature)
        reshard(self.averaged)
        cut = self.config.data.layout == "padded"
        return [self.tokenizer.decode(row, stop_at_separator=cut) for row in x_BL.cpu().numpy()]

    def save(self, step: int, window: list[list[float]]) -> Path:
        """Write a checkpoint with everything needed to go on after `step`."""

        def write_model(folder: Path, weights: dict[str, Tensor]) -> None:
            kept = {name.removeprefix("backbone."): value for name, value in weights.items()}
            save_model(folder, kept, self.config, self.tokenizer, step)

        meta = {"window": window, "data": self.identity}
        return save_checkpoint(
            self.out, step, self.parallel.module, self.ema, self.optimizer, meta, self.world, write_model
        )

    def batches(self, first: int) -> Prefetcher:
        """The batches of steps first..steps-1, built ahead."""
        return Prefetcher(
            first,
            self.config.train.steps,
            self.plan,
            self.rows,
            self.process,
            mask_id=self.objective.backbone.mask_id,
            pad_in_loss=self.config.data.pad_in_loss,
            pin=self.world.device.type == "cuda",
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Go back to a checkpoint."""
        return load_checkpoint(path, self.parallel.module, self.ema, self.optimizer)


def train(
    config: Config, out: Path, data_dir: Path, world: World, *, resume: str, show: Callable[[str], None]
) -> Result:
    """Train until `config.train.steps`, a signal, or an error; `resume` is auto, never or a checkpoint's folder."""
    settings, steps = config.train, config.train.steps
    start_from = find_resume(config, out, resume)
    corpus = Corpus.open(data_dir)
    trainer = Trainer(config, out, corpus, world)
    meta: dict[str, Any] = {"step": 0, "window": []}
    if start_from is not None:
        check_same_data(start_from, corpus.identity)
        meta = trainer.load(start_from)
    first = done = int(meta["step"])
    if first >= steps:
        raise ConfigError(f"{start_from} is already at step {first}; raise train.steps={steps} to go on")
    world.barrier()  # every rank has read the old config before it is replaced
    if world.is_main:
        save_config(config, out)
    valid: Perplexity | None = None
    checkpoint = out
    began = time.perf_counter()

    def report(step: int, loss: float, norm: float, rate: float) -> None:
        lr = learning_rate(config.optim, step - 1, steps)
        log.write(step=step, loss=loss, grad_norm=norm, lr=lr, tokens_per_s=round(rate, 1))
        progress.update(step, loss=loss, tokens_per_s=rate, seconds_left=(steps - step) * ledger.tokens_a_step / rate)

    ledger = Ledger(
        first, meta["window"], settings.log_every, steps, settings.batch * config.data.length,
        check=lambda step, values: check_finite(step, values, out), report=report,
    )  # fmt: skip
    if world.is_main:
        show(describe(trainer, first))
    with (
        signals() as caught,
        repeatable(world),
        MetricsLog(out / "metrics.jsonl", first, tensorboard=settings.tensorboard, enabled=world.is_main) as log,
        Progress(config.name, first, steps, enabled=world.is_main, show=show) as progress,
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
                    log.write(step=done, valid_nats=valid.nats, valid_ppl=valid.ppl, valid_tokens=valid.tokens)
                    progress.note(f"step {done}: {describe_validation(valid, config)}")
            if every(settings.sample_every, done) and not ledger.stopping:
                for text in trainer.samples(settings.sample_n):
                    progress.note(f"step {done}: {text}")
            if every(settings.save_every, done) or last:
                ledger.settle(0)
                checkpoint = trainer.save(done, ledger.window)
            if ledger.stopping:
                break
            if any(every(n, done) for n in (settings.valid_every, settings.sample_every, settings.save_every)):
                ledger.settle(0)
                ledger.resume_clock(done)
    seconds = time.perf_counter() - began
    rate = (done - first) * settings.batch * config.data.length / max(seconds, 1e-9)
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


def find_resume(config: Config, out: Path, resume: str) -> Path | None:
    """The checkpoint to start from, or None for a fresh start; never mixes two different runs."""
    existing = list_checkpoints(out)
    if resume == "never":
        if existing:
            raise ConfigError(f"{out} already holds a run (at {existing[-1].name}); use --resume auto or another --out")
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "meta.json").is_file():
            raise CheckpointError(f"--resume {resume} is no checkpoint; use auto, never or a folder checkpoints/step-N")
        later = [other for other in existing if step_of(other) > step_of(path)]
        if later:
            raise ConfigError(f"{later[-1]} is later than --resume {resume}; delete it or use another --out")
        check_same_run(path.parent.parent, config)
        return path
    if not existing:
        return None
    check_same_run(out, config)
    return existing[-1]


def check_same_data(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Refuse to continue on other data than the checkpoint was trained on."""
    old = verify_checkpoint(checkpoint).get("data", identity)
    for name, value in identity.items():
        if old.get(name) != value:
            raise ConfigError(f"{checkpoint} was trained with another {name}; use the old data or another --out")


def check_same_run(out: Path, new: Config) -> None:
    """Refuse to take a run for one of other settings; a folder without a config can be any run."""
    if not (out / "config.yaml").is_file():
        return
    before, after = flatten(load_config(out)), flatten(new)
    for name, value in after.items():
        free = name in FREE_FIELDS or name.split(".")[0] in FREE_FIELDS
        if before.get(name) != value and (not free or name in FIXED_TRAIN_FIELDS):
            raise ConfigError(
                f"{out} was trained with {name}={before.get(name)!r}, not {value!r}; use the old value or another --out"
            )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields of nested dataclasses under dotted names."""
    fields: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value):
            fields |= flatten(value, f"{prefix}{part.name}.")
        else:
            fields[prefix + part.name] = value
    return fields


def check_finite(step: int, values: list[float], out: Path) -> None:
    """Stop on a loss or gradient that is not a number; the update of that step has not been made."""
    if not all(math.isfinite(value) for value in values):
        kept = list_checkpoints(out)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
        raise TrainingError(
            f"step {step + 1}: loss {values[0]}, gradient norm {values[1]}; stopped before the update; {last}; "
            "try a lower optim.lr or a longer optim.warmup"
        )


@contextmanager
def repeatable(world: World) -> Generator[None]:
    """On a CPU, only operations whose sums have one order: compiled code adds gradients atomically otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or world.device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def signals() -> Generator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the loop can save and leave; a second one of the kind acts at once."""
    caught: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    old = {kind: signal.getsignal(kind) for kind in kinds}

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, old[signal.Signals(number)])

    for kind in kinds:
        signal.signal(kind, handler)
    try:
        yield caught
    finally:
        for kind in kinds:
            signal.signal(kind, old[kind])


def describe(trainer: Trainer, first: int) -> str:
    """One line on what is about to be trained, and where."""
    config, world = trainer.config, trainer.world
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else f"CPU x{os.cpu_count()}"
    how = "fsdp" if config.train.parallel == "fsdp" else "ddp"
    ranks = f", {world.size} ranks ({how})" if world.size > 1 else ""
    start = f", from step {first}" if first else ""
    return (
        f"{config.process}: {trainer.parameters / 1e6:.2f}M parameters, {len(trainer.rows):,} rows of "
        f"{config.data.length}, vocabulary {trainer.tokenizer.size:,}; {config.train.steps:,} steps of "
        f"{config.train.batch} rows on {where}{ranks}{start}"
    )


def describe_validation(valid: Perplexity, config: Config) -> str:
    """The validation figure with what it counts."""
    sign = "<= " if valid.is_bound else ""
    pad = f", PAD {'counted' if config.data.pad_in_loss else 'not counted'}" if config.data.layout == "padded" else ""
    return f"validation perplexity {sign}{valid.ppl:.3f} ({valid.nats:.4f} nats a token, {valid.tokens:,} tokens{pad})"
