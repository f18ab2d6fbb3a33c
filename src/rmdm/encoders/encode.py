"""Token shards to a cache of whitened embeddings: by any number of ranks, and again from where it stopped.

First the rows the PCA is fitted on are encoded, then the rest; what the first pass found is not encoded twice. Work is
cut in parts that do not depend on the number of ranks, and a part always runs in the same batches, so that ranks and
restarts give the same bytes. Only rank 0 merges, fits and writes the manifest.
"""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rmdm.config import Config
from rmdm.data.progress import RowProgress
from rmdm.data.shards import Manifest
from rmdm.data.writer import await_file, writing
from rmdm.encoders.cache import ArrayManifest, Facts, find_cache, fingerprint
from rmdm.encoders.encoder import Encoder
from rmdm.encoders.online import SPLITS
from rmdm.encoders.parts import CacheParts, human_bytes
from rmdm.errors import DataError
from rmdm.links import own_name
from rmdm.locks import locked


@dataclass(frozen=True)
class Encoded:
    """A cache that is ready to use."""

    dir: Path
    manifest: ArrayManifest
    skipped: bool
    """True when it had been made before."""


def config_facts(config: Config, shards: Manifest) -> Facts:
    """What decides the content of a cache, as far as settings and shards say; `find_cache` takes it."""
    latent = config.latent
    return {
        **({"encoder name": config.encoder.name} if config.encoder.name else {}),
        **({"precision": config.encoder.precision} if config.encoder.precision != "auto" else {}),
        **({"channels": config.encoder.channels} if config.encoder.channels else {}),
        "groups": latent.groups,
        "dim": latent.dim,
        "fit rows": min(latent.fit_rows, shards.splits["train"].rows),
        "store": "z0" if latent.source == "online" else latent.store,
        "dtype": latent.dtype,
        "tokenizer": shards.tokenizer["fingerprint"],
        "source": shards.source["train"],
        "validation source": shards.source["valid"],
        "layout": shards.layout,
        "length": shards.length,
        "wrap": shards.wrap,
        **{f"{split} rows": shards.splits[split].rows for split in SPLITS},
    }


def cache_facts(config: Config, shards: Manifest, encoder: Encoder) -> Facts:
    """What decides the content of a cache, the encoder's own fingerprint included."""
    own = {"encoder name": encoder.name, "encoder": encoder.fingerprint, "channels": encoder.dim}
    return {**config_facts(config, shards), **own, "precision": encoder.precision}


def made_in(config: Config, shards: Path) -> torch.dtype | None:
    """The precision of finished embeddings, where the settings leave it open: another machine's are as good."""
    if config.encoder.precision != "auto":
        return None
    try:
        facts = ArrayManifest.load(find_cache(shards, config_facts(config, Manifest.load(shards)))).facts
    except DataError:  # none, or several
        return None
    return torch.bfloat16 if facts["precision"] == "bf16" else torch.float32


def cache_dir(shards: Path, facts: Facts) -> Path:
    """The folder of a cache: beside the shards, named after everything that decides its content."""
    return Path(shards) / f"latents-{fingerprint(facts)[:12]}"


def encode(
    config: Config,
    shards: Path,
    encoder: Encoder,
    *,
    folder: Path | None = None,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    progress: bool = True,
    log: Callable[[str], None] = print,
) -> Encoded:
    """Encode the corpus unless that is done, and return where the cache lies.

    Every rank calls this; rank r encodes parts r, r + world, ... and all meet at `barrier` five times, or once when
    there is nothing to do. A `folder` that is named and holds a cache made otherwise is never used and never
    overwritten: that is a DataError. Where another process makes the same cache, this waits for it.
    """
    shards = Path(shards)
    facts = cache_facts(config, Manifest.load(shards), encoder)
    parts = CacheParts(config, shards, encoder, facts, Path(folder) if folder is not None else cache_dir(shards, facts))
    finished = ArrayManifest.path(parts.folder, "e")
    show = log if progress and rank == 0 else _silent
    with contextlib.ExitStack() as held:
        if rank == 0:
            if not finished.exists():
                held.enter_context(_alone(parts.folder, show))
            if not finished.exists():  # else another process made it meanwhile
                parts.begin(show)
            barrier()
        else:
            barrier()  # rank 0 goes first: it lays down the files, and finds what is wrong with the settings
            await_file(finished, parts.folder / "plan.json")
        if finished.exists():
            manifest = parts.finished()
            if rank == 0:
                parts.clear()
                if manifest.facts["encoder name"] != encoder.name:  # `find_cache` goes by the name it has now
                    manifest = replace(manifest, facts=facts)
                    manifest.save(parts.folder)
            show(_summary(parts.folder, manifest, "made before"))
            return Encoded(parts.folder, manifest, True)
        began, rows = time.monotonic(), parts.left(0, 1)
        bar = RowProgress("encoding", progress and rank == 0, log)
        with bar.over(parts.left(rank, world)):
            parts.encode_fit_rows(rank, world, bar)
            barrier()
            if rank == 0:
                parts.fit()
            barrier()
            parts.encode_rest(rank, world, bar)
        barrier()
        if rank == 0:
            parts.finish()
        barrier()
    await_file(finished)
    manifest = parts.finished()
    rate = rows / max(time.monotonic() - began, 1e-9)
    show(_summary(parts.folder, manifest, f"{rows:,} rows encoded at {rate:,.0f} rows/s"))
    return Encoded(parts.folder, manifest, False)


def _summary(folder: Path, manifest: ArrayManifest, how: str) -> str:
    spec, figures = manifest.spec, manifest.figures
    rows = ", ".join(f"{count:,} {split}" for split, count in spec.rows.items() if count)
    clipped = f", {100 * figures['clipped share']:.3f}% of the numbers clipped" if spec.dtype == "int8" else ""
    return (
        f"encode: {folder}: {rows} rows of {spec.groups} x {spec.dim} as {spec.dtype} "
        f"({human_bytes(sum(map(spec.nbytes, spec.rows)))}), {100 * figures['variance kept']:.1f}% of the variance "
        f"kept{clipped}; {how}"
    )


@contextlib.contextmanager
def _alone(folder: Path, show: Callable[[str], None]) -> Generator[None]:
    """Hold the folder; wait for another process that makes the same cache, which may be all there is to do."""
    with writing(folder, "latents"):
        folder.mkdir(parents=True, exist_ok=True)
    whole = own_name(folder)
    place = whole.with_name(f".{whole.name}.lock")  # beside the folder, whose files are counted
    with locked(place, lambda who: show(f"{folder} is being made by another process ({who}); waiting for it")):
        yield


def _silent(_: str) -> None:
    pass
