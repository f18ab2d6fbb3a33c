"""Texts to score: drawn by a model and kept with the run, real ones of its held-out rows, or those of a file.

What a model wrote lies in RUN/eval/gen-samples/NAME.jsonl, one {"text": ..., "tokens": [...]} a line, with NAME.json
beside it: the settings, the weights they were drawn with and the seconds it took. The same request is not drawn again.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmdm.data.files import corpus_files, file_parts
from rmdm.data.prepare import shard_dir
from rmdm.data.shards import TokenRows, read_json, write_json
from rmdm.errors import ConfigError, DataError, RMDMError
from rmdm.hub import device_name
from rmdm.model import Model
from rmdm.request import Request
from rmdm.samplers.settings import CONFIDENCE

FOLDER = "gen-samples"


@dataclass(frozen=True)
class Samples:
    """Some texts, and how they came about."""

    texts: list[str]
    tokens: list[NDArray[np.int64]]
    """The model's own tokens of each row; none for texts of a file."""
    settings: dict[str, Any]
    """What they were drawn with; see `Generation.settings`."""
    seconds: float | None = None
    file: Path | None = None
    hardware: str | None = None
    """What they were drawn on."""
    kept: bool = False
    """Whether they were drawn before."""


def check_steps(model: Model, request: Request) -> None:
    """Raise `ConfigError` where a sampler of the model cannot use so many steps, or does not fit it."""
    settings, length = model.settings(request), model.backbone.length
    settings.check(model.backbone)
    if settings.sampler in CONFIDENCE and settings.remask == 0 and settings.steps > length:
        raise ConfigError(
            f"--steps {settings.steps} is above {model.config.name}'s length of {length} tokens, and "
            f"{settings.sampler} writes one token or more a step; use at most {length}, --remask or another sampler"
        )


def draw(model: Model, request: Request, run: Path, facts: dict[str, Any]) -> Samples:
    """Texts of a request, drawn now or kept from before; `facts` tell one state of the model from another."""
    request.check()
    check_steps(model, request)
    settings = vars(model.settings(request))
    tau = request.latent_temperature
    tau = model.config.sample.latent_temperature if tau is None and model.backbone.latent is not None else tau
    how = {name: facts[name] for name in ("precision", "device")}
    asked = {**settings, "tau": tau, "seed": request.seed, "n": request.n, **how}
    file = run / "eval" / FOLDER / f"{_name(asked)}.jsonl"
    asked |= facts
    found = _kept(file, asked)
    if found is not None:
        return found
    done = model.write(request)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").unlink(missing_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as out:
        for text, row in zip(done.texts, done.tokens.tolist(), strict=True):
            out.write(json.dumps({"text": text, "tokens": row}, ensure_ascii=False) + "\n")
    os.replace(temporary, file)
    drawn = {"settings": done.settings, "seconds": done.seconds, "hardware": device_name(model.device)}
    write_json(file.with_suffix(".json"), {"arm": model.config.name, "asked": asked, **drawn})
    return Samples(done.texts, list(done.tokens), file=file, **drawn)


def _name(asked: dict[str, Any]) -> str:
    """A file name that people can read and no other settings share."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    return f"{asked['sampler']}-{asked['steps']}-temperature-{asked['temperature']:g}-{digest}"


def _kept(file: Path, asked: dict[str, Any]) -> Samples | None:
    """What was drawn before for the same; None where there is none, or it is damaged."""
    try:
        facts = read_json(file.with_suffix(".json"))
        if facts["asked"] != asked:
            return None
        with open(file, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        if len(rows) != asked["n"]:
            return None
        tokens = [np.array(row["tokens"], dtype=np.int64) for row in rows]
        drawn = {key: facts[key] for key in ("settings", "seconds", "hardware")}
        return Samples([row["text"] for row in rows], tokens, file=file, kept=True, **drawn)
    except (OSError, DataError, KeyError, TypeError, ValueError):
        return None


def corpus_facts(model: Model) -> dict[str, Any] | None:
    """What tells the model's corpus from others; None where it is not at hand."""
    try:
        manifest = TokenRows.open(shard_dir(model.config.data), "train").manifest
    except RMDMError:
        return None
    rows = {name: counts.rows for name, counts in manifest.splits.items()}
    return {"source": manifest.source, "tokenizer": manifest.tokenizer["fingerprint"], "rows": rows}


def held_out(model: Model, n: int, show: Callable[[str], None]) -> tuple[Samples | None, Samples | None]:
    """Two sets of real rows, at most n each, evenly spaced over the two halves of the held-out split.

    Neighbouring rows are often of one document, so that halves are more independent than rows in turn.
    """
    try:
        rows = TokenRows.open(shard_dir(model.config.data), "valid")
    except RMDMError as error:  # a model that was moved away from its corpus can still be scored
        show(f"gen: no held-out text to compare with ({error})")
        return None, None
    half = len(rows) // 2
    if half < 1:
        show(f"gen: {rows.folder} holds out 1 row, too few to compare with")
        return None, None
    return _rows(model, rows, 0, half, n), _rows(model, rows, half, half, n)


def _rows(model: Model, rows: TokenRows, first: int, count: int, n: int) -> Samples:
    chosen = first + np.unique(np.linspace(0, count - 1, min(n, count)).astype(np.int64))
    x_NL = rows.take(chosen)
    lengths_N = rows.lengths(chosen)
    tokens = [row[:stop] for row, stop in zip(x_NL, lengths_N, strict=True)]
    return Samples(model.texts(x_NL), tokens, {})


def read_texts(path: str, flag: str = "--samples") -> Samples:
    """Texts of a file, folder or glob (.jsonl with a field `text`, .txt by line, .csv, .parquet), none blank."""
    blocks = (block for part in file_parts(corpus_files(path), "text", "line") for block in part.blocks())
    try:
        texts = [text for block in blocks for text in block.documents()]
    except DataError as error:
        raise DataError(re.sub(r"; set data\.column.*", "; call the field with the text 'text'", str(error))) from None
    if not texts:
        raise DataError(f'{flag} {path} holds no texts; give one JSON object such as {{"text": "..."}} a line')
    return Samples(texts, [], {})


def first_document(x_NL: Sequence[NDArray[np.int64]], separator_id: int) -> list[NDArray[np.int64]]:
    """Rows up to and without the first separator: what a padded row says."""
    cut = []
    for row in x_NL:
        at = np.flatnonzero(row == separator_id)
        cut.append(row[: at[0]] if len(at) else row)
    return cut
