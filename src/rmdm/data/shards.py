"""Token shards on disk: what the manifest promises, and rows read straight from memory maps.

A shard folder holds, for each part of the source, in source order:

    part-00000.tokens   token ids of all its documents, one after another, uint16 or uint32
    part-00000.docs     where each document ends in that file, int64
    part-00000.json     counts; written last, so its presence means the other two are complete
    manifest.json       what was tokenised and how, and which stretch of which part belongs to which split
    tokenizer/          the tokenizer itself

Nothing is stored row by row. `packed` rows are cut every `length` tokens from the concatenation of all parts, so a row
may begin in one part and end in the next; `padded` rows are single documents, padded as they are read.
"""

import itertools
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rmdm.errors import DataError

FORMAT = 1
"""Version of the folder's format; shards of another version are tokenised anew."""
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCS_DTYPE = np.dtype("<i8")
Split = Literal["train", "valid"]


def dtype_for(size: int) -> str:
    """The narrowest stored type that can hold every id of a vocabulary of `size` tokens."""
    return "uint16" if size <= 1 << 16 else "uint32"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, so that a reader finds the old content or the new, never a mixture."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises DataError when it is damaged, FileNotFoundError when it is not there."""
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete the folder {path.parent} and prepare it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged (no JSON object); delete the folder {path.parent} and prepare it again")
    return value


@dataclass(frozen=True)
class Segment:
    """Documents [doc_start, doc_stop) of one part, which are its tokens [token_start, token_stop)."""

    part: str
    doc_start: int
    doc_stop: int
    token_start: int
    token_stop: int


@dataclass(frozen=True)
class SplitCounts:
    """What one split holds."""

    rows: int
    documents: int
    tokens: int
    """Tokens in its documents, separators included, padding not."""
    dropped: int
    """For `packed`: tokens of the last, partial row, which no row contains."""
    segments: list[Segment]


@dataclass(frozen=True)
class PartCounts:
    """What one part's files hold."""

    file: str
    documents: int
    tokens: int
    truncated: int
    """For `padded`: documents cut to `length`."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a shard folder holds and how it was made."""

    format: int = FORMAT
    name: str
    tokenizer: dict[str, Any]
    """`fingerprint`, `name`, `size`, `separator_id`, `pad_id`, and `request`: the settings that asked for it."""
    source: dict[str, str | None]
    """Fingerprint of the source of each split; null for `valid` when documents of `train` are held out."""
    description: str
    """The source in words, for messages."""
    layout: Literal["padded", "packed"]
    length: int
    wrap: bool
    holdout: int
    dtype: str
    parts: list[PartCounts]
    splits: dict[str, SplitCounts] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read and check `manifest.json`."""
        path = Path(folder) / "manifest.json"
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise DataError(
                f"no token shards in {folder}: manifest.json is missing; run `rmdm prepare` first"
            ) from None
        if raw.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {raw.get('format')!r}, this version reads {FORMAT}; "
                f"delete {folder} and prepare it again"
            )
        try:
            raw["parts"] = [PartCounts(**part) for part in raw["parts"]]
            for name, split in raw["splits"].items():
                segments = [Segment(**segment) for segment in split.pop("segments")]
                raw["splits"][name] = SplitCounts(segments=segments, **split)
            manifest = Manifest(**{f.name: raw[f.name] for f in fields(Manifest)})
            manifest.validate(path)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{path} is damaged ({reason}); delete the folder {folder} and prepare it again") from None
        return manifest

    def save(self, folder: Path) -> None:
        """Write `manifest.json`, atomically."""
        write_json(Path(folder) / "manifest.json", asdict(self))

    def validate(self, path: Path) -> None:
        """Raise DataError when the stored type cannot hold the vocabulary, KeyError or ValueError on missing facts."""
        size = int(self.tokenizer["size"])
        for fact in (self.tokenizer["pad_id"], self.tokenizer["separator_id"], *(s.rows for s in self.splits.values())):
            int(fact)
        _ = self.splits["train"], self.splits["valid"], self.tokenizer["fingerprint"], self.tokenizer["name"]
        if self.dtype not in DTYPES:
            raise DataError(
                f"{path} names dtype {self.dtype!r}, known: {', '.join(DTYPES)}; prepare {path.parent} again"
            )
        if size > 1 << 8 * DTYPES[self.dtype].itemsize:
            raise DataError(
                f"{path}: a vocabulary of {size} tokens does not fit the stored dtype {self.dtype}; "
                f"delete {path.parent} and prepare it again"
            )

    def check_files(self, folder: Path) -> None:
        """Raise DataError naming the first part whose files are missing or have another size than recorded."""
        for part in self.parts:
            _check_size(Path(folder) / f"{part.file}.tokens", part.tokens * DTYPES[self.dtype].itemsize)
            _check_size(Path(folder) / f"{part.file}.docs", part.documents * DOCS_DTYPE.itemsize)

    def check_tokenizer(self, folder: Path) -> None:
        """Raise DataError when the tokenizer saved in the folder is not the one its tokens were made with."""
        path = Path(folder) / "tokenizer" / "tokenizer_meta.json"
        try:
            saved = read_json(path)
        except FileNotFoundError:
            raise DataError(f"{path} is missing; delete {folder} and prepare it again") from None
        if saved.get("fingerprint") != self.tokenizer["fingerprint"]:
            raise DataError(
                f"{folder}: the manifest names tokenizer {self.tokenizer['name']} "
                f"({self.tokenizer['fingerprint'][:12]}), the folder holds {saved.get('name')} "
                f"({str(saved.get('fingerprint'))[:12]}); delete {folder} and prepare it again"
            )

    @property
    def unit(self) -> int:
        """Tokens of text a packed row takes from the stream: `length`, less the two separators when wrapped."""
        return self.length - 2 if self.wrap else self.length


class TokenRows:
    """The rows of one split. Cheap to open; rows are read from disk as they are taken."""

    def __init__(self, folder: Path, manifest: Manifest, split: Split) -> None:
        self.folder, self.manifest, self.split = Path(folder), manifest, split
        self.length = manifest.length
        self.pad_id: int = manifest.tokenizer["pad_id"]
        self.separator_id: int = manifest.tokenizer["separator_id"]
        self.counts = manifest.splits[split]
        sizes = {part.file: part for part in manifest.parts}
        self._segments = [s for s in self.counts.segments if s.token_stop > s.token_start]
        self._tokens = [
            _map(self.folder / f"{s.part}.tokens", DTYPES[manifest.dtype], sizes[s.part].tokens) for s in self._segments
        ]
        self._docs: list[NDArray[np.int64]] = []
        if manifest.layout == "padded":
            self._docs = [
                _map(self.folder / f"{s.part}.docs", DOCS_DTYPE, sizes[s.part].documents) for s in self._segments
            ]
            begins = np.array([s.doc_start for s in self._segments], dtype=np.int64)
            weights = [s.doc_stop - s.doc_start for s in self._segments]
        else:
            begins = np.array([s.token_start for s in self._segments], dtype=np.int64)
            weights = [s.token_stop - s.token_start for s in self._segments]
            # Every run of `unit` tokens as a row of a strided view: making the view costs more than reading from it.
            self._windows = [
                np.lib.stride_tricks.sliding_window_view(tokens, manifest.unit)
                if len(tokens) >= manifest.unit
                else tokens
                for tokens in self._tokens
            ]
        # Where each segment begins in the split: in documents when padded, in tokens when packed.
        self._starts = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)]).astype(np.int64)
        # What leads from a place in the split to the place in the segment's part.
        self._shifts = begins - self._starts[:-1]

    @staticmethod
    def open(folder: Path | str, split: Split, *, verify: bool = False) -> "TokenRows":
        """Open one split of a shard folder, its file sizes checked; `verify` also reads every token once."""
        folder = Path(folder)
        manifest = Manifest.load(folder)
        if split not in manifest.splits or manifest.splits[split].rows == 0:
            raise DataError(
                f"{folder} has no rows for {split!r}; prepare it with data.holdout above 0, or name a validation source"
            )
        manifest.check_files(folder)
        manifest.check_tokenizer(folder)
        rows = TokenRows(folder, manifest, split)
        if verify:
            rows._verify()
        return rows

    def __len__(self) -> int:
        return self.counts.rows

    def take(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows by number, in the order asked for: (n, L)."""
        indices = self._checked(indices)
        return self._take_padded(indices) if self.manifest.layout == "padded" else self._take_packed(indices)

    def lengths(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """How many tokens of each row are text (final separator included) and not padding."""
        indices = self._checked(indices)
        if self.manifest.layout == "packed":
            return np.full(len(indices), self.length, dtype=np.int64)
        order, groups = self._grouped(indices)
        starts, stops = self._bounds(indices[order], groups)
        out = np.empty(len(indices), dtype=np.int64)
        out[order] = stops - starts
        return out

    def documents(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The document, by its number in the split, that each row begins in; what is left after the last row is one."""
        indices = np.asarray(indices, dtype=np.int64)
        if self.manifest.layout == "padded":
            return indices
        first = indices * self.manifest.unit
        out = np.empty(len(first), dtype=np.int64)
        order, groups = self._grouped(first)
        before = np.cumsum([0, *(s.doc_stop - s.doc_start for s in self._segments)])
        parts = {part.file: part for part in self.manifest.parts}
        for segment, a, b in groups:
            place = self._segments[segment]
            ends = _map(self.folder / f"{place.part}.docs", DOCS_DTYPE, parts[place.part].documents)
            found = np.searchsorted(ends, first[order[a:b]] + self._shifts[segment], side="right")
            out[order[a:b]] = before[segment] + found - place.doc_start
        return out

    def _checked(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} asked for, there are {len(self)}")
        return indices

    def _grouped(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
        """An order that sorts `starts` by segment, and (segment, from, to) for each run of it."""
        owner = np.searchsorted(self._starts, starts, side="right") - 1
        order = np.argsort(owner, kind="stable")
        owner = owner[order]
        edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
        return order, [(int(owner[a]), a, b) for a, b in itertools.pairwise(edges) if b > a]

    def _take_packed(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        unit = self.manifest.unit
        out = np.empty((len(indices), self.length), dtype=np.int64)
        text = out
        if self.manifest.wrap:
            out[:, 0] = out[:, -1] = self.separator_id
            text = out[:, 1:-1]
        first = indices * unit
        owner = np.searchsorted(self._starts, first, side="right") - 1
        is_whole = first + unit <= self._starts[owner + 1]
        whole = np.flatnonzero(is_whole)
        order, groups = self._grouped(first[whole])
        offsets = (first[whole] + self._shifts[owner[whole]])[order]
        tokens = np.empty((len(whole), unit), dtype=DTYPES[self.manifest.dtype])
        for segment, a, b in groups:
            tokens[a:b] = self._windows[segment][offsets[a:b]]
        text[whole[order]] = tokens
        for place in np.flatnonzero(~is_whole):
            text[place] = self._across(int(first[place]), unit)
        return out

    def _across(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of the split, from as many segments as they lie in."""
        pieces: list[NDArray[np.integer]] = []
        segment = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count:
            offset = start - int(self._starts[segment]) + self._segments[segment].token_start
            piece = self._tokens[segment][offset : min(offset + count, self._segments[segment].token_stop)]
            pieces.append(piece)
            start, count, segment = start + len(piece), count - len(piece), segment + 1
        return np.concatenate(pieces).astype(np.int64)

    def _bounds(
        self, rows: NDArray[np.int64], groups: list[tuple[int, int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the documents of these rows, sorted by segment, begin and end among the tokens of their part."""
        starts, stops = np.empty_like(rows), np.empty_like(rows)
        for segment, a, b in groups:
            ends, docs = self._docs[segment], rows[a:b] + self._shifts[segment]
            stops[a:b] = ends[docs]
            starts[a:b] = np.where(docs > 0, ends[docs - 1], 0)
        return starts, stops

    def _take_padded(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        order, groups = self._grouped(indices)
        starts, stops = self._bounds(indices[order], groups)
        at = starts[:, None] + np.arange(self.length)
        is_text = at < stops[:, None]
        np.minimum(at, stops[:, None] - 1, out=at)
        tokens = np.empty(at.shape, dtype=DTYPES[self.manifest.dtype])
        for segment, a, b in groups:
            tokens[a:b] = self._tokens[segment][at[a:b]]
        out = np.empty(at.shape, dtype=np.int64)
        out[order] = np.where(is_text, tokens, self.pad_id)
        return out

    def _verify(self, chunk: int = 1 << 24) -> None:
        """Raise DataError on the first id outside the vocabulary or the first document that ends before it begins."""
        size = self.manifest.tokenizer["size"]
        for segment, tokens in zip(self._segments, self._tokens, strict=True):
            for start in range(segment.token_start, segment.token_stop, chunk):
                highest = int(tokens[start : min(start + chunk, segment.token_stop)].max())
                if highest >= size:
                    raise DataError(
                        f"{self.folder / segment.part}.tokens holds id {highest}, the vocabulary has {size} tokens; "
                        f"delete {self.folder} and prepare it again"
                    )
        for segment, ends in zip(self._segments, self._docs, strict=bool(self._docs)):
            used = ends[segment.doc_start : segment.doc_stop]
            if (np.diff(used) <= 0).any() or (np.diff(used) > self.length).any():
                raise DataError(
                    f"{self.folder / segment.part}.docs is damaged: its documents do not follow one another; "
                    f"delete {self.folder} and prepare it again"
                )


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A read-only memory map as a plain array: the memmap subclass costs microseconds a slice."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; delete {path.parent} and prepare it again") from None
    if size != expected:
        raise DataError(
            f"shard {path} has {size} bytes, its manifest says {expected}; delete {path.parent} and prepare it again"
        )
