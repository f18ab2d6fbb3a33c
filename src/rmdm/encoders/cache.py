"""Arrays with one entry a row of the token shards: embeddings `e` and what is later made of them, such as `z0`.

A cache folder, `<shard folder>/latents-<fingerprint>`, holds

    manifest.json          facts that decide the content, counts, storage; written last: its presence means complete
    whitening.safetensors  the PCA
    train.e, valid.e       rows x G x D numbers and nothing else: fp16, or int8 with one step a dimension

Another kind of array lies in files with another suffix beside its own `manifest-<kind>.json`. While an array is being
written, `<split>.<kind>.parts/` has one small file for each finished part, so any number of processes can share the
work, be killed, and go on.

Shapes: n rows, G groups, D dimensions of a group.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rmdm.data.shards import read_json, write_json
from rmdm.data.writer import await_file, writing
from rmdm.errors import DataError

FORMAT = 1
"""Version of the folder's format; a cache of another version is made anew."""
PART_ROWS = 4096
"""Rows of a part, the unit of work: whatever the number of ranks, so that they cannot change the result."""
NAMES = {"encoder name"}
"""Facts that are for people: they may change (a folder moves) and the content stay the same."""
DTYPES = {"fp16": np.dtype("<f2"), "int8": np.dtype("i1")}
Facts = dict[str, Any]


def fingerprint(facts: Facts) -> str:
    """Of everything that decides the content of an array."""
    return hashlib.sha256(json.dumps([FORMAT, without_names(facts)], sort_keys=True).encode()).hexdigest()


def without_names(facts: Facts) -> Facts:
    """The facts that decide the content."""
    return {name: value for name, value in facts.items() if name not in NAMES}


def fit_indices(rows: int, fit_rows: int) -> NDArray[np.int64]:
    """`fit_rows` row numbers spread evenly over `rows`, rising; all of them when there are no more."""
    n = min(rows, fit_rows)
    return (2 * np.arange(n, dtype=np.int64) + 1) * rows // max(1, 2 * n)


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """The shape of one array and how its numbers are stored."""

    kind: str
    rows: dict[str, int]
    """Rows stored of each split; a split without rows has no file."""
    groups: int
    dim: int
    dtype: Literal["fp16", "int8"]
    scale: list[float] | None = None
    """For int8: the step of each dimension."""

    def nbytes(self, split: str) -> int:
        """Size of the split's file."""
        return self.rows[split] * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.groups * self.dim * DTYPES[self.dtype].itemsize

    def pack(self, values_nGD: NDArray[np.floating]) -> tuple[NDArray[Any], int]:
        """The numbers as they are stored, and how many had to be clipped."""
        if self.dtype == "fp16":
            limit = float(np.finfo(np.float16).max)
            scaled = np.asarray(values_nGD)
        else:
            limit = 127.0
            scaled = np.rint(values_nGD / np.asarray(self.scale))
        clipped = int((np.abs(scaled) > limit).sum())
        return np.clip(scaled, -limit, limit).astype(DTYPES[self.dtype]), clipped

    def unpack(self, stored_nGD: NDArray[Any]) -> NDArray[np.float32]:
        """The numbers that `pack` stored."""
        values = stored_nGD.astype(np.float32)
        return values if self.scale is None else values * np.asarray(self.scale, dtype=np.float32)

    def file(self, folder: Path, split: str) -> Path:
        """Where the split's numbers lie."""
        return folder / f"{split}.{self.kind}"

    def parts(self, split: str) -> int:
        """How many parts the split is written in."""
        return -(-self.rows[split] // PART_ROWS)


@dataclass(frozen=True, kw_only=True)
class ArrayManifest:
    """What an array holds, how it is stored and what decided its content."""

    format: int = FORMAT
    fingerprint: str
    facts: Facts
    spec: ArraySpec
    split_rows: dict[str, int]
    """Rows the token shards have; more than the array has where it holds evenly spread rows only."""
    figures: dict[str, Any]
    """What was found on the way, such as the share of the variance kept."""

    @staticmethod
    def path(folder: Path, kind: str) -> Path:
        """The manifest's file."""
        return Path(folder) / ("manifest.json" if kind == "e" else f"manifest-{kind}.json")

    @staticmethod
    def load(folder: Path, kind: str = "e") -> "ArrayManifest":
        """Read and check the manifest of one array."""
        path = ArrayManifest.path(folder, kind)
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise DataError(
                f"no finished {kind} in {folder}: {path.name} is missing; run `{_verb(kind)}` first"
            ) from None
        except DataError:
            raise DataError(f"{path} is damaged (no JSON object); {_again(path)}") from None
        if raw.get("format") != FORMAT:
            raise DataError(f"{path} has format {raw.get('format')!r}, this version reads {FORMAT}; {_again(path)}")
        try:
            raw["spec"] = ArraySpec(**raw["spec"])
            manifest = ArrayManifest(**{f.name: raw[f.name] for f in fields(ArrayManifest)})
            if manifest.spec.dtype not in DTYPES or manifest.spec.kind != kind:
                raise ValueError(f"{manifest.spec.kind} as {manifest.spec.dtype}")
            if (manifest.spec.dtype == "int8") != (len(manifest.spec.scale or []) == manifest.spec.dim):
                raise ValueError("no scale for each dimension")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); {_again(path)}") from None
        return manifest

    def save(self, folder: Path) -> None:
        """Write the manifest, atomically: the array counts as complete from here on."""
        write_json(ArrayManifest.path(folder, self.spec.kind), asdict(self))

    def check_files(self, folder: Path) -> None:
        """Raise DataError naming the first file that is missing or has another size than recorded."""
        for split, rows in self.spec.rows.items():
            if rows:
                _check_size(self.spec.file(Path(folder), split), self.spec.nbytes(split))


def refuse_differences(folder: Path, has: Facts, asked: Facts, kind: str = "e") -> None:
    """Raise DataError naming the first fact in which a cache differs from what is asked for."""
    for name, value in asked.items():
        if name in NAMES or has.get(name) == value:
            continue
        pair = [_fact(name, facts) for facts in (has, asked)]
        raise DataError(
            f"{folder} was made with {name} {pair[0]}, this run asks for {name} {pair[1]}; "
            f"use the folder made with these settings, or run `{_verb(kind)}` again"
        )


def _fact(name: str, facts: Facts) -> str:
    value = facts.get(name)
    short = str(value)[:12] if name in {"encoder", "tokenizer", "source", "validation source"} else str(value)
    return f"{facts['encoder name']} ({short})" if name == "encoder" and "encoder name" in facts else short


def find_cache(shards: Path, facts: Facts) -> Path:
    """The finished cache beside the shards that agrees with these facts; they may leave some open.

    Without its fingerprint among the facts, an encoder is known by its name.
    """
    shards, closest = Path(shards), None
    asked = without_names(facts) if "encoder" in facts else facts
    found: list[Path] = []
    for path in sorted(shards.glob("latents-*/manifest.json")):
        has = ArrayManifest.load(path.parent).facts
        wrong = [name for name, value in asked.items() if has.get(name) != value]
        if not wrong:
            found.append(path.parent)
        elif closest is None or len(wrong) < closest[0]:
            closest = (len(wrong), path.parent, wrong[0], has)
    if len(found) > 1:
        raise DataError(f"{', '.join(map(str, found))} all fit these settings; delete all but one")
    if found:
        return found[0]
    if closest is not None:
        _, folder, name, has = closest
        pair = [_fact(name, f) for f in (has, facts)]
        raise DataError(
            f"{shards} has no embeddings for these settings; the closest, {folder.name}, has {name} {pair[0]} where "
            f"this run asks for {pair[1]}; run `rmdm encode`, or change the setting back"
        )
    raise DataError(f"{shards} has no embeddings; run `rmdm encode` first")


class LatentRows:
    """The rows of one split of an array. Cheap to open; rows are read from disk as they are taken."""

    def __init__(self, folder: Path, manifest: ArrayManifest, split: str) -> None:
        self.manifest, self.split = manifest, split
        self.groups, self.dim = manifest.spec.groups, manifest.spec.dim
        shape = (manifest.spec.rows[split], self.groups, self.dim)
        path, dtype = manifest.spec.file(Path(folder), split), DTYPES[manifest.spec.dtype]
        self._map = np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=shape))

    @staticmethod
    def open(folder: Path | str, split: str, kind: str = "e", *, facts: Facts | None = None) -> "LatentRows":
        """Open one split, its file's size checked; with `facts`, only if the array was made from them."""
        folder = Path(folder)
        manifest = ArrayManifest.load(folder, kind)
        if facts is not None:
            refuse_differences(folder, manifest.facts, facts, kind)
        if not manifest.spec.rows.get(split):
            raise DataError(f"{folder} has no {kind} for {split!r}: the token shards have no such rows; hold some out")
        _check_size(manifest.spec.file(folder, split), manifest.spec.nbytes(split))
        return LatentRows(folder, manifest, split)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Which row of the token shards each row of this array belongs to."""
        return fit_indices(self.manifest.split_rows[self.split], len(self))

    def take(self, indices: NDArray[np.integer]) -> NDArray[np.float32]:
        """Rows by their number in this array, in the order asked for: (n, G, D)."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} asked for, there are {len(self)}")
        return self.manifest.spec.unpack(self._map[indices])


class RowsWriter:
    """One split of an array while it is written, part by part, in any order and by any number of processes."""

    def __init__(self, folder: Path, split: str, spec: ArraySpec) -> None:
        self.spec, self.split = spec, split
        self._path = spec.file(Path(folder), split)
        self._marks = Path(folder) / f"{split}.{spec.kind}.parts"

    def create(self, content: str) -> None:
        """Lay down the file in its full size; one process calls this before any writes.

        Parts finished before count only if the file is still there and `content`, the fingerprint, is the same.
        """
        size, plan = self.spec.nbytes(self.split), self._marks / "plan"
        is_there = self._path.exists() and self._path.stat().st_size == size
        if not (is_there and plan.exists() and plan.read_text(encoding="utf-8") == content):
            self.clear()
        with writing(self._path.parent, "latents"):
            self._marks.mkdir(parents=True, exist_ok=True)
            plan.write_text(content, encoding="utf-8")
            with open(self._path, "ab") as file:
                file.truncate(size)
                if size and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a disk that is too small says so now

    def span(self, part: int) -> tuple[int, int]:
        """First row of a part, and the row after its last."""
        return part * PART_ROWS, min((part + 1) * PART_ROWS, self.spec.rows[self.split])

    def todo(self, rank: int = 0, world: int = 1) -> list[int]:
        """Parts of this rank that are not finished."""
        return [p for p in range(rank, self.spec.parts(self.split), world) if not self._mark(p).exists()]

    def write(self, part: int, stored_nGD: NDArray[Any], clipped: int = 0) -> None:
        """Put a whole part, as `spec.pack` gave it, in its place and mark it finished."""
        first, after = self.span(part)
        if stored_nGD.shape != (after - first, self.spec.groups, self.spec.dim):
            raise ValueError(f"part {part} has {after - first} rows, got an array of shape {stored_nGD.shape}")
        with writing(self._path.parent, "latents"):
            with open(self._path, "r+b") as file:
                file.seek(first * self.spec.row_bytes)
                file.write(np.ascontiguousarray(stored_nGD, dtype=DTYPES[self.spec.dtype]).data)
                file.flush()
                os.fsync(file.fileno())
            write_json(self._mark(part), {"clipped": clipped})

    def clipped(self) -> int:
        """Numbers clipped over all parts; every part must be finished."""
        for part in range(self.spec.parts(self.split)):
            await_file(self._mark(part))
        return sum(read_json(self._mark(part))["clipped"] for part in range(self.spec.parts(self.split)))

    def clear(self) -> None:
        """Forget which parts are finished: the manifest says so for all of them, or the file is gone."""
        shutil.rmtree(self._marks, ignore_errors=True)

    def _mark(self, part: int) -> Path:
        return self._marks / f"{part:06d}.json"


def _verb(kind: str) -> str:
    return "rmdm encode" if kind == "e" else "rmdm align"


def _again(path: Path) -> str:
    """What to do about a damaged file of an array."""
    kind = path.suffix[1:] if path.suffix != ".json" else path.stem.removeprefix("manifest").removeprefix("-") or "e"
    return f"delete {path.parent if kind == 'e' else path} and run `{_verb(kind)}` again"


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {_again(path)}") from None
    if size != expected:
        raise DataError(f"{path} has {size} bytes, its manifest says {expected}; {_again(path)}")
