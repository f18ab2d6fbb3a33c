"""How fast models of a named size write, with random weights, beside the reference arm and the machine's floor.

A row is one of `bench.sample` with `size`, `process` and `arm`, what `Floor.figures` says of the whole request,
`floor_seconds_per_step`, `measured_steps` (fewer than `steps` where the rest is inferred), and where and when.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rmdm.bench.counts import request
from rmdm.bench.machine import Machine, clear, forget_peak, memory, peak_bytes, release, timed
from rmdm.bench.profile import begin_profile, profiled
from rmdm.bench.reference import PlainNetwork, plain_sample
from rmdm.bench.sample import bench, latency, write
from rmdm.bench.sizes import Size, latent_of
from rmdm.bench.workload import random_model
from rmdm.errors import ConfigError
from rmdm.evaluation.record import Rows
from rmdm.kinds import Show
from rmdm.model import Model
from rmdm.samplers.generate import own_settings
from rmdm.tables import grid

PROFILED_STEPS = 16
"""Most steps of a request that is profiled."""


def bench_sizes(
    size: Size, machine: Machine, processes: Sequence[str], arms: Sequence[str], steps: Sequence[int], batch: int,
    repeats: int, reference_steps: int, show: Show, *, profile: Path | None = None,
) -> Rows:  # fmt: skip
    """A row for every process, number of steps and arm; `profile` gets a table of where a request's time goes."""
    rows: Rows = []
    begin_profile(profile)
    for process in processes:
        model = random_model(size, process, machine.device)
        for count in steps:
            for arm in arms:
                show(f"bench: {arm}, {process}, {batch} texts, {count} steps")
                try:
                    if arm == "ours":
                        row = bench(model.writer(), model.config, count, batch, repeats)
                        measured = row | {"measured_steps": count}
                    else:
                        model.__dict__.pop("trunk", None)  # its memory is not the reference arm's
                        release(machine.device)
                        measured = time_reference(model, count, batch, repeats, min(count, reference_steps))
                except torch.cuda.OutOfMemoryError:
                    show(f"bench: {arm}, {process} left out: {batch} texts do not fit in memory; lower --batch")
                    continue
                finally:
                    release(machine.device)
                show(f"bench: {arm}, {process}, {count} steps: {measured['tokens_per_s']:,.0f} tokens/s")
                floor = request(size, process, batch, count, machine.dtype.itemsize)
                figures = floor.figures(machine, measured["seconds"])
                rows.append(
                    measured
                    | {"size": size.name, "vocab": size.vocab, "groups": size.groups if process == "rmdm" else None}
                    | {"process": process, "arm": arm, **figures}
                    | {"floor_seconds_per_step": figures["floor_seconds"] / count, **machine.facts}
                )
        if profile is not None:
            how = own_settings(model.backbone, model.config.sample, min(PROFILED_STEPS, *steps))
            with profiled(machine.device, f"{size.name}, {process}, {batch} texts, {how.steps} steps", profile):
                write(model.writer(), how, model.config.sample.latent_temperature, batch, seed=0)
        del model
        clear(machine.device)
    if not rows:
        raise ConfigError(f"--batch {batch} does not fit in memory in any arm; use a smaller one")
    return rows


def time_reference(model: Model, steps: int, batch: int, repeats: int, measured: int) -> dict[str, Any]:
    """The plain sampler, timed over its first steps: all of them cost the same."""
    network, device, writer = PlainNetwork(model.backbone).eval(), model.device, model.writer(half=False)
    zt_BGd = writer.draw(writer.blank(batch, 0)[1])
    plain_sample(network, batch, steps, zt_BGd=zt_BGd, first=1)
    forget_peak(device)
    seconds = median(
        timed(device, lambda: plain_sample(network, batch, steps, zt_BGd=zt_BGd, first=measured))
        for _ in range(repeats)
    )
    whole = seconds / measured * steps
    return {
        "sampler": "ancestral", "steps": steps, "batch": batch, "length": network.length, "seconds": whole,
        "repeats": repeats, "tokens_per_s": batch * network.length / whole, "seconds_per_step": whole / steps,
        "measured_steps": measured, "peak_bytes": peak_bytes(device),
        "parameters": sum(p.numel() for p in network.parameters()),
    }  # fmt: skip


def latency_of_size(
    size: Size, device: torch.device, processes: Sequence[str], steps: Sequence[int], requests: int, show: Show,
) -> Rows:  # fmt: skip
    """How long one text takes, a row for every process and number of steps."""
    rows: Rows = []
    for process in processes:
        show(f"bench: {size.name}-{process} writes one text at a time, {requests} times")
        model = random_model(size, process, device)
        rows += [latency(model.writer(), model.config, count, requests) for count in steps]
    return rows


def ratios(rows: Rows) -> Rows:
    """How many times as fast the product is as the reference arm, and RMDM's throughput over MDLM's."""
    found = {(row["process"], row["steps"], row["arm"]): row["tokens_per_s"] for row in rows}
    compared: Rows = []
    for (process, steps, arm), rate in found.items():
        if arm == "ours" and (process, steps, "reference") in found:
            faster = rate / found[process, steps, "reference"]
            compared.append({"process": process, "steps": steps, "times_as_fast": faster})
    for (process, steps, arm), rate in found.items():
        if process == "rmdm" and ("mdlm", steps, arm) in found:
            compared.append({"arm": arm, "steps": steps, "rmdm_over_mdlm": rate / found["mdlm", steps, arm]})
    return compared


def render(rows: Rows, compared: Rows) -> str:
    """The table, and a line for each comparison."""
    titles = [
        "process", "arm", "steps", "tokens/s", "ms a step", "floor ms", "limit", "times floor", "peak", "seconds",
    ]  # fmt: skip
    body = [
        [
            row["process"], row["arm"], str(row["steps"]), f"{row['tokens_per_s']:,.0f}",
            f"{1e3 * row['seconds_per_step']:.2f}", f"{1e3 * row['floor_seconds_per_step']:.3g}", row["floor_limit"],
            f"{row['times_the_floor']:.2f}", memory(row["peak_bytes"]),
            f"{row['seconds']:.3f}" + ("" if row["measured_steps"] == row["steps"] else " *"),
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['size']}: {first['batch']} texts of {first['length']} tokens, vocabulary {first['vocab']:,}"
    lines = [title + latent_of(rows), grid([("", each) for each in titles], body)]
    partly = [row for row in rows if row["measured_steps"] < row["steps"]]
    if partly:
        lines.append(f"* inferred from its first {partly[0]['measured_steps']} steps; all of them cost the same")
    for each in compared:
        if "rmdm_over_mdlm" in each:
            lines.append(
                f"{each['arm']}, {each['steps']} steps: rmdm writes {each['rmdm_over_mdlm']:.3f} times as fast as mdlm"
            )
        else:
            lines.append(
                f"{each['process']}, {each['steps']} steps: {each['times_as_fast']:.2f} times as fast as the reference "
                "arm"
            )
    return "\n".join(lines)
