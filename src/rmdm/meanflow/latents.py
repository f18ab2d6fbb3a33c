"""`rmdm latents`: how Gaussian z_0 of held-out rows is, how close draws come to held-out e, and pictures of both.

<run>/latents/   report.txt, report.json, umap.png, qq.png
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmdm.backbone.latent import projection
from rmdm.config import Config
from rmdm.data.prepare import shard_dir
from rmdm.data.shards import write_json
from rmdm.encoders.cache import ArrayManifest, LatentRows, fit_indices
from rmdm.encoders.whitening import Whitening
from rmdm.errors import ConfigError, DataError
from rmdm.meanflow import plots, report
from rmdm.meanflow.compare import Draws, compare_draws
from rmdm.meanflow.flow import DRAW_STEPS, Flow, fingerprint
from rmdm.meanflow.gaussianity import Gaussianity, normal
from rmdm.presets import load_config

ROWS = 16_384
"""Held-out rows the figures are taken from; the classifier is trained on as many others."""
PICTURE_ROWS = 4000
Show = Callable[[str], None]


def measure_latents(
    runs: Sequence[Path],
    device: torch.device,
    show: Show,
    *,
    rows: int = ROWS,
    draws: bool = True,
    pictures: bool = True,
) -> dict[str, Any]:
    """Print and save the report of the first run, with the z_0 of the others beside it in the same table."""
    run = runs[0]
    config, cache = open_run(run)
    valid = LatentRows.open(cache, "valid")
    held = torch.from_numpy(valid.take(fit_indices(len(valid), 2 * rows))).to(device)
    half = len(held) // 2
    # Rows of a document lie together: the classifier learns from the first documents and is tested on the last.
    e_train, e_test = held[:half], held[half:]
    tables: dict[str, Gaussianity] = {report.WHITENED_ROW: report.measure(e_test, train_NGD=e_train)}
    z_test = None
    gated = ""
    for other in runs:
        flow = Flow.load(other / "flow", device)
        beside, other_cache = (config, cache) if other == run else open_run(other)
        if other_cache != cache:
            raise DataError(
                f"{other} was trained on other embeddings than {run} ({other_cache}, {cache}); compare alike"
            )
        if beside.meanflow.direction == "draw":
            continue
        name = row_name(flow, other, runs)
        latent = beside.latent
        P = projection(flow.settings.dim, latent.project, beside.seed).float() if latent.project else None
        z = flow.to_latent(e_test)
        tables[name] = report.measure(z, e_test, train_NGD=flow.to_latent(e_train), projection_dD=P, sigma=latent.sigma)
        if z_test is None:
            z_test, gated = z, name
    tables[report.FLOOR_ROW] = report.measure(
        normal(tuple(e_test.shape), 1, device), train_NGD=normal(tuple(e_train.shape), 2, device)
    )
    if not gated and not draws:
        raise ConfigError(f"{run} has no z_0, and --quick leaves out its draws, so nothing is left; leave out --quick")
    text = [report.render(tables, gated)] if gated else []
    result: dict[str, Any] = {"rows": half, "latents": {name: report.to_json(g) for name, g in tables.items()}}
    result["gated"], result["flow"] = gated or None, fingerprint(run / "flow")
    result["gate"] = [str(failure) for failure in report.gate(tables[gated])] if gated else []
    flow = Flow.load(run / "flow", device)
    if draws and can_draw(config, flow):
        drawn = measure_draws(flow, held, LatentRows.open(cache, "train"), device)
        text.append(report.render_draws(drawn))
        result["draws"] = {name: report.to_json(d) for name, d in drawn.items()}
    folder = run / "latents"
    folder.mkdir(parents=True, exist_ok=True)
    show("\n\n".join(text))
    (folder / "report.txt").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    write_json(folder / "report.json", result)
    result["folder"] = str(folder)
    if pictures and z_test is not None:
        result["figures"] = draw_pictures(e_test, z_test, Whitening.load(cache / "whitening.safetensors"), folder, show)
    return result


def row_name(flow: Flow, run: Path, runs: Sequence[Path]) -> str:
    """What a flow's z_0 is called in the table."""
    steps = flow.settings.transport_steps
    name = f"z_0 {flow.settings.recipe}, {steps} step{'s' * (steps != 1)}"
    return name if len(runs) == 1 else f"{name} ({run.name})"


def can_draw(config: Config, flow: Flow) -> bool:
    """Whether the flow can be followed from noise to e: a velocity can both ways, an average one as it was trained."""
    return flow.student is not None or config.meanflow.direction != "align"


def measure_draws(flow: Flow, held: Tensor, train: LatentRows, device: torch.device) -> dict[str, Draws]:
    """Draws in 1, 2, 4 and 16 evaluations, or as few-step draws were asked for, against held-out embeddings."""
    counts = DRAW_STEPS if flow.student is not None else (flow.settings.draw_steps,)
    known = train.take(fit_indices(len(train), min(300_000, (1 << 28) // (train.groups * train.dim))))
    return {str(steps): compare_draws(flow.draw(len(held), seed=0, steps=steps), held, known) for steps in counts}


def draw_pictures(e: Tensor, z: Tensor, whitening: Whitening, folder: Path, show: Show) -> list[str]:
    """UMAP of e and z_0 side by side [Paper Figure 3], and Q-Q plot; without the extra `plots`, a line that says so.

    UMAP and the topics see e at the scale the encoder gave its directions: whitened, all of them would weigh the same.
    """
    picked = torch.from_numpy(fit_indices(len(e), PICTURE_ROWS)).to(e.device)
    e_few, z_few = e[picked].cpu() * whitening.inverse_DK.norm(dim=0).float(), z[picked].cpu()
    try:
        qq = plots.figure_qq(z.cpu(), e.cpu(), folder / "qq.png")
        topics = plots.topic_clusters(e_few)
        umap = plots.figure_umap(e_few, z_few, topics, folder / "umap.png")
    except ConfigError as error:
        show(f"no pictures: {error}")
        return []
    right, most = topics_told(z_few, torch.from_numpy(topics))
    show(f"topics: a linear map tells them from z_0 for {right:.0%} of the rows (the largest is {most:.0%})")
    show(f"pictures: {umap}, {qq}")
    return [str(umap), str(qq)]


def topics_told(z_NGD: Tensor, topic_N: Tensor) -> tuple[float, float]:
    """Share of the second half of the rows whose topic a linear map fitted on the first names; share of the largest.

    In a latent that is Gaussian all directions weigh the same, so UMAP need not show what is there to be read.
    """
    z_NA = torch.cat((z_NGD.flatten(1).double(), torch.ones(len(z_NGD), 1).double()), dim=1)
    y_NT = torch.nn.functional.one_hot(topic_N).double()
    half = len(z_NA) // 2
    gram = z_NA[:half].T @ z_NA[:half] + 0.1 * half * torch.eye(z_NA.shape[1]).double()
    weight = torch.linalg.solve(gram, z_NA[:half].T @ y_NT[:half])
    told_N, true_N = (z_NA[half:] @ weight).argmax(1), topic_N[half:]
    return float((told_N == true_N).double().mean()), float(y_NT[half:].mean(0).max())


def open_run(run: Path) -> tuple[Config, Path]:
    """The config of an aligned run and the cache of its embeddings."""
    if not (run / "flow" / "flow.json").is_file():
        raise DataError(f"{run} holds no finished flow; train one with 'rmdm align PRESET --out {run}'")
    config = load_config(run / "flow")
    made_from = Flow.load(run / "flow").settings.cache
    for path in sorted(shard_dir(config.data).glob("latents-*/manifest.json")):
        if ArrayManifest.load(path.parent).fingerprint == made_from:
            return config, path.parent
    folder = shard_dir(config.data)
    raise DataError(
        f"{run} was trained on embeddings that {folder} does not hold; restore them, or align again with another --out"
    )


def gate_warnings(run: Path) -> list[str]:
    """What the last report on a run's latents found wrong, or that there is none on the flow it has now."""
    try:
        result = json.loads((run / "latents" / "report.json").read_text(encoding="utf-8"))
        if result["flow"] == fingerprint(run / "flow"):
            return [str(line) for line in result["gate"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return [f"how Gaussian they are was not measured; 'rmdm latents {run}' does it"]
