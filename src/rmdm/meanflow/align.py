"""Stage I from a cache of embeddings to a finished flow and a cache of z_0.

<run>/flow/   checkpoints/, metrics.jsonl, config.yaml    of the flow
              student/...                                 the same of the few-step network, if one is trained
              enter.safetensors                           the whitening of whole rows
              flow.safetensors, flow.json                 the finished flow
<cache>/      train.z0-<flow>, valid.z0-<flow>, manifest-z0-<flow>.json
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rmdm.backbone.latent import projection
from rmdm.config import Config
from rmdm.data.progress import RowProgress
from rmdm.data.shards import Split
from rmdm.encoders.cache import ArrayManifest, ArraySpec, LatentRows, RowsWriter, fingerprint, fit_indices
from rmdm.encoders.whitening import save_atomically
from rmdm.errors import DataError
from rmdm.meanflow import flow as flows
from rmdm.meanflow.affine import Affine, RowMoments
from rmdm.meanflow.flow import Flow, FlowSettings
from rmdm.meanflow.recipes import RECIPES, transport_steps
from rmdm.meanflow.tasks import DistilTask, FlowTask, Rows, batches_of, calibration_rows
from rmdm.training.checkpoint import list_checkpoints, step_of
from rmdm.training.distributed import World
from rmdm.training.loop import Result, train
from rmdm.training.resume import find_finished

Show = Callable[[str], None]
FIT_ROWS = 65_536
"""Rows the moments of z_0 and of draws are taken from."""
INT8_REACH = 4.5
"""int8 covers z_0 to this many standard deviations; a normal number lies beyond once in 150,000."""


@dataclass(frozen=True)
class Aligned:
    """What stage I ended with."""

    flow: Path
    kind: str | None
    """Kind of the z_0 array in the embeddings' cache; None when no z_0 is stored."""
    stopped: Result | None = None
    """The training run a signal stopped, if one did."""
    skipped: bool = False


def align(
    config: Config, cache: Path, out: Path, world: World, *, resume: str, show: Show, verb: str = "align",
    online: Callable[[Split], Rows] | None = None,
) -> Aligned:  # fmt: skip
    """Train what `meanflow.direction` asks for, finish the flow, and store z_0 of every row. All ranks call this.

    `online` opens a split whose embeddings are made as they are taken; `latent.source: online` trains on them, and
    `latent.store: z0` stores what becomes of them.
    """
    manifest, latent = ArrayManifest.load(cache), config.latent
    is_online = latent.source == "online" and online is not None
    rows = online("train") if is_online else LatentRows.open(cache, "train")
    valid = LatentRows.open(cache, "valid") if manifest.spec.rows.get("valid") else None
    folder, recipe = out / "flow", RECIPES[config.meanflow.recipe]
    enter = row_whitening(rows, folder, manifest.fingerprint, world) if recipe.whiten_rows else None
    identity = {"cache": manifest.fingerprint}
    task = FlowTask(config, rows, valid, identity, enter, verb)
    tasks: list[tuple[FlowTask, Path]] = [(task, folder)]
    if config.meanflow.direction != "align" and recipe.identity == 0:
        teacher = _release(folder, config.meanflow.train.steps)
        tasks.append((DistilTask(config, rows, valid, identity, enter, verb, teacher), folder / "student"))
    trained = False
    for each, place in tasks:
        if find_finished(each, place, resume) is not None:
            continue
        result = train(each, place, world, resume=resume, show=show)
        if not result.finished:
            return Aligned(folder, None, result)
        trained = True
    finished = None if trained else _finished(folder, config, manifest)
    if finished is None and world.is_main:
        finish(config, rows, folder, enter, manifest.fingerprint, world.device, show)
    world.barrier()
    flow = Flow.load(folder, world.device)
    kind = None
    if config.meanflow.direction != "draw" and latent.source == "cache":
        kind = store_latents(config, cache, manifest, flow, folder, world, show, online)
    return Aligned(folder, kind, skipped=finished is not None)


def row_whitening(rows: Rows, folder: Path, cache: str, world: World) -> Affine:
    """The map that whitens all G D numbers of a row together, fitted by rank 0 on the rows the flow learns from."""
    path = folder / "enter.safetensors"
    if world.is_main and not (path.is_file() and _cache_of(path) == cache):
        learnable = len(rows) - calibration_rows(len(rows))
        fitted = Affine.whitening(RowMoments.of(batches_of(rows, fit_indices(learnable, 4 * FIT_ROWS)), "embeddings"))
        folder.mkdir(parents=True, exist_ok=True)
        save_atomically({"matrix": fitted.matrix, "offset_K": fitted.offset_K}, path, {"cache": cache})
    world.barrier()
    tensors = load_file(path)
    return Affine(tensors["matrix"], tensors["offset_K"])


def finish(
    config: Config, rows: Rows, folder: Path, enter: Affine | None, cache: str, device: torch.device, show: Show
) -> None:
    """Put the trained networks together, mend the moments of what they make, and save the flow."""
    meanflow, recipe = config.meanflow, RECIPES[config.meanflow.recipe]
    shape = meanflow.model
    settings = FlowSettings(
        recipe=meanflow.recipe, groups=rows.groups, dim=rows.dim, layers=shape.layers, width=shape.width,
        heads=shape.heads, mlp_ratio=shape.mlp_ratio, transport_steps=transport_steps(meanflow),
        draw_steps=meanflow.draw_steps, cache=cache, step=meanflow.train.steps,
    )  # fmt: skip
    net = flows.build_net(settings, load_file(_release(folder, meanflow.train.steps)))
    assert net is not None
    flow = Flow(settings, net.to(device).eval())
    if enter is not None:
        flow.maps["enter"] = Affine(enter.matrix.to(device), enter.offset_K.to(device))
    if meanflow.direction != "align" and recipe.identity == 0:
        student = flows.build_net(settings, load_file(_release(folder / "student", meanflow.distil_steps)))
        assert student is not None
        flow.student = student.to(device).eval()
    if recipe.whiten_rows:
        unseen = calibration_rows(len(rows))
        learnable = len(rows) - unseen
        seen = fit_indices(learnable, FIT_ROWS)
        if meanflow.direction != "draw":
            show(f"align: z_0 of {len(seen):,} rows in {settings.transport_steps} steps, to mend its moments")
            moments = RowMoments.of(flow.to_latent(e, mend=False).cpu() for e in batches_of(rows, seen))
            leave = Affine.whitening(moments)
            # The flow knows the rows it was trained on and maps new ones a little too far out.
            flow.maps["leave"] = leave
            if unseen > rows.groups * rows.dim // 8:
                new = np.arange(learnable, len(rows))
                squares = [float(flow.to_latent(e).square().mean()) * len(e) for e in batches_of(rows, new)]
                flow.maps["leave"] = leave.scaled((sum(squares) / unseen) ** -0.5)
        if flow.student is not None:
            assert enter is not None
            for steps in (1, 2, 4, 16):
                noise = flow.noise(len(seen), seed=1 << 40)
                made = RowMoments.of(
                    enter.apply(flow.to_embedding(part, steps, mend=False).cpu()) for part in noise.split(8192)
                )
                true = RowMoments.of(enter.apply(e) for e in batches_of(rows, seen))
                flow.maps[f"draw-{steps}"] = Affine.matching(made, true)
    flow.save(folder)


def store_latents(
    config: Config, cache: Path, manifest: ArrayManifest, flow: Flow, folder: Path, world: World, show: Show,
    online: Callable[[Split], Rows] | None = None,
) -> str:  # fmt: skip
    """Write z_0 of every row beside the embeddings, part by part; returns the array's kind.

    Where all embeddings are stored z_0 keeps D_z dimensions; where only z_0 is, it is stored as stage II sees it.
    """
    latent = config.latent
    alone = latent.store == "z0"
    identity = flows.fingerprint(folder)
    kind = f"z0-{identity[:12]}"
    project = latent.project if alone else None
    P = projection(flow.settings.dim, project, config.seed) if project else None
    facts = {**manifest.facts, "flow": identity, "project": project, "seed": config.seed}
    dim = project or flow.settings.dim
    scale = [INT8_REACH / 127] * dim if latent.dtype == "int8" else None
    stored = manifest.split_rows if alone else manifest.spec.rows
    spec = ArraySpec(kind=kind, rows=stored, groups=flow.settings.groups, dim=dim, dtype=latent.dtype, scale=scale)
    content = fingerprint(facts)
    path = ArrayManifest.path(cache, kind)
    if path.exists() and ArrayManifest.load(cache, kind).fingerprint == content:
        return kind
    world.barrier()
    writers = [RowsWriter(cache, split, spec) for split, count in spec.rows.items() if count]
    if world.is_main:
        path.unlink(missing_ok=True)
        for writer in writers:
            writer.create(content)
    world.barrier()
    bar = RowProgress("transporting", world.is_main, show)
    left = sum(
        after - first for writer in writers for first, after in map(writer.span, writer.todo(world.rank, world.size))
    )
    with bar.over(left):
        for writer in writers:
            split: Split = "train" if writer.split == "train" else "valid"
            source = online(split) if alone and online is not None else LatentRows.open(cache, split)
            for part in writer.todo(world.rank, world.size):
                first, after = writer.span(part)
                z = flow.to_latent(torch.from_numpy(source.take(np.arange(first, after))))
                if not torch.isfinite(z).all():
                    raise DataError(f"z_0 of rows {first} to {after - 1} is not finite; train the flow again")
                z = z @ P.T.to(z) if P is not None else z
                writer.write(part, *spec.pack(z.cpu().numpy()))
                bar.move(after - first)
    world.barrier()
    if world.is_main:
        clipped = sum(writer.clipped() for writer in writers)
        figures = {"clipped share": clipped / sum(spec.rows[w.split] * spec.groups * dim for w in writers)}
        ArrayManifest(
            fingerprint=content, facts=facts, spec=spec, split_rows=manifest.split_rows, figures=figures
        ).save(cache)
        for writer in writers:
            writer.clear()
    world.barrier()
    return kind


def _release(folder: Path, steps: int) -> Path:
    """The weights of the checkpoint at the last step."""
    last = [path for path in list_checkpoints(folder) if step_of(path) >= steps]
    return (last[-1] if last else folder / "checkpoints" / f"step-{steps:08d}") / "model" / "flow.safetensors"


def _finished(folder: Path, config: Config, manifest: ArrayManifest) -> Flow | None:
    """The finished flow, if it is the one these settings ask for."""
    if not (folder / "flow.json").is_file():
        return None
    flow = Flow.load(folder)
    wanted = (transport_steps(config.meanflow), config.meanflow.draw_steps, manifest.fingerprint)
    has = (flow.settings.transport_steps, flow.settings.draw_steps, flow.settings.cache)
    needs_student = config.meanflow.direction != "align" and RECIPES[config.meanflow.recipe].identity == 0
    needs_latent = config.meanflow.direction != "draw" and RECIPES[config.meanflow.recipe].whiten_rows
    whole = (flow.student is not None or not needs_student) and ("leave" in flow.maps or not needs_latent)
    return flow if has == wanted and whole else None


def _cache_of(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("cache")
