"""The training step of MeanFlow: compiled as the training loop does it, against the same step with eager JVP.

    python benchmarks/meanflow_step.py                            on a GPU
    python benchmarks/meanflow_step.py --device cpu --tiny        to see that it runs

All arms take the same network, rows, times and noise, and a whole step each: bf16 autocast, backward, clipping, fused
AdamW and the weight average. Batches are built beforehand, except in the arm that builds them in the loop's own thread.
"""

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import matmul_rate, synchronize

from rmdm.config import Config, FlowModelConfig, LatentConfig, LoopConfig, MeanFlowConfig
from rmdm.meanflow.recipes import RECIPES
from rmdm.meanflow.tasks import FlowTask
from rmdm.training.distributed import World, world
from rmdm.training.guards import repeatable
from rmdm.training.loop import Trainer
from rmdm.training.steps import Step


class RandomRows:
    """Rows of N(0, I) in memory."""

    def __init__(self, n: int, groups: int, dim: int) -> None:
        self.groups, self.dim = groups, dim
        self.e_nGD = np.random.default_rng(0).standard_normal((n, groups, dim), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.e_nGD)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The rows at `indices`."""
        return self.e_nGD[indices]


class Task(FlowTask):
    """The loop's own task with another share of r != t rows."""

    def __init__(self, config: Config, rows: RandomRows, share: float, graphs: bool) -> None:
        super().__init__(config, rows, None, {}, None, "align")
        self.recipe, self.is_small = replace(RECIPES["robust"], identity=share), self.is_small and graphs


def build_trainer(args: argparse.Namespace, here: World, out: Path, share: float, mode: str) -> Trainer:
    """A trainer whose step is compiled as the loop compiles it, without CUDA graphs, or not at all."""
    config = Config(
        latent=LatentConfig(groups=args.groups, dim=args.dim),
        meanflow=MeanFlowConfig(
            model=FlowModelConfig(layers=args.layers, width=args.width, heads=args.heads),
            train=LoopConfig(
                steps=args.warmup + args.steps, batch=args.batch, precision="bf16", compile=mode != "eager"
            ),
        ),
    )
    task = Task(config, RandomRows(4 * args.batch, args.groups, args.dim), share, mode == "loop")
    trainer = Trainer(task, out, here)
    trainer.objective.train()
    return trainer


def built(trainer: Trainer, steps: int) -> list[Step]:
    """Steps in page-locked memory, a few of them taken in turn."""
    made = []
    for step in range(min(8, steps)):
        item = trainer.task.step(step, trainer.plan)
        pinned = [batch.pin() for batch in item.micro] if trainer.world.device.type == "cuda" else item.micro
        made.append(replace(item, micro=pinned))
    return [replace(made[step % len(made)], step=step) for step in range(steps)]


def time_arm(trainer: Trainer, steps: int, warmup: int, *, threaded: bool) -> dict[str, Any]:
    """ms a step and what goes with it."""
    device, stats, first_loss = trainer.world.device, torch.zeros(3), float("nan")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    compile_s = 0.0
    source: Any = trainer.batches(0) if threaded else contextlib.nullcontext(built(trainer, warmup + steps))
    with source as items:
        batches: Iterable[Step] = items
        synchronize(device)
        began = time.perf_counter()
        for count, item in enumerate(batches):
            stats = trainer.update(item, stop=False)
            if count == 0:
                first_loss = float(stats[0])
                synchronize(device)
                compile_s = time.perf_counter() - began
            if count + 1 == warmup:
                synchronize(device)
                began = time.perf_counter()
            if count + 1 == warmup + steps:
                break
        synchronize(device)
        step_s = (time.perf_counter() - began) / steps
    return {
        "step_ms": 1e3 * step_s,
        "rows_per_s": trainer.plan.batch / step_s,
        "first_step_s": compile_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "first_loss": first_loss,
        "last_loss": float(stats[0]),
        "steps": steps,
    }


def main() -> None:
    """Time every arm and print a table and a JSON object."""
    parser = argparse.ArgumentParser()
    for name, default in [
        ("layers", 6), ("width", 384), ("heads", 6), ("groups", 4), ("dim", 128), ("batch", 1024), ("steps", 100),
        ("plain-steps", 20), ("warmup", 8), ("matmul", 8192), ("limit", 150),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.75, help="share of the rows with r != t")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU takes in seconds")
    args = parser.parse_args()
    if args.tiny:
        small = {"layers": 1, "width": 16, "heads": 2, "dim": 8, "batch": 32, "steps": 4, "plain_steps": 3,
                 "warmup": 2, "matmul": 256}  # fmt: skip
        vars(args).update(small)
    # (name, share of r != t, how it is compiled, batches built in the loop's thread)
    arms: list[tuple[str, float, str, bool]] = [
        ("product", args.share, "loop", False),
        ("product, batches built meanwhile", args.share, "loop", True),
        ("eager JVP", args.share, "eager", False),
        ("robust recipe (no r != t)", 0.0, "loop", False),
        ("product without CUDA graphs", args.share, "plain", False),
    ]
    began, found = time.perf_counter(), {}
    trainer: Trainer | None = None
    key: tuple[float, str] | None = None
    with world(args.device) as here, tempfile.TemporaryDirectory() as out, repeatable(here):
        where = torch.cuda.get_device_name() if here.device.type == "cuda" else "cpu"
        rate = matmul_rate(here.device, args.matmul)
        print(f"{where}, torch {torch.__version__}, bf16 matmul {rate / 1e12:.1f} TFLOP/s", flush=True)
        for name, share, mode, threaded in arms:
            if time.perf_counter() - began > args.limit - 30 and name not in {"product", "eager JVP"}:
                print(f"{name:>33}  left out: {args.limit} s are nearly over", flush=True)
                continue
            try:
                if trainer is None or key != (share, mode):  # what is compiled already is used again
                    trainer, key = None, (share, mode)
                    gc.collect()
                    torch._dynamo.reset()
                    if here.device.type == "cuda":
                        torch.cuda.empty_cache()
                    trainer = build_trainer(args, here, Path(out), share, mode)
                steps = args.plain_steps if mode == "eager" else args.steps
                result = time_arm(trainer, steps, args.warmup, threaded=threaded)
                found[name] = result
                print(
                    f"{name:>33}  {result['step_ms']:8.3f} ms/step  {result['rows_per_s']:12,.0f} rows/s  first step "
                    f"{result['first_step_s']:5.1f} s  peak {result['peak_gib'] or 0:.2f} GiB  loss "
                    f"{result['first_loss']:.4f} -> {result['last_loss']:.4f}",
                    flush=True,
                )
            except Exception:  # one arm that fails must not lose the others
                traceback.print_exc(file=sys.stdout)
                print(f"{name:>33}  failed", flush=True)
                trainer = None
    plain_ms = found.get("eager JVP", {}).get("step_ms")
    ratios = {name: plain_ms / arm["step_ms"] for name, arm in found.items()} if plain_ms else {}
    for name, ratio in ratios.items():
        print(f"{name:>33}  {ratio:6.2f} times as fast as the eager step", flush=True)
    print(
        json.dumps(
            {
                "arguments": vars(args), "device": where, "torch": torch.__version__, "matmul_tflops": rate / 1e12,
                "arms": found, "times_as_fast": ratios, "seconds": time.perf_counter() - began,
            }
        ),
        flush=True,
    )  # fmt: skip
    if "product" not in found or not ratios:
        sys.exit(1)


if __name__ == "__main__":
    main()
