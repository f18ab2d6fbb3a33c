"""How time and memory grow with batch, length, steps, vocabulary and ranks.

    python benchmarks/growth.py measure growth.json [--axes sample-batch,train-length] [--size wiki-small] [--small]
    python benchmarks/growth.py plot growth.json docs/img

`measure` adds a row for every point to the file, and leaves out those it has. Models have random weights and the size
of `--size`, a size of `rmdm bench`, where an axis does not say otherwise: 12 x 768 at L = 1024 with 50,258 tokens, or
6 x 384 at L = 128 with 8,192 for a CPU. RMDM has four groups where the length changes.
Training is that of MDLM; `ranks` is `rmdm run` under torchrun on the CPU, one thread a rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rmdm.bench.machine import clear, release
from rmdm.bench.sample import bench
from rmdm.bench.sizes import Size, find_size
from rmdm.bench.train import time_product
from rmdm.bench.workload import random_model
from rmdm.hub import device_name, find_device
from rmdm.model import Model

STEPS = 16
"""Denoising steps of a request where they are not what grows."""
AXES = {
    "sample-batch": ("batch", [1, 4, 8, 16, 64, 256]),
    "sample-length": ("length", [128, 512, 1024, 4096]),
    "sample-steps": ("steps", [1, 4, 16, 64, 256, 1024]),
    "sample-vocab": ("vocab", [1024, 8192, 50_258, 151_936]),
    "train-batch": ("batch", [8, 32, 64, 128]),
    "train-length": ("length", [256, 1024, 4096]),
    "train-vocab": ("vocab", [8192, 50_258, 151_936]),
    "ranks": ("ranks", [1, 2]),
}
SMALL = {"batch": [1, 2], "length": [8, 16], "steps": [1, 4], "vocab": [50, 100], "ranks": [1, 2]}
TRAINED_TOKENS = {"cuda": 65_536, "cpu": 16_384}
"""Tokens of a training step while its length grows."""
TIMED = {"cuda": (10, 5), "cpu": (3, 1)}
"""Training steps that count, and those before them."""
TITLES = {
    "batch": "texts or rows at a time", "length": "tokens of a text", "steps": "denoising steps",
    "vocab": "tokens of the vocabulary", "ranks": "ranks",
}  # fmt: skip

Row = dict[str, Any]


def points(axes: list[str], *, small: bool) -> Iterator[tuple[str, str, int, str]]:
    """Axis, what grows, its value and the process of every point."""
    for axis in axes:
        what, values = AXES[axis]
        for process in ("mdlm", "rmdm") if axis.startswith("sample") else ("mdlm",):
            for value in SMALL[what] if small else values:
                yield axis, what, value, process


def measure(axis: str, what: str, value: int, process: str, device: torch.device, args: argparse.Namespace) -> Row:
    """Seconds of a request or a training step, and the most memory held."""
    size = find_size(size_named(args))
    if what == "ranks":
        return {"seconds": seconds_of_ranks(value, small=args.small), "peak_bytes": None}
    if what in ("length", "vocab"):
        size = replace(size, **{what: value})
        size = replace(size, groups=4) if what == "length" else size
    batch = value if what == "batch" else 8
    if axis.startswith("train"):
        model_of.cache_clear()  # what writes is none of training's memory
        batch = max(1, TRAINED_TOKENS[device.type] // value) if what == "length" and not args.small else batch
        batch = min(size.batch, TRAINED_TOKENS[device.type] // size.length) if what == "vocab" else batch
        return timed_training(size, process, device, batch)
    model = model_of(size, process, device)
    steps = value if what == "steps" else min(STEPS, size.length)
    row = bench(model.writer(), model.config, steps, batch, 1)
    return {"seconds": row["seconds"], "peak_bytes": row["peak_bytes"], "tokens": batch * size.length}


def size_named(args: argparse.Namespace) -> str:
    """What the flags ask for."""
    return "tiny" if args.small else args.size


@lru_cache(maxsize=1)
def model_of(size: Size, process: str, device: torch.device) -> Model:
    """A model with random weights, the same for points that follow one another."""
    return random_model(size, process, device)


def timed_training(size: Size, process: str, device: torch.device, batch: int) -> Row:
    """One training step."""
    row = time_product(size, process, device, batch, *TIMED[device.type], None)
    return {"seconds": row["seconds_per_step"], "peak_bytes": row["peak_bytes"], "tokens": batch * size.length}


def seconds_of_ranks(ranks: int, *, small: bool) -> float:
    """Seconds of a training step of `storyworld-mini-mdlm` on so many ranks, the global batch the same."""
    steps = 20 if small else 120
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "rmdm",
            "run", "storyworld-mini-mdlm", "--out", f"{folder}/run", "--data.dir", f"{folder}/data",
            "--data.stories", "2000", "--data.holdout", "100", "--train.steps", str(steps), "--train.log_every", "10",
            "--train.compile", "false", "--train.device", "cpu", "--train.valid_every", "0",
            "--train.sample_every", "0",
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        found = list(Path(folder).glob("run/**/metrics.jsonl"))
        if not found:
            raise SystemExit(f"torchrun with {ranks} ranks failed:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines()]
    rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return 64 * 32 / sorted(rates)[len(rates) // 2]


def measure_all(args: argparse.Namespace) -> None:
    """Every point that the file lacks."""
    device = find_device(args.device)
    path = Path(args.file)
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    axes = args.axes.split(",") if args.axes else list(AXES)
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise SystemExit(f"--axes {unknown[0]} is unknown; use some of {','.join(AXES)}")
    for axis, what, value, process in points(axes, small=args.small):
        on = "cpu" if what == "ranks" else device_name(device)
        size = "storyworld-mini" if what == "ranks" else size_named(args)
        key = {"axis": axis, "what": what, "value": value, "process": process, "device": on, "size": size}
        if any(key.items() <= row.items() for row in rows):
            continue
        try:
            row = key | measure(axis, what, value, process, device, args)
        except torch.cuda.OutOfMemoryError:
            print(f"{axis} {value} {process}: does not fit in memory", flush=True)
            continue
        finally:
            clear(device)
            release(device)
        rows.append(row)
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        peak = f", {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
        print(f"{axis} {value} {process}: {1e3 * row['seconds']:.2f} ms{peak}", flush=True)


def plot_all(args: argparse.Namespace) -> None:
    """One picture an axis, size and machine: seconds, and memory where it was measured."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    rows: list[Row] = json.loads(Path(args.file).read_text(encoding="utf-8"))
    sets = list(dict.fromkeys((row["axis"], row["size"], row["device"]) for row in rows))
    for axis, size, device in sets:
        own = [row for row in rows if (row["axis"], row["size"], row["device"]) == (axis, size, device)]
        has_memory = any(row["peak_bytes"] for row in own)
        figure, panes = plt.subplots(1, 1 + has_memory, figsize=(4 * (1 + has_memory), 3), squeeze=False)
        for process in dict.fromkeys(row["process"] for row in own):
            some = sorted((row for row in own if row["process"] == process), key=lambda row: row["value"])
            x = [row["value"] for row in some]
            panes[0][0].plot(x, [1e3 * row["seconds"] for row in some], "o-", label=process.upper())
            if has_memory:
                panes[0][1].plot(x, [(row["peak_bytes"] or 0) / 2**30 for row in some], "o-", label=process.upper())
        values = sorted({row["value"] for row in own})
        for pane, name in zip(panes[0], ("milliseconds", "GiB at most"), strict=False):
            pane.set(xscale="log", xlabel=TITLES[own[0]["what"]], ylabel=name)
            low, high = pane.dataLim.intervaly
            if high > 4 * low:
                pane.set(yscale="log")
                pane.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                pane.yaxis.set_major_formatter("{x:,g}")
            else:
                pane.set(ylim=(0, 1.1 * high))
            pane.set_xticks(values, [f"{value:,}" for value in values])
            pane.minorticks_off()
            pane.grid(visible=True, alpha=0.3)
            pane.legend()
        figure.suptitle(f"{axis.replace('-', ', ')}: {size}, {device}", fontsize=10)
        figure.tight_layout()
        place = [axis] if [one for one, *_ in sets].count(axis) == 1 else [axis, size, device.replace(" ", "-")]
        target = Path(args.folder) / f"growth-{'-'.join(place)}.svg"
        figure.savefig(target)
        plt.close(figure)
        print(target)


def main() -> None:
    """Measure or plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("measure")
    one.add_argument("file")
    one.add_argument("--axes", help=f"comma-separated, of {', '.join(AXES)} (default all)")
    one.add_argument("--size", default="owt", help="a size of rmdm bench (default owt)")
    one.add_argument("--small", action="store_true", help="a tiny model, to see that it works")
    one.add_argument("--device", default="auto")
    one.set_defaults(run=measure_all)
    two = verbs.add_parser("plot")
    two.add_argument("file")
    two.add_argument("folder")
    two.set_defaults(run=plot_all)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
