"""Texts to score: a run's held-out rows, named benchmark sets, or any files, as rows of the model's own tokens.

Nothing is left out at the end of a set. In packed rows, what is left after the last whole row is scored in a row that
begins with tokens which were scored before: they are given and count no more. In padded rows, a document longer than a
row goes on in the next one. Bytes are those of the text the scored tokens were made of, token by token; a separator has
none of its own.

Shapes: N rows, L positions, T tokens.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rmdm.config import DataConfig
from rmdm.data.files import Document, kind_of
from rmdm.data.prepare import shard_dir
from rmdm.data.shards import DTYPES, TokenRows
from rmdm.data.sources import Source, open_source
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import DataError, RMDMError, nearest
from rmdm.hub import load_model
from rmdm.model import Model

HELD_OUT = "valid"
"""Name of a run's own held-out rows."""
DATA_DIR = "RMDM_EVAL_DATA"
"""Environment variable that names the folder of local copies of the named sets."""
PROBE = "Ab Cd, naïve É 1."
"""What a normaliser that loses case, accents or signs changes."""
SPACED = "a. (b) c's"
"""What tokens that hold no white space write with more of it, or with less."""
ENCODE_CHARS = 1 << 20
"""Characters encoded at once: an encoding with its offsets takes a few hundred bytes a token."""
SPAN_ROWS = 512
"""Rows whose tokens are spelled at once: that takes some hundred bytes a token."""
_HEADING = re.compile(r"\s*= [^=].* =\s*")


@dataclass(frozen=True)
class Named:
    """A benchmark set: how a local copy's file name begins, and where the hub has it."""

    files: tuple[str, ...]
    dataset: str
    config: str | None = None
    split: str = "test"
    column: str = "text"
    revision: str | None = None
    lines: bool = False
    """Whether the hub has it line by line, to be joined to articles."""


PAPERS = partial(Named, dataset="armanc/scientific_papers", column="article", revision="refs/convert/parquet")
SETS = {
    "wikitext": Named(("wikitext",), "Salesforce/wikitext", "wikitext-2-raw-v1", lines=True),
    "lm1b": Named(("lm1b",), "dvruette/lm1b"),
    "lambada": Named(("lambada",), "EleutherAI/lambada_openai", "default"),
    "agnews": Named(("agnews", "ag_news", "ag-news"), "fancyzhx/ag_news"),
    "pubmed": PAPERS(("pubmed",), config="pubmed"),
    "arxiv": PAPERS(("arxiv",), config="arxiv"),
    "openwebtext": Named(("openwebtext", "owt"), "Skylion007/openwebtext", split="train[-100000:]"),
}
"""The sets of the paper's zero-shot table. OpenWebText has no test split: its last 100,000 documents are held out."""


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score, and what is known of them."""

    name: str
    description: str
    fingerprint: str
    x_NL: NDArray[np.int32]
    lengths_N: NDArray[np.int64]
    """Positions of each row that are text, final separator included; the rest is PAD."""
    scored_NL: NDArray[np.bool_]
    """Positions that are scored; the others are given."""
    bytes_N: NDArray[np.int64]
    """UTF-8 bytes of the text that each row's scored tokens were made of."""
    is_padded: bool
    lossy: str | None
    """Why bits per byte of this tokenizer cannot be compared with others'; None where they can."""
    document_N: NDArray[np.int64]
    """The document that each row's first scored token is of, by number. Rows of one document are much alike."""
    set_rows: int
    """Rows of the whole set, of which these are some."""

    def __len__(self) -> int:
        return len(self.x_NL)

    @property
    def text_NL(self) -> NDArray[np.bool_]:
        """Scored positions that are text."""
        return self.scored_NL & (np.arange(self.x_NL.shape[1]) < self.lengths_N[:, None])

    def at(self, index: NDArray[np.integer]) -> "ScoredRows":
        """Some of the rows."""
        names = ("x_NL", "lengths_N", "scored_NL", "bytes_N", "document_N")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def at_most(self, count: int | None) -> "ScoredRows":
        """At most `count` rows, evenly spread over the set."""
        return self if count is None or count >= len(self) else self.at(spread(len(self), count))


def spread(total: int, count: int | None) -> NDArray[np.int64]:
    """At most `count` numbers below `total`, evenly spread."""
    return np.arange(total) if count is None or count >= total else np.arange(count) * total // count


def open_set(
    ref: str,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    folder: Path | None = None,
    column: str | None = None,
    document: Document = "line",
    rows: int | None = None,
) -> ScoredRows:
    """The set that `ref` names, in rows of the model that was trained with `tokenizer` and `data`; at most `rows`."""
    if ref == HELD_OUT:
        return held_out(tokenizer, data, rows)
    source, is_lines = find_source(ref, folder, column, document)
    texts = _documents(source)
    documents = articles(texts) if is_lines else texts
    return text_rows(ref, source, documents, tokenizer, data).at_most(rows)


def open_sets(
    runs: Sequence[Path],
    refs: Sequence[str],
    check: Callable[[Model, ScoredRows], object] = lambda model, part: None,
    *,
    folder: Path | None = None,
    column: str | None = None,
    document: Document = "line",
    rows: int | None = None,
) -> dict[tuple[Path, str], ScoredRows]:
    """Every set in the rows of every run, so that what is wrong with the last is known before the first is measured.

    Runs of the same tokenizer and layout share them. `check` raises where a run and a set do not go together.
    """
    opened: dict[tuple[Path, str], ScoredRows] = {}
    made: dict[tuple[str, ...], ScoredRows] = {}
    for run in runs:
        model = load_model(run)  # and not kept: all of them may be more than a GPU holds
        for ref in refs:
            key = (ref, model.tokenizer.fingerprint, repr(model.config.data))
            if key not in made:
                made[key] = open_set(
                    ref, model.tokenizer, model.config.data, folder=folder, column=column, document=document, rows=rows
                )
            check(model, made[key])
            opened[run, ref] = made[key]
    return opened


def _documents(source: Source) -> Iterator[str]:
    """All texts of a source."""
    try:
        for part in source.parts:
            for block in part.blocks():
                yield from block.documents()
    except DataError as error:
        raise DataError(str(error).replace("set data.column", "set --column")) from None


def find_source(ref: str, folder: Path | None, column: str | None, document: Document) -> tuple[Source, bool]:
    """Where the texts of a set come from, and whether they are lines to be joined."""
    if ref not in SETS:
        if not Path(ref).expanduser().exists() and not any(sign in ref for sign in "*?[/.~"):
            raise DataError(f"{ref!r} is no set, file or folder; {nearest(ref, [HELD_OUT, *SETS])}")
        config = DataConfig(path=ref, column=column or "text", document=document)
        return _opened(config), False
    named = SETS[ref]
    copies = _local_copies(named, folder)
    if len(copies) > 1:
        names = ", ".join(path.name for path in copies)
        raise DataError(
            f"set {ref!r} may be any of {names} in {copies[0].parent}; leave one of them there, put the parts of a set "
            f"into a folder {named.files[0]}, or name the file itself"
        )
    if copies:
        config = DataConfig(path=str(copies[0]), column=column or "text", document=document)
        # A text file with a line a document is the set as it is published, line by line.
        kind = kind_of(copies[0].name) if copies[0].is_file() else None
        return _opened(config), named.lines and document == "line" and kind is not None and kind[0] == ".txt"
    config = DataConfig(
        dataset=named.dataset, dataset_config=named.config, split=named.split, revision=named.revision,
        column=column or named.column,
    )  # fmt: skip
    try:
        return _opened(config), named.lines
    except DataError as error:
        reason = str(error).split(";")[0]
        raise DataError(
            f"set {ref!r}: {reason}; give --data-dir a folder with a file {named.files[0]}*.jsonl (or .txt, .parquet), "
            "or run where the hub can be reached"
        ) from None


def _local_copies(named: Named, folder: Path | None) -> list[Path]:
    """Files and folders in the folder of local copies whose names begin as the set's do."""
    place = folder or (Path(os.environ[DATA_DIR]) if os.environ.get(DATA_DIR) else None)
    if place is None:
        return []
    if not place.is_dir():
        raise DataError(f"{place} is no folder; give --data-dir (or {DATA_DIR}) the folder of the sets' files")
    return [
        path
        for path in sorted(place.iterdir())
        if path.name.lower().startswith(named.files) and (path.is_dir() or kind_of(path.name))
    ]


def _opened(config: DataConfig) -> Source:
    source = open_source(config, "train")
    assert source is not None
    return source


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines joined to articles, each of which begins with a heading of the first level."""
    joined: list[str] = []
    for line in lines:
        if joined and _HEADING.fullmatch(line):
            yield "".join(joined)
            joined = []
        joined.append(line if line.endswith("\n") else f"{line}\n")
    if joined:
        yield "".join(joined)


def text_rows(name: str, source: Source, texts: Iterable[str], tokenizer: Tokenizer, data: DataConfig) -> ScoredRows:
    """Rows of texts, laid out as the model was trained to see them."""
    pieces: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
    losses = Losses(tokenizer)
    for batch in _batches(texts):
        pieces += tokenise(tokenizer, batch, losses)
    if not pieces:
        raise DataError(f"{source.description} has no text to score; name a set with text")
    is_padded = data.layout == "padded"
    laid = padded(pieces, data.length, tokenizer.pad_id) if is_padded else packed(pieces, data, tokenizer, name)
    x_NL, lengths_N, scored_NL, bytes_N, document_N = laid
    return ScoredRows(
        name, source.description, source.fingerprint, x_NL, lengths_N, scored_NL, bytes_N, is_padded, losses.reason(),
        document_N, len(x_NL),
    )  # fmt: skip


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise(
    tokenizer: Tokenizer, texts: Sequence[str], losses: "Losses"
) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Ids of each text, separator at the end, and how many bytes of the text each was made of.

    White space that no token holds counts to the token after it; what the end of a text has of it, to the separator.
    """
    out = []
    for text, encoded in zip(
        texts, tokenizer.backend.encode_batch(list(texts), add_special_tokens=tokenizer.add_special), strict=True
    ):
        ids = np.array(encoded.ids, dtype=np.int32)
        stops = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
        if tokenizer.add_special and len(ids) and ids[-1] == tokenizer.separator_id:
            ids, stops = ids[:-1], stops[:-1]
        if not len(ids):
            continue
        losses.add(text, ids)
        place = byte_places(text)
        reached = place[np.maximum.accumulate(stops)]
        size = np.diff(np.concatenate([[0], reached, [place[-1]]]))
        out.append((np.append(ids, np.int32(tokenizer.separator_id)), size))
    return out


def byte_places(text: str) -> NDArray[np.int64]:
    """Where each character of a text begins in its UTF-8 bytes, and where the last one ends."""
    if text.isascii():
        return np.arange(len(text) + 1)
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    size = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    return np.concatenate([[0], np.cumsum(size)])


Laid = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]
"""Rows, lengths, scored positions, bytes and documents."""


def padded(pieces: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]], length: int, pad_id: int) -> Laid:
    """One document a row; a longer one goes on in the next."""
    cut = [
        (number, ids[a : a + length], size[a : a + length])
        for number, (ids, size) in enumerate(pieces)
        for a in range(0, len(ids), length)
    ]
    x_NL = np.full((len(cut), length), pad_id, dtype=np.int32)
    for row, (_, ids, _) in zip(x_NL, cut, strict=True):
        row[: len(ids)] = ids
    lengths_N = np.array([len(ids) for _, ids, _ in cut], dtype=np.int64)
    bytes_N = np.array([int(size.sum()) for *_, size in cut], dtype=np.int64)
    document_N = np.array([number for number, *_ in cut], dtype=np.int64)
    return x_NL, lengths_N, np.ones(x_NL.shape, dtype=bool), bytes_N, document_N


def packed(
    pieces: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]], data: DataConfig, tokenizer: Tokenizer, name: str
) -> Laid:
    """All documents one after another, cut every row."""
    ids_T, size_T = (np.concatenate(part) for part in zip(*pieces, strict=True))
    unit = data.length - 2 if data.wrap else data.length
    starts_N, fresh_N = row_starts(len(ids_T), unit, name)
    at_NU = starts_N[:, None] + np.arange(unit)
    is_fresh = np.arange(unit) >= unit - fresh_N[:, None]
    bytes_N = np.where(is_fresh, size_T[at_NU], 0).sum(axis=1)
    stops = np.cumsum([len(ids) for ids, _ in pieces])
    document_N = np.searchsorted(stops, starts_N + unit - fresh_N, side="right")
    return *wrapped(ids_T[at_NU], is_fresh, data.wrap, tokenizer.separator_id), bytes_N, document_N


def row_starts(tokens: int, unit: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where rows of `unit` tokens begin, and how many tokens of each no row before has."""
    whole, rest = divmod(tokens, unit)
    if not whole:
        raise DataError(
            f"set {name!r} has {tokens} tokens, fewer than one row of {unit}; use a longer text, or a model with "
            "shorter rows"
        )
    starts = np.arange(whole) * unit
    fresh = np.full(whole, unit)
    return (np.append(starts, tokens - unit), np.append(fresh, rest)) if rest else (starts, fresh)


def wrapped(
    x_NU: NDArray[np.int32], is_fresh: NDArray[np.bool_], wrap: bool, separator_id: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Rows with the separators around them where the model was trained so; a row's frame counts if all of it does."""
    if wrap:
        x_NU = np.pad(x_NU, ((0, 0), (1, 1)), constant_values=separator_id)
        whole_N1 = is_fresh.all(axis=1, keepdims=True)
        is_fresh = np.concatenate([whole_N1, is_fresh, whole_N1], axis=1)
    return x_NU.astype(np.int32), np.full(len(x_NU), x_NU.shape[1], dtype=np.int64), is_fresh


class Losses:
    """Whether a tokenizer keeps all of the texts it has seen, white space aside."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        unknown = getattr(tokenizer.backend.model, "unk_token", None)
        self.unknown_id = None if unknown is None else tokenizer.backend.token_to_id(unknown)
        self.tokens = self.unknown = self.looked = self.changed = self.cased = 0
        self.spaced = False
        """Whether the tokens of rows whose text is not at hand leave its white space open."""

    def add(self, text: str, ids_T: NDArray[np.integer]) -> None:
        """Look at a text and its ids."""
        self._count(ids_T)
        self._compare(text, self.tokenizer.decode(ids_T))

    def add_rows(self, x_NL: NDArray[np.integer], is_text: NDArray[np.bool_]) -> None:
        """Look at rows whose text is not at hand: what can be told are unknown tokens, the normaliser and white space.

        Bytes are counted of what the tokens write then, which has other white space where they hold none themselves.
        """
        self._count(x_NL[is_text])
        normalizer = self.tokenizer.backend.normalizer
        self._compare(PROBE, PROBE if normalizer is None else normalizer.normalize_str(PROBE))
        written = self.tokenizer.decode(self.tokenizer.backend.encode(SPACED, add_special_tokens=False).ids)
        self.spaced = "".join(written.split()) == "".join(SPACED.split()) and written.strip() != SPACED

    def _count(self, ids_T: NDArray[np.integer]) -> None:
        self.tokens += len(ids_T)
        self.unknown += 0 if self.unknown_id is None else int((ids_T == self.unknown_id).sum())

    def _compare(self, before: str, after: str) -> None:
        before, after = "".join(before.split()), "".join(after.split())
        self.looked += 1
        self.changed += before != after
        self.cased += before != after and before.lower() == after.lower()

    def reason(self) -> str | None:
        """Why its bits per byte say less than they seem to."""
        if self.unknown:
            return f"{100 * self.unknown / self.tokens:.2g}% of the tokens are unknown words"
        if not self.changed:
            return "the tokens do not hold the text's white space, and the text is not at hand" if self.spaced else None
        what = "letter case is lost" if self.cased == self.changed else "the tokenizer changes the text"
        return what if self.looked == 1 else f"{what} in {self.changed:,} of {self.looked:,} documents"


def held_out(tokenizer: Tokenizer, data: DataConfig, count: int | None = None) -> ScoredRows:
    """The held-out rows of the corpus a model was trained on, and what is left of it after the last whole row.

    At most `count` of them, evenly spread; the others are not read.
    """
    try:
        folder = shard_dir(data)
        rows = TokenRows.open(folder, HELD_OUT)
    except RMDMError as error:
        raise DataError(f"the run's held-out rows are not at hand ({error}); name a set with --data") from None
    if rows.manifest.tokenizer["fingerprint"] != tokenizer.fingerprint:
        raise DataError(f"{folder} was made with another tokenizer than the model; name a set with --data")
    rest = rows.counts.dropped
    total = len(rows) + (rest > 0)
    chosen = spread(total, count)
    whole = chosen[chosen < len(rows)]
    x_NL = rows.take(whole).astype(np.int32)
    lengths_N, is_padded = rows.lengths(whole), rows.manifest.layout == "padded"
    scored_NL = np.ones(x_NL.shape, dtype=bool)
    if len(whole) < len(chosen):
        unit = rows.manifest.unit
        last = wrapped(
            last_tokens(rows, unit)[None], np.arange(unit)[None] >= unit - rest, rows.manifest.wrap, rows.separator_id
        )
        x_NL, lengths_N = np.concatenate([x_NL, last[0]]), np.concatenate([lengths_N, last[1]])
        scored_NL = np.concatenate([scored_NL, last[2]])
    losses = Losses(tokenizer)
    losses.add_rows(x_NL, np.arange(x_NL.shape[1]) < lengths_N[:, None])
    bytes_N = token_bytes(tokenizer, x_NL, lengths_N, scored_NL)
    fingerprint = str(rows.manifest.source["valid"] or rows.manifest.source["train"])
    description = f"held out of {rows.manifest.description}"
    return ScoredRows(
        HELD_OUT, description, fingerprint, x_NL, lengths_N, scored_NL, bytes_N, is_padded, losses.reason(),
        rows.documents(chosen), total,
    )  # fmt: skip


def last_tokens(rows: TokenRows, count: int) -> NDArray[np.int32]:
    """The last tokens of a split."""
    found: list[NDArray[np.int32]] = []
    dtype = DTYPES[rows.manifest.dtype]
    for segment in reversed(rows.counts.segments):
        start = max(segment.token_start, segment.token_stop - count)
        path = rows.folder / f"{segment.part}.tokens"
        offset, size = start * dtype.itemsize, segment.token_stop - start
        found.insert(0, np.fromfile(path, dtype=dtype, count=size, offset=offset).astype(np.int32))
        count -= size
        if not count:
            break
    return np.concatenate(found)


def token_bytes(
    tokenizer: Tokenizer, x_NL: NDArray[np.int32], lengths_N: NDArray[np.int64], scored_NL: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Bytes of the text that each row's scored tokens write, without the line breaks between documents."""
    sizes = np.zeros(len(x_NL), dtype=np.int64)
    for first in range(0, len(x_NL), SPAN_ROWS):
        some = slice(first, first + SPAN_ROWS)
        texts, edges = tokenizer.spans(x_NL[some].astype(np.int64), lengths_N[some])
        for row, text in enumerate(texts, first):
            size_L = np.diff(byte_places(text)[edges[row - first]])
            sizes[row] = size_L[scored_NL[row] & (x_NL[row] != tokenizer.separator_id)].sum()
    return sizes
