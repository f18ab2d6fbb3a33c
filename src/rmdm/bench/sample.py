"""How fast a trained model writes: whole requests, from the latent's draw to the last token [Paper, Tables 4 and 10].

The rows of RUN/eval/bench.json: `arm`, `sampler`, `steps`, `guidance`, `batch`, `length`, `seconds` (median of
`repeats` requests, each with its own seed), `tokens_per_s`, and of the requests' own `tokens_per_s_low` and
`tokens_per_s_high` (10% and 90% of them are slower), `seconds_per_step`, `latent_seconds` (of those, drawing
the latent; None without one), `weight_bytes` (the network and its flow), `peak_bytes` (the most torch held on the GPU
meanwhile, weights included; None on a CPU), `parameters`, `device`, `precision`, `torch`, `date`.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from rmdm.bench.machine import facts, forget_peak, peak_bytes, timed
from rmdm.config import Config
from rmdm.errors import ConfigError
from rmdm.evaluation.record import Rows, recorded
from rmdm.hub import Model, device_name, load_model
from rmdm.kinds import Show
from rmdm.precision import autocast, dtype, named
from rmdm.samplers.generate import Writer, own_settings
from rmdm.samplers.settings import SampleSettings
from rmdm.tables import grid
from rmdm.training.checkpoint import file_signature

FIRST_STEPS = 4
WARM_SECONDS = {"cuda": 0.5, "cpu": 0.0001}
"""Requests before those that count: at least one, on a GPU until its clocks are up."""
LEAST_SECONDS, MOST_REPEATS = 1.0, 200
"""Requests are repeated until they took this long together, or so often."""


def opened(run: Path, device: torch.device, guidance: float | None) -> Model:
    """A trained model, led by its latent as asked."""
    model = load_model(run, device)
    if guidance is None:
        return model
    if model.backbone.latent is None:
        raise ConfigError(f"--guidance {guidance:g} weighs a latent, and {model.config.name} has none; leave it out")
    replace(own_settings(model.backbone, model.config.sample), guidance=guidance).check(model.backbone)
    return replace(model, config=replace(model.config, sample=replace(model.config.sample, guidance=guidance)))


def bench_runs(
    runs: Sequence[Path], device: torch.device, steps: Sequence[int], batch: int, repeats: int, show: Show,
    guidance: float | None = None,
) -> Rows:  # fmt: skip
    """Rows of every run, kept in its folder."""
    rows: Rows = []
    for run in runs:  # all mistakes first; no model is kept: it would count among another's memory
        opened(run, torch.device("cpu"), guidance)
    for run in runs:
        model = opened(run, device, guidance)
        counts = list(steps) or default_steps(model)
        # A figure of another machine is another figure.
        asked = {
            "weights": file_signature(model.folder / "model.safetensors"), "steps": counts, "batch": batch,
            "repeats": repeats, "device": device_name(device), "torch": torch.__version__,
            "precision": named(dtype(device)), "sample": asdict(model.config.sample),
        }  # fmt: skip
        home = run if run.is_dir() else model.folder

        def measure(model: Model = model, counts: list[int] = counts) -> Rows:
            show(f"bench: {model.config.name} writes {batch} texts at {', '.join(map(str, counts))} steps")
            return [bench(model.writer(), model.config, count, batch, repeats) for count in counts]

        rows += recorded(home / "eval" / "bench.json", asked, measure, show)
    return rows


def default_steps(model: Model) -> list[int]:
    """Powers of two up to the length; an autoregressive model has one number of steps."""
    length = model.backbone.length
    if model.backbone.causal:
        return [length]
    return [2**k for k in range(length.bit_length()) if FIRST_STEPS <= 2**k <= length]


def bench(writer: Writer, config: Config, steps: int, batch: int, repeats: int) -> dict[str, Any]:
    """One row."""
    backbone = writer.backbone
    device, how = backbone.embed.weight.device, own_settings(backbone, config.sample, steps)
    tau = config.sample.latent_temperature
    spent, taken = 0.0, []
    while spent < WARM_SECONDS[device.type]:
        spent += timed(device, lambda: write(writer, how, tau, batch, seed=0))
    forget_peak(device)
    while len(taken) < repeats or (sum(taken) < LEAST_SECONDS and len(taken) < MOST_REPEATS):
        taken.append(timed(device, partial(write, writer, how, tau, batch, seed=len(taken) + 1)))
    seconds, (slow, fast) = median(taken), np.percentile(taken, (90, 10))
    peak, drawn = peak_bytes(device), None
    if writer.source is not None:
        keys_B = writer.blank(batch, 0)[1]
        drawn = median(timed(device, lambda: writer.draw(keys_B, tau)) for _ in range(repeats))
    parts: list[nn.Module] = [backbone]
    if writer.source is not None and writer.source.flow is not None:
        flow = writer.source.flow
        parts += [net for net in (flow.net, flow.student, flow.guide) if net is not None]
    return {
        "arm": config.name,
        "sampler": how.sampler, "steps": how.steps, "guidance": how.guidance, "batch": batch,
        "length": backbone.length, "seconds": seconds, "repeats": len(taken),
        "tokens_per_s": batch * backbone.length / seconds, "tokens_per_s_low": batch * backbone.length / slow,
        "tokens_per_s_high": batch * backbone.length / fast, "seconds_per_step": seconds / how.steps,
        "latent_seconds": drawn, "peak_bytes": peak,
        "weight_bytes": sum(p.numel() * p.element_size() for part in parts for p in part.parameters()),
        "parameters": sum(p.numel() for p in backbone.parameters()), **facts(device),
    }  # fmt: skip


def write(writer: Writer, how: SampleSettings, tau: Any, batch: int, seed: int) -> None:
    """A request of `batch` texts."""
    with autocast(writer.backbone.embed.weight.device):
        writer.write(*writer.blank(batch, seed), how, tau=tau, batch=batch)


def latency_of_runs(
    runs: Sequence[Path], device: torch.device, steps: Sequence[int], requests: int, show: Show,
    guidance: float | None = None,
) -> Rows:  # fmt: skip
    """How long one text takes, a row for every run and number of steps."""
    rows: Rows = []
    for run in runs:
        model = opened(run, device, guidance)
        show(f"bench: {model.config.name} writes one text at a time, {requests} times")
        for count in list(steps) or default_steps(model):
            rows.append(latency(model.writer(), model.config, count, requests))
    return rows


def latency(writer: Writer, config: Config, steps: int, requests: int) -> dict[str, Any]:
    """Seconds from a request for one text to its last token: the median and the 95th percentile of `requests`."""
    device, how = writer.backbone.embed.weight.device, own_settings(writer.backbone, config.sample, steps)
    tau = config.sample.latent_temperature
    for seed in range(3):
        write(writer, how, tau, 1, seed)
    seconds = [timed(device, lambda s=seed: write(writer, how, tau, 1, s)) for seed in range(requests)]
    return {
        "arm": config.name, "steps": how.steps, "guidance": how.guidance, "length": writer.backbone.length,
        "requests": requests, "median_seconds": median(seconds), "p95_seconds": float(np.percentile(seconds, 95)),
        **facts(device),
    }  # fmt: skip


def render(rows: Rows) -> str:
    """The table."""
    titles = ["model", "steps", "guidance", "tokens/s", "80% of requests", "ms a step", "ms latent", "seconds",
              "weights", "peak"]  # fmt: skip
    body = [
        [
            str(row["arm"]), str(row["steps"]), f"{row['guidance']:g}", f"{row['tokens_per_s']:,.0f}", spread(row),
            f"{1000 * row['seconds_per_step']:.2f}",
            "-" if row["latent_seconds"] is None else f"{1000 * row['latent_seconds']:.1f}", f"{row['seconds']:.3f}",
            f"{row['weight_bytes'] / 2**20:.0f} MiB",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f} MiB",
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['batch']} texts of {first['length']} tokens, {first['device']}, {first['precision']}"
    return f"{title}\n{grid([('', each) for each in titles], body)}"


def spread(row: dict[str, Any]) -> str:
    """The range of a row's rates."""
    low, high = row.get("tokens_per_s_low"), row.get("tokens_per_s_high")
    return "-" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


def render_latency(rows: Rows) -> str:
    """The table."""
    titles = ["model", "steps", "guidance", "median ms", "95th percentile", "requests"]
    body = [
        [
            str(row["arm"]), str(row["steps"]), f"{row['guidance']:g}", f"{1e3 * row['median_seconds']:.1f}",
            f"{1e3 * row['p95_seconds']:.1f}", str(row["requests"]),
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"one text of {first['length']} tokens at a time, {first['device']}, {first['precision']}"
    return f"{title}\n{grid([('', each) for each in titles], body)}"
