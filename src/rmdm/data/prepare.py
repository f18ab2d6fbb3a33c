"""Raw text to token shards: on all cores, by any number of ranks, and again from where it stopped.

Each part of the source becomes files of its own, so ranks share nothing while they work; rank 0 then writes a manifest
that joins them. A part that is being written is checkpointed every few megabytes: after a kill its files are cut back
to the checkpoint and continued, and the result is the same to the byte.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data.progress import Progress
from rmdm.data.shards import (
    DOCS_DTYPE,
    FORMAT,
    Manifest,
    PartCounts,
    Segment,
    SplitCounts,
    dtype_for,
    read_json,
    write_json,
)
from rmdm.data.sources import Block, Part, Source, open_source
from rmdm.data.tokenizer import Tokenizer, build_tokenizer, load_pretrained
from rmdm.data.workers import Encoder, Workers, default_workers
from rmdm.data.writer import PartWriter, await_file, finished, writing
from rmdm.errors import ConfigError, DataError, OtherShardsError, RMDMError, StoppedError
from rmdm.links import own_name
from rmdm.locks import locked

SMALL_BYTES = 1 << 20
"""Corpora smaller than this are tokenised in this process: starting workers would take longer."""


@dataclass(frozen=True)
class Prepared:
    """Token shards that are ready to use."""

    dir: Path
    tokenizer: Tokenizer
    manifest: Manifest
    skipped: bool
    """True when they had been made before."""


def shard_dir(config: DataConfig) -> Path:
    """The folder of the shards: `data.dir`, or one named after everything that decides their content."""
    if config.dir is not None:
        return Path(config.dir).expanduser()
    return _folder(config, open_source(config, "train"), open_source(config, "valid"))


def prepare(
    config: DataConfig,
    *,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    progress: bool = True,
    log: Callable[[str], None] = print,
) -> Prepared:
    """Tokenise the corpus unless that is done, and return where it lies.

    Every rank calls this; rank r tokenises parts r, r + world, ... and all meet at `barrier` three times. The result
    does not depend on `world`. Shards in the folder that were made with other settings, or from another source, are
    never used and never overwritten: that is a DataError. A folder that is made here goes again if the input is at
    fault and nothing in it is of use to a later call. Where another process makes the same shards, this waits for them.
    """
    _check(config)
    show = log if progress and rank == 0 else _silent
    if rank > 0:
        barrier()  # rank 0 goes first: it downloads, trains the tokenizer, and finds what is wrong with the settings
    train, valid = _sources(config, show)
    folder = _folder(config, train, valid)
    is_maker = rank == 0 and train is not None and not (folder / "manifest.json").exists()
    with _alone(folder, show) if is_maker else contextlib.nullcontext():
        return _prepared(config, folder, train, valid, rank, world, barrier, progress, log)


def _prepared(
    config: DataConfig, folder: Path, train: Source | None, valid: Source | None,
    rank: int, world: int, barrier: Callable[[], None], progress: bool, log: Callable[[str], None],
) -> Prepared:  # fmt: skip
    """The shards in a folder that rank 0 holds unless they were made before."""
    show = log if progress and rank == 0 else _silent
    is_made = False
    if rank == 0:
        if train is not None and not (folder / "manifest.json").exists():
            is_made = _make(folder)
            with _taken_back(folder, is_made):
                _begin(folder, config, train, valid, show)
        barrier()
    else:
        await_file(folder / "tokenizer" / "tokenizer_meta.json")
    done = train is None or (folder / "manifest.json").exists()
    if train is not None and not done:
        _refuse_differences(folder, read_json(folder / "plan.json"), _plan(config, train, valid))
        mine = _stems(train, valid)[rank::world]
        with _taken_back(folder, is_made and world == 1):  # other ranks may be at work in it
            _tokenise(folder, config, Tokenizer.load(folder / "tokenizer"), mine, Progress(progress and rank == 0, log))
    barrier()
    if rank == 0 and train is not None and not done:
        with _taken_back(folder, is_made, lambda: config.dir is not None and _has_text(folder, train, valid)):
            _join(folder, config, Tokenizer.load(folder / "tokenizer"), train, valid)
    barrier()
    await_file(folder / "manifest.json")
    manifest = Manifest.load(folder)
    _compare(folder, config.tokenizer, manifest, _asked(config, train, valid))
    manifest.check_files(folder)
    manifest.check_tokenizer(folder)
    show(_summary(folder, manifest, done))
    return Prepared(folder, Tokenizer.load(folder / "tokenizer"), manifest, done)


def _check(config: DataConfig) -> None:
    least = 3 if config.layout == "packed" and config.wrap else 2
    if config.length < least:
        raise ConfigError(f"data.length={config.length} is too short for a row; use at least {least}")
    if config.holdout < 0:
        raise ConfigError(f"data.holdout={config.holdout} is negative; use 0 or more documents")
    if config.workers is not None and config.workers < 1:
        raise ConfigError(f"data.workers={config.workers}: use at least 1 process, or null for one a core")


def _sources(config: DataConfig, log: Callable[[str], None]) -> tuple[Source | None, Source | None]:
    """The sources of both splits; (None, None) when they are gone but `data.dir` holds finished shards."""
    try:
        return open_source(config, "train"), open_source(config, "valid")
    except RMDMError as error:
        if config.dir is None or not (Path(config.dir).expanduser() / "manifest.json").exists():
            raise
        log(f"using the shards in {config.dir} as they are; their source is not at hand ({error})")
        return None, None


def _folder(config: DataConfig, train: Source | None, valid: Source | None) -> Path:
    if config.dir is not None:
        return Path(config.dir).expanduser()
    facts = json.dumps([FORMAT, _asked(config, train, valid)], sort_keys=True)
    return Path("data") / f"{config.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _asked(config: DataConfig, train: Source | None, valid: Source | None) -> dict[str, Any]:
    """What decides the content of the shards, by the names the settings have."""
    separate = config.valid_path is not None or (config.path is None and config.valid_split is not None)
    asked: dict[str, Any] = {
        "tokenizer": _tokenizer_request(config.tokenizer),
        "layout": config.layout,
        "length": config.length,
        "wrap": config.layout == "packed" and config.wrap,
        "holdout": 0 if separate else config.holdout,
    }
    if train is not None:
        asked["source"] = train.fingerprint
        asked["validation source"] = valid.fingerprint if valid is not None else None
    return asked


def _tokenizer_request(config: TokenizerConfig) -> str:
    keys = {"pretrained": ("name", "add_special", "separator"), "bpe": ("vocab_size", "train_bytes"), "word": ()}
    return " ".join([config.kind, *(f"{key}={getattr(config, key)}" for key in keys[config.kind])])


def _compare(folder: Path, tokenizer: TokenizerConfig, stored: Manifest, asked: dict[str, Any]) -> None:
    """Raise DataError naming the first thing in which finished shards differ from what is asked for."""
    has = {
        "tokenizer": stored.tokenizer["request"],
        "layout": stored.layout,
        "length": stored.length,
        "wrap": stored.wrap,
        "holdout": stored.holdout,
        "source": stored.source["train"],
        "validation source": stored.source["valid"],
    }
    if tokenizer.kind == "pretrained" and tokenizer.name and Path(tokenizer.name).expanduser().exists():
        # A tokenizer that is at hand is compared by content: its path may change, and so may the file at that path.
        local = load_pretrained(tokenizer)
        if local.fingerprint != stored.tokenizer["fingerprint"]:
            name, fingerprint = stored.tokenizer["name"], stored.tokenizer["fingerprint"]
            has["tokenizer"] = f"{name} ({fingerprint[:12]})"
            asked = {**asked, "tokenizer": f"{local.name} ({local.fingerprint[:12]})"}
        else:
            asked = {**asked, "tokenizer": has["tokenizer"]}
    _refuse_differences(folder, has, asked)


def _refuse_differences(folder: Path, has: dict[str, Any], asked: dict[str, Any]) -> None:
    for key, value in asked.items():
        if key in has and has[key] != value:
            short = [str(v)[:12] if "source" in key else v for v in (has[key], value)]
            raise OtherShardsError(
                f"{folder} holds shards with {key} {short[0]}, this run asks for {key} {short[1]}",
                "set another data.dir, or delete that folder to make it anew",
            )


def _plan(config: DataConfig, train: Source, valid: Source | None) -> dict[str, Any]:
    """What decides the stored tokens: not the held-out split and, when packed, not the length of rows."""
    free = {"holdout", *(("length", "wrap") if config.layout == "packed" else ())}
    return {key: value for key, value in _asked(config, train, valid).items() if key not in free}


@contextlib.contextmanager
def _alone(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Hold a folder of shards; wait for another process that makes them, which may be all there is to do."""
    whole = own_name(folder)
    if not whole.name:
        raise ConfigError(f"data.dir={folder} is the root of the disk; name a folder for the shards alone")
    with contextlib.suppress(OSError):  # `_make` will say so
        whole.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, which goes again if the input is at fault.
    place = whole.with_name(f".{whole.name}.lock")
    with locked(place, lambda who: show(f"{folder} is being made by another process ({who}); waiting for it")):
        yield


def _make(folder: Path) -> bool:
    """Make the folder; False if it was there before."""
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            folder.mkdir(exist_ok=True)  # an error if it is a file
            return False
        return True


@contextlib.contextmanager
def _taken_back(folder: Path, is_mine: bool, is_useful: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Remove a folder that is ours when the input is at fault, unless what it holds is useful all the same.

    What only stopped is left to be gone on with.
    """
    try:
        yield
    except StoppedError:
        raise
    except RMDMError:
        if is_mine and not is_useful():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _has_text(folder: Path, train: Source, valid: Source | None) -> bool:
    """Whether the finished parts hold documents of every source: other settings of `data` can cut rows of them."""
    documents = {"part": 0, **({"valid": 0} if valid is not None else {})}
    for stem, _ in _stems(train, valid):
        documents[stem.partition("-")[0]] += read_json(folder / f"{stem}.json")["documents"]
    return all(documents.values())


def _begin(folder: Path, config: DataConfig, train: Source, valid: Source | None, log: Callable[[str], None]) -> None:
    """Lay down what the parts depend on: the plan, which a later run must match to go on, and the tokenizer."""
    plan = _plan(config, train, valid)
    with writing(folder):
        for left in folder.glob("*.tmp"):  # what a killed run was about to put in its place
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            _refuse_differences(folder, read_json(folder / "plan.json"), plan)
        except FileNotFoundError:
            write_json(folder / "plan.json", plan)
    if not (folder / "tokenizer").exists():
        if config.tokenizer.kind != "pretrained":
            log(f"building the tokenizer ({_tokenizer_request(config.tokenizer)}) from {train.description}")
        tokenizer = build_tokenizer(config.tokenizer, train)
        with writing(folder):
            temporary = folder / f"tokenizer.{os.getpid()}.tmp"
            tokenizer.save(temporary)
            os.replace(temporary, folder / "tokenizer")


def _stems(train: Source, valid: Source | None) -> list[tuple[str, Part]]:
    """Every part with the name of its files."""
    stems = [(f"part-{i:05d}", part) for i, part in enumerate(train.parts)]
    return stems + ([(f"valid-{i:05d}", part) for i, part in enumerate(valid.parts)] if valid is not None else [])


def _tokenise(
    folder: Path, config: DataConfig, tokenizer: Tokenizer, parts: list[tuple[str, Part]], bar: Progress
) -> None:
    """Write the parts that are not finished."""
    dtype = dtype_for(tokenizer.size)
    todo = [(stem, part) for stem, part in parts if not finished(folder, stem, dtype)]
    size = sum(part.size for _, part in todo)
    count = 1 if size < SMALL_BYTES else config.workers or default_workers()

    def tasks() -> Iterator[tuple[tuple[PartWriter, int], Block | None]]:
        for stem, part in todo:
            writer = PartWriter(folder, stem, dtype)
            cleanup.callback(writer.close)
            for number, block in enumerate(part.blocks()):
                if number >= writer.blocks:
                    yield (writer, block.consumed), block
                else:
                    bar.advance(block.consumed)
            yield (writer, 0), None

    encoder = Encoder(tokenizer, config.layout, config.length, dtype)
    with contextlib.ExitStack() as cleanup, bar.over(size), Workers(encoder, count) as workers:
        for (writer, consumed), encoded in workers.map(tasks()):
            if encoded is None:
                writer.finish()
            else:
                writer.add(encoded)
                bar.advance(consumed, encoded.text_bytes, int(encoded.lengths.sum()))


def _join(folder: Path, config: DataConfig, tokenizer: Tokenizer, train: Source, valid: Source | None) -> None:
    """Write the manifest that makes one corpus of the parts, after checking that it has rows to offer."""
    parts: list[PartCounts] = []
    for stem, _ in _stems(train, valid):
        await_file(folder / f"{stem}.json")
        parts.append(PartCounts(**read_json(folder / f"{stem}.json")))
    own = parts[: len(train.parts)]
    documents = sum(part.documents for part in own)
    if documents == 0:
        raise DataError(f"no documents in {train.description}: it is empty or blank; name a source with text")
    asked = _asked(config, train, valid)
    if asked["holdout"] >= documents:
        raise DataError(
            f"data.holdout={config.holdout} leaves nothing to train on: {train.description} has {documents} documents; "
            "lower data.holdout"
        )
    if valid is None:
        kept, held = _cut(folder, own, documents - config.holdout)
    else:
        kept, held = _cut(folder, own, documents)[0], [_whole(part) for part in parts[len(train.parts) :]]
        if not any(segment.doc_stop for segment in held):
            raise DataError(f"no documents in {valid.description}: it is empty or blank; name a source with text")
    manifest = Manifest(
        name=config.name,
        tokenizer={
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "size": tokenizer.size,
            "separator_id": tokenizer.separator_id,
            "pad_id": tokenizer.pad_id,
            "add_special": tokenizer.add_special,
            "request": asked["tokenizer"],
        },
        source={"train": asked["source"], "valid": asked["validation source"]},
        description=train.description,
        layout=config.layout,
        length=config.length,
        wrap=asked["wrap"],
        holdout=asked["holdout"],
        dtype=dtype_for(tokenizer.size),
        parts=parts,
    )
    for name, segments in (("train", kept), ("valid", held)):
        manifest.splits[name] = counts = _count(manifest, segments)
        if counts.rows == 0 and segments:
            if name == "train":
                what, remedy = "the corpus", "use more text"
            elif valid is not None:
                what, remedy = f"the validation text ({valid.description})", "name more of it"
            else:
                what, remedy = "the held-out split", "raise data.holdout"
            raise DataError(
                f"{what} has {counts.tokens} tokens, fewer than one row of data.length={config.length}; "
                f"lower data.length or {remedy}"
            )
    with writing(folder):
        manifest.save(folder)


def _whole(part: PartCounts) -> Segment:
    return Segment(part.file, 0, part.documents, 0, part.tokens)


def _cut(folder: Path, parts: list[PartCounts], documents: int) -> tuple[list[Segment], list[Segment]]:
    """The first `documents` documents of the parts, and the rest."""
    before: list[Segment] = []
    after: list[Segment] = []
    for part in parts:
        here = min(documents, part.documents)
        documents -= here
        token = 0
        if here:
            path, offset = folder / f"{part.file}.docs", (here - 1) * DOCS_DTYPE.itemsize
            token = int(np.fromfile(path, dtype=DOCS_DTYPE, count=1, offset=offset)[0])
            before.append(Segment(part.file, 0, here, 0, token))
        if here < part.documents:
            after.append(Segment(part.file, here, part.documents, token, part.tokens))
    return before, after


def _count(manifest: Manifest, segments: list[Segment]) -> SplitCounts:
    documents = sum(s.doc_stop - s.doc_start for s in segments)
    tokens = sum(s.token_stop - s.token_start for s in segments)
    if manifest.layout == "padded":
        return SplitCounts(rows=documents, documents=documents, tokens=tokens, dropped=0, segments=segments)
    rows, dropped = divmod(tokens, manifest.unit)
    return SplitCounts(rows=rows, documents=documents, tokens=tokens, dropped=dropped, segments=segments)


def _summary(folder: Path, manifest: Manifest, done: bool) -> str:
    train, valid = manifest.splits["train"], manifest.splits["valid"]
    lost = f"{train.dropped} tokens of a last partial row left out"
    if manifest.layout == "padded":
        lost = f"{sum(part.truncated for part in manifest.parts):,} documents cut to {manifest.length} tokens"
    much = " (more than a third: lower data.holdout)" if manifest.holdout and 2 * valid.rows > train.rows else ""
    return (
        f"{folder}: {train.documents:,} documents, {train.tokens:,} tokens, {train.rows:,} rows of {manifest.length} "
        f"to train on, {valid.rows:,} held out{much}; {lost}; tokenizer {manifest.tokenizer['name']} "
        f"({manifest.tokenizer['size']:,} tokens){'; made before' if done else ''}"
    )


def _silent(_: str) -> None:
    pass
