"""What stage II reads of stage I: the latent of every row, from the cache or made on the fly."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rmdm.config import Config, LatentConfig
from rmdm.data.shards import Manifest, Split, read_json
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.cache import ArrayManifest, LatentRows
from rmdm.encoders.find import open_encoder
from rmdm.encoders.online import OnlineLatents
from rmdm.encoders.whitening import Whitening
from rmdm.errors import ConfigError, DataError
from rmdm.meanflow.flow import Flow, fingerprint
from rmdm.meanflow.latents import can_draw, open_run
from rmdm.meanflow.tasks import Rows

BY_FLOW = re.compile(r"[0-9a-f]{16} (e|online)")
"""How checkpoints named embeddings at first: by the flow that draws them, which training does not see."""


@dataclass(frozen=True)
class StageOne:
    """What a finished stage I gives to stage II."""

    flow: Path
    """Folder of the flow."""
    cache: Path
    """Folder of the embeddings' cache, which holds the whitening too."""
    train: Rows
    valid: Rows | None
    identity: dict[str, Any]
    """What tells these latents from others."""


class OnlineZ0:
    """z_0 of rows, encoded and transported as they are taken: the paper's uncached way."""

    def __init__(self, rows: OnlineLatents, flow: Flow) -> None:
        self.rows, self.flow, self.groups, self.dim = rows, flow, rows.groups, rows.dim

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.integer]) -> NDArray[np.float32]:
        """z_0 by row number, (n, G, D)."""
        return self.flow.to_latent(torch.from_numpy(self.rows.take(indices))).cpu().numpy()


def open_stage_one(config: Config, run: Path, shards: Path, tokenizer: Tokenizer, device: torch.device) -> StageOne:
    """The latents that a run's stage II is trained on: e where it draws by the flow, else z_0."""
    made_by, cache = open_run(run)
    manifest, latent = ArrayManifest.load(cache), config.latent
    if (latent.groups, latent.dim) != (manifest.spec.groups, manifest.spec.dim):
        raise ConfigError(
            f"latent.groups={latent.groups}, latent.dim={latent.dim}, but {run} has {manifest.spec.groups} groups of "
            f"{manifest.spec.dim}; use those, or another run's stage I"
        )
    if latent.draw == "flow" and not can_draw(made_by, Flow.load(run / "flow")):
        raise ConfigError(
            f"latent.draw=flow, but {run} has no flow from noise to e; align with meanflow.direction=both"
        )
    if cache.parent.resolve() != shards.resolve() and Manifest.load(cache.parent) != Manifest.load(shards):
        raise DataError(f"{run} has latents of the rows in {cache.parent}, not of those in {shards}; align these")
    open_rows: Callable[[Split], Rows]
    if latent.source == "online":
        encoder = open_encoder(config.encoder, tokenizer, config.data.length, device)
        whitening = Whitening.load(cache / "whitening.safetensors")
        flow = Flow.load(run / "flow", device)

        def open_rows(split: Split) -> Rows:
            rows = OnlineLatents.open(config, shards, split, encoder, whitening)
            return rows if latent.draw == "flow" else OnlineZ0(rows, flow)

        kind, counts = "online", manifest.split_rows
    else:
        kind = "e" if latent.draw == "flow" else find_latents(cache, run / "flow", config)
        counts = ArrayManifest.load(cache, kind).spec.rows

        def open_rows(split: Split) -> Rows:
            return LatentRows.open(cache, split, kind)

    valid = open_rows("valid") if counts.get("valid") else None
    by_flow = latent.draw == "flow"
    name = name_embeddings(manifest.fingerprint) if by_flow else f"{fingerprint(run / 'flow')[:16]} {kind}"
    return StageOne(run / "flow", cache, open_rows("train"), valid, {"latent": name})


def name_embeddings(cache: str) -> str:
    """What tells embeddings from others, by the fingerprint of their cache: encoder, whitening and rows."""
    return f"e {cache[:16]}"


def is_named_by_flow(name: Any) -> bool:
    """Whether a checkpoint names its embeddings by the flow that draws them."""
    return isinstance(name, str) and BY_FLOW.fullmatch(name) is not None


def released_embeddings(release: Path) -> str | None:
    """Fingerprint of the embeddings that the flow beside a release's weights was trained on; None if it has none."""
    try:
        cache = read_json(release / "flow" / "flow.json").get("cache")
    except (DataError, OSError):
        return None
    return cache if isinstance(cache, str) else None


def stored_projection(latent: LatentConfig) -> int | None:
    """The numbers z_0 is projected to before it is stored; None where it is stored as it is, or stage II keeps all."""
    return latent.project if latent.store == "z0" and latent.project != latent.dim else None


def find_latents(cache: Path, flow: Path, config: Config) -> str:
    """The kind of the array that holds z_0 of this flow."""
    latent, made_by = config.latent, fingerprint(flow)
    project = stored_projection(latent)
    for path in sorted(cache.glob("manifest-z0-*.json")):
        kind = path.stem.removeprefix("manifest-")
        facts = ArrayManifest.load(cache, kind).facts
        if (facts["flow"], facts["project"], facts["dtype"]) == (made_by, project, latent.dtype):
            if project is not None and facts["seed"] != config.seed:
                raise ConfigError(
                    f"seed={config.seed}, but {cache / kind} was projected with seed {facts['seed']}; use that seed"
                )
            return kind
    raise DataError(f"{cache} has no z_0 of the flow in {flow}; run 'rmdm align' with meanflow.direction align or both")
