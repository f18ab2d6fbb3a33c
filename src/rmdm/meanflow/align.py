"""Stage I from a cache of embeddings to a finished flow and a cache of z_0.

<run>/flow/   checkpoints/, metrics.jsonl, config.yaml    of the flow
              guide/...                                   the same of its weaker copy, if one is trained
              student/...                                 the same of the few-step network, if one is trained
              enter.safetensors                           the whitening of whole rows
              flow.safetensors, flow.json                 the finished flow
<cache>/      train.z0-<flow>, valid.z0-<flow>, manifest-z0-<flow>.json
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rmdm.backbone.latent import projection
from rmdm.config import Config, MeanFlowConfig
from rmdm.data.progress import RowProgress
from rmdm.data.shards import Split, read_json
from rmdm.encoders.cache import ArrayManifest, ArraySpec, Facts, LatentRows, RowsWriter, fingerprint, fit_indices
from rmdm.encoders.parts import human_bytes
from rmdm.encoders.whitening import save_atomically
from rmdm.errors import CheckpointError, ConfigError, DataError
from rmdm.locks import locked
from rmdm.meanflow import flow as flows
from rmdm.meanflow.affine import Affine, RowMoments
from rmdm.meanflow.distil import STATES, trajectories
from rmdm.meanflow.flow import DRAW_STEPS, Flow, FlowSettings
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.radial import Radial
from rmdm.meanflow.recipes import RECIPES, transport_steps
from rmdm.meanflow.rows import stored_projection
from rmdm.meanflow.tasks import DistilTask, FlowTask, GuideTask, Rows, batches_of, calibration_rows
from rmdm.meanflow.transport import guided
from rmdm.presets import load_config, save_config
from rmdm.training.checkpoint import list_checkpoints, step_dir, step_of, steps_beyond
from rmdm.training.distributed import World
from rmdm.training.loop import Result, train
from rmdm.training.resume import check_same_data, find_finished, find_resume, flatten

Show = Callable[[str], None]
FIT_ROWS = 65_536
"""Rows the moments of z_0 are taken from, and the most draws those of draws are."""
DRAWN_ROWS = 16_384
"""The fewest draws their moments are taken from."""
NOISE_SEED = 1 << 40
"""Seed of the noise the student learns from; the next one's draws fit the maps that mend its moments."""
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
    identity = {"cache": manifest.fingerprint}
    task = FlowTask(config, rows, valid, identity, None, verb)
    # A checkpoint that is named belongs to one of the networks; the others go on by themselves.
    named = Path(resume).parent.parent.name if resume not in ("auto", "never") else None
    others = resume if named is None else "auto"
    of_guide, of_student = (resume if named == kind else others for kind in ("guide", "student"))
    of_flow = others if named in ("guide", "student") else resume
    start = find_resume(task, folder, of_flow)  # refuses the folder of another run before anything is written there
    refuse_longer(task, folder)
    trained = not is_trained(task, folder, of_flow)
    finished = None if trained else _finished(folder, config, manifest)
    if finished is None:
        refuse_used(config, out)
    world.barrier()
    enter = row_whitening(rows, folder, manifest.fingerprint, world) if recipe.whiten_rows else None
    task.enter = enter
    if trained:
        if world.is_main and (start is None or step_of(start) < task.settings.steps):
            (folder / "flow.json").unlink(missing_ok=True)  # a kill on the way must not let the old flow pass for new
        result = train(task, folder, world, resume=of_flow, show=show)
        if not result.finished:
            return Aligned(folder, None, result)
    if finished is None and needs_guide(config):
        guide = GuideTask(task)
        drop_longer(guide, folder / "guide", "meanflow.guide_steps", of_guide, world, show)
        if not is_trained(guide, folder / "guide", of_guide):
            result = train(guide, folder / "guide", world, resume=of_guide, show=show)
            if not result.finished:
                return Aligned(folder, None, result)
    if finished is None and needs_student(config):
        stopped = train_student(config, folder, rows.groups, rows.dim, world, of_student, show, verb)
        if stopped is not None:
            return Aligned(folder, None, stopped)
    if finished is None and world.is_main:
        finish(config, rows, folder, enter, manifest.fingerprint, world.device, show)
    world.barrier()
    flow = Flow.load(folder, world.device)
    kind = None
    if config.meanflow.direction != "draw" and latent.source == "cache":
        kind = store_latents(config, cache, manifest, flow, folder, world, show, online)
    return Aligned(folder, kind, skipped=finished is not None)


def is_trained(task: FlowTask, folder: Path, resume: str) -> bool:
    """Whether a checkpoint of just the steps that are asked for is there; one that is damaged is refused."""
    newest = find_finished(task, folder, resume)
    if newest is None:
        return False
    asked = step_dir(folder, task.settings.steps)
    if asked != newest:
        check_same_data(asked, task)
    return True


def refuse_longer(task: FlowTask, folder: Path) -> None:
    """Refuse a flow of fewer steps than it has been trained for: what it would have become is gone."""
    steps = task.settings.steps
    longer = steps_beyond(folder, steps, falls=falls(task.config.meanflow))
    if longer is not None:
        raise ConfigError(
            f"meanflow.train.steps={steps}, but the flow in {folder} is at step {longer[0]} of {longer[1]}; "
            f"ask for {longer[1]} or more, or use another --out"
        )


def flow_changes(flow: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """What a flow was made with and what is asked for, where they differ."""
    has, asked = flatten(load_config(flow).meanflow), flatten(config.meanflow)
    decides = [name for name in asked if not name.startswith("train.") or name == "train.steps"]
    return {name: (has[name], asked[name]) for name in decides if has[name] != asked[name]}


def falls(meanflow: MeanFlowConfig) -> bool:
    """Whether the learning rate depends on how many steps there will be."""
    return meanflow.optim.schedule != "constant"


def refuse_used(config: Config, out: Path) -> None:
    """Refuse to replace a flow whose z_0 a model was trained on, which could then neither go on nor go back."""
    flow = out / "flow"
    is_there = (flow / "flow.json").is_file() and (flow / "config.yaml").is_file() and list_checkpoints(out)
    if is_there and config.latent.draw == "prior":
        other = [f"meanflow.{name}={value} (it has {had})" for name, (had, value) in flow_changes(flow, config).items()]
        if other:
            raise ConfigError(
                f"{out} has a model trained on the z_0 of its flow, which is not to change: {', '.join(other)}; "
                "use another --out"
            )


def drop_longer(task: FlowTask, folder: Path, field: str, resume: str, world: World, show: Show) -> None:
    """Begin a network anew that has been trained for more steps than `field` asks for; it takes little to train."""
    longer = steps_beyond(folder, task.settings.steps, falls=falls(task.config.meanflow)) if resume == "auto" else None
    world.barrier()  # every rank has looked
    if longer is not None and world.is_main:
        show(
            f"align: {folder} is at step {longer[0]} of {longer[1]}, {field}={task.settings.steps} asks for fewer; "
            "trained afresh"
        )
        shutil.rmtree(folder / "checkpoints")
    world.barrier()


def follows_velocity(config: Config) -> bool:
    """Whether draws are made by following a velocity, which can be guided and distilled."""
    return config.meanflow.direction != "align" and RECIPES[config.meanflow.recipe].identity == 0


def needs_guide(config: Config) -> bool:
    """Whether draws are to be led away from a weaker copy of the flow."""
    return follows_velocity(config) and config.meanflow.guide_steps > 0


def needs_student(config: Config) -> bool:
    """Whether few-step draws are asked for that the flow itself does not make."""
    return follows_velocity(config) and config.meanflow.distil_steps > 0


def train_student(
    config: Config, folder: Path, groups: int, dim: int, world: World, resume: str, show: Show, verb: str
) -> Result | None:
    """Follow the flow from noise many times, and teach a network to do the same in few steps.

    Returns the training run if a signal stopped it.
    """
    meanflow, teacher = config.meanflow, _release(folder, config.meanflow.train.steps)
    weaker = _release(folder / "guide", meanflow.guide_steps) if needs_guide(config) else None
    identity = {"teacher": _digest(teacher), "draws": meanflow.distil_rows}
    if weaker is not None:
        identity |= {"guide": _digest(weaker), "guidance": meanflow.guidance}
    place, kind = folder / "student", "paths"
    if world.is_main and any(_data_of(path) != identity for path in list_checkpoints(place)):
        shutil.rmtree(place)  # the student of another teacher
    world.barrier()
    content = fingerprint(identity)
    spec = ArraySpec(
        kind=kind, rows={"train": config.meanflow.distil_rows}, groups=STATES * groups, dim=dim, dtype="fp16"
    )
    path = ArrayManifest.path(place, kind)
    if not (path.exists() and ArrayManifest.load(place, kind).fingerprint == content):
        net, guide = (_network(config, groups, dim, path, world.device) for path in (teacher, weaker))
        assert net is not None
        leads = guided(net, guide, meanflow.guidance)

        def states(split: str, first: int, after: int) -> torch.Tensor:
            with flows.fast_float32():
                noise = flows.noise(first, after, NOISE_SEED, groups, dim, world.device)
                chunks = noise.split(flows.chunk_rows(world.device, groups))
                return torch.cat([trajectories(leads, chunk) for chunk in chunks]).flatten(1, 2)

        size = human_bytes(spec.nbytes("train"))
        show(f"align: following the flow from {spec.rows['train']:,} draws of noise, {size} in {place}")
        write_rows(place, spec, identity, spec.rows, states, world, show, "following the flow")
    task = DistilTask(config, LatentRows.open(place, "train", kind), identity, verb, teacher)
    drop_longer(task, place, "meanflow.distil_steps", resume, world, show)
    if not is_trained(task, place, resume):
        result = train(task, place, world, resume=resume, show=show)
        if not result.finished:
            return result
    return None


def row_whitening(rows: Rows, folder: Path, cache: str, world: World) -> Affine:
    """The map that whitens all G D numbers of a row together, fitted by rank 0 on the rows the flow learns from."""
    path = folder / "enter.safetensors"
    if world.is_main and _cache_of(path) != cache:
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
    (folder / "flow.json").unlink(missing_ok=True)  # a kill on the way must not let the old flow pass for new
    save_config(config, folder)  # what was free since it was trained decides the flow too
    settings = FlowSettings(
        recipe=meanflow.recipe, groups=rows.groups, dim=rows.dim, layers=shape.layers, width=shape.width,
        heads=shape.heads, mlp_ratio=shape.mlp_ratio, transport_steps=transport_steps(meanflow),
        draw_steps=meanflow.draw_steps, cache=cache, step=meanflow.train.steps,
        distilled=[meanflow.distil_steps, meanflow.distil_rows] if needs_student(config) else None,
        guide=[meanflow.guide_steps, meanflow.guidance] if needs_guide(config) else None,
    )  # fmt: skip
    guide = _release(folder / "guide", meanflow.guide_steps) if needs_guide(config) else None
    student = _release(folder / "student", meanflow.distil_steps) if needs_student(config) else None
    weights = {"net": _release(folder, meanflow.train.steps), "guide": guide, "student": student}
    nets = {kind: _network(config, rows.groups, rows.dim, path, device) for kind, path in weights.items()}
    assert nets["net"] is not None
    flow = Flow(settings, nets["net"], student=nets["student"], guide=nets["guide"])
    if enter is not None:
        flow.maps["enter"] = Affine(enter.matrix.to(device), enter.offset_K.to(device))
    if recipe.whiten_rows:
        unseen = calibration_rows(len(rows))
        learnable = len(rows) - unseen
        seen = fit_indices(learnable, FIT_ROWS)
        if meanflow.direction != "draw":
            show(f"align: z_0 of {len(seen):,} rows in {settings.transport_steps} steps, to mend its moments")
            moments = RowMoments.of(flow.to_latent(e, mend=False).cpu() for e in batches_of(rows, seen))
            flow.maps["leave"] = Affine.whitening(moments)
            # Lengths from new rows: the flow maps those it was not trained on a little too far out.
            new = batches_of(rows, np.arange(learnable, len(rows)))
            lengths = [flow.to_latent(e).flatten(1).norm(dim=1).cpu() for e in new]
            flow.radial = Radial.fit(torch.cat(lengths), rows.groups * rows.dim) if lengths else None
        if meanflow.direction != "align":
            # In the space the network sees, training rows have mean 0 and unit covariance.
            fitted = min(FIT_ROWS, max(DRAWN_ROWS, 64 * rows.groups * rows.dim))
            for steps in sorted({*(DRAW_STEPS if flow.student is not None else ()), meanflow.draw_steps}):
                noise = flow.noise(fitted, seed=NOISE_SEED + 1).split(flow.chunk)
                made = RowMoments.of(flow.to_seen(part, steps).cpu() for part in noise)
                flow.maps[f"draw-{steps}"] = Affine.whitening(made)
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
    project = stored_projection(latent)
    P = projection(flow.settings.dim, project, config.seed) if project else None
    facts = {
        **manifest.facts, "flow": flows.fingerprint(folder), "project": project, "seed": config.seed,
        "dtype": latent.dtype,
    }  # fmt: skip
    kind = f"z0-{fingerprint(facts)[:12]}"
    dim = project or flow.settings.dim
    scale = [INT8_REACH / 127] * dim if latent.dtype == "int8" else None
    stored = manifest.split_rows if alone else manifest.spec.rows
    spec = ArraySpec(kind=kind, rows=stored, groups=flow.settings.groups, dim=dim, dtype=latent.dtype, scale=scale)
    opened: dict[str, Rows] = {}

    def latents(split: str, first: int, after: int) -> torch.Tensor:
        if split not in opened:
            name: Split = "train" if split == "train" else "valid"
            opened[split] = online(name) if alone and online is not None else LatentRows.open(cache, name)
        z = flow.to_latent(torch.from_numpy(opened[split].take(np.arange(first, after))))
        return z @ P.T.to(z) if P is not None else z

    def wait(who: str) -> None:
        show(f"align: z_0 is being written to {cache} by another process ({who}); waiting for it")

    with contextlib.ExitStack() as held:
        if world.is_main:
            held.enter_context(locked(cache / f".{kind}.lock", wait))
        world.barrier()
        with contextlib.suppress(DataError):  # missing, damaged or of another size: written again
            ArrayManifest.load(cache, kind).check_files(cache)
            return kind
        world.barrier()
        write_rows(cache, spec, facts, manifest.split_rows, latents, world, show, "transporting")
    return kind


def write_rows(
    folder: Path, spec: ArraySpec, facts: Facts, split_rows: dict[str, int],
    make: Callable[[str, int, int], torch.Tensor], world: World, show: Show, doing: str,
) -> None:  # fmt: skip
    """Write an array part by part with all ranks; `make(split, first, after)` computes some rows."""
    content = fingerprint(facts)
    writers = [RowsWriter(folder, split, spec) for split, count in spec.rows.items() if count]
    world.barrier()
    if world.is_main:
        ArrayManifest.path(folder, spec.kind).unlink(missing_ok=True)
        for writer in writers:
            writer.create(content)
    world.barrier()
    todo = [(writer, part) for writer in writers for part in writer.todo(world.rank, world.size)]
    spans = [writer.span(part) for writer, part in todo]
    bar = RowProgress(doing, world.is_main, show)
    with bar.over(sum(after - first for first, after in spans)):
        for (writer, part), (first, after) in zip(todo, spans, strict=True):
            values = make(writer.split, first, after)
            if not torch.isfinite(values).all():
                raise DataError(f"{spec.kind} of rows {first} to {after - 1} is not finite; train the flow again")
            writer.write(part, *spec.pack(values.float().cpu().numpy()))
            bar.move(after - first)
    world.barrier()
    if world.is_main:
        count = sum(spec.rows[writer.split] for writer in writers) * spec.groups * spec.dim
        figures = {"clipped share": sum(writer.clipped() for writer in writers) / count}
        ArrayManifest(fingerprint=content, facts=facts, spec=spec, split_rows=split_rows, figures=figures).save(folder)
        for writer in writers:
            writer.clear()
    world.barrier()


def _network(config: Config, groups: int, dim: int, weights: Path | None, device: torch.device) -> FlowNet | None:
    """A trained network, ready to use; None without weights."""
    if weights is None:
        return None
    net = FlowNet(config.meanflow.model, groups, dim)
    net.load_state_dict(load_file(weights))
    return net.to(device).eval()


def _release(folder: Path, steps: int) -> Path:
    """The weights of the checkpoint after just so many steps."""
    return step_dir(folder, steps) / "model" / "flow.safetensors"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _data_of(checkpoint: Path) -> Any:
    """What a checkpoint says it was trained on; None when it cannot be read."""
    try:
        return read_json(checkpoint / "meta.json").get("data")
    except (DataError, OSError):
        return None


def _finished(folder: Path, config: Config, manifest: ArrayManifest) -> Flow | None:
    """The finished flow, if it is the one these settings ask for."""
    try:
        flow = Flow.load(folder)
    except CheckpointError:  # missing or damaged: put together again from the checkpoints
        return None
    meanflow = config.meanflow
    had = flow.settings.distilled if meanflow.direction == "align" else None  # who draws nothing need not drop it
    distilled = [meanflow.distil_steps, meanflow.distil_rows] if needs_student(config) else had
    guide = [meanflow.guide_steps, meanflow.guidance] if needs_guide(config) else None
    wanted = (
        meanflow.train.steps, transport_steps(meanflow), meanflow.draw_steps, manifest.fingerprint, distilled, guide
    )  # fmt: skip
    own = flow.settings
    has = (own.step, own.transport_steps, own.draw_steps, own.cache, own.distilled, own.guide)
    # Flows were once recorded with the steps asked for where their networks had more.
    asked = {"guide": meanflow.guide_steps} if needs_guide(config) else {}
    asked |= {"student": meanflow.distil_steps} if needs_student(config) else {}
    longer = any(steps_beyond(folder / name, n, falls=falls(meanflow)) is not None for name, n in asked.items())
    maps = {"leave": meanflow.direction != "draw", f"draw-{meanflow.draw_steps}": meanflow.direction != "align"}
    needed = [name for name, is_needed in maps.items() if is_needed and RECIPES[meanflow.recipe].whiten_rows]
    whole = (flow.student is not None or not needs_student(config)) and set(needed) <= set(flow.maps)
    return flow if has == wanted and whole and not longer else None


def _cache_of(path: Path) -> Any:
    """The cache a map was fitted on; None for a file that is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("cache")
    except (OSError, SafetensorError):
        return None
