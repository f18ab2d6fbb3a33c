"""Rows read from memory maps equal rows cut from the plain concatenation; damage is found when shards are opened."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmdm.data.shards import DTYPES, Manifest, PartCounts, Segment, SplitCounts, TokenRows, dtype_for
from rmdm.errors import DataError

PAD, SEPARATOR, SIZE = 0, 1, 50


def write_shards(
    folder: Path,
    parts: list[list[list[int]]],
    *,
    layout: Literal["packed", "padded"] = "packed",
    length: int = 4,
    wrap: bool = False,
    cut: int | None = None,
    dtype: str = "uint16",
) -> None:
    """Shards of these documents (by part), the documents from number `cut` on held out."""
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer" / "tokenizer_meta.json").write_text('{"fingerprint": "abc", "name": "toy"}', encoding="utf-8")
    counts, train, valid = [], [], []
    seen = 0
    for number, documents in enumerate(parts):
        stem = f"part-{number:05d}"
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        flat = np.array([token for document in documents for token in document], dtype=DTYPES[dtype])
        flat.tofile(folder / f"{stem}.tokens")
        ends.tofile(folder / f"{stem}.docs")
        counts.append(PartCounts(stem, len(documents), len(flat), 0))
        here = len(documents) if cut is None else min(len(documents), max(0, cut - seen))
        token = int(ends[here - 1]) if here else 0
        train.append(Segment(stem, 0, here, 0, token))
        valid.append(Segment(stem, here, len(documents), token, len(flat)))
        seen += len(documents)
    manifest = Manifest(
        name="toy",
        tokenizer={"fingerprint": "abc", "name": "toy", "size": SIZE, "separator_id": SEPARATOR, "pad_id": PAD},
        source={"train": "x", "valid": None},
        description="toy",
        layout=layout,
        length=length,
        wrap=wrap,
        holdout=0,
        dtype=dtype,
        parts=counts,
    )
    for name, segments in (("train", train), ("valid", valid)):
        documents = sum(s.doc_stop - s.doc_start for s in segments)
        tokens = sum(s.token_stop - s.token_start for s in segments)
        rows = documents if layout == "padded" else tokens // manifest.unit
        manifest.splits[name] = SplitCounts(rows, documents, tokens, 0, segments)
    manifest.save(folder)


def naive_rows(documents: list[list[int]], layout: str, length: int, wrap: bool) -> list[list[int]]:
    if layout == "padded":
        return [document + [PAD] * (length - len(document)) for document in documents]
    flat = [token for document in documents for token in document]
    unit = length - 2 if wrap else length
    rows = [flat[i : i + unit] for i in range(0, len(flat) - unit + 1, unit)]
    return [[SEPARATOR, *row, SEPARATOR] for row in rows] if wrap else rows


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[list[list[int]]], str, int, bool, int]:
    layout = draw(st.sampled_from(["packed", "padded"]))
    length = draw(st.integers(3, 9))
    document = st.lists(st.integers(2, SIZE - 1), min_size=1, max_size=length - 1).map(lambda ids: [*ids, SEPARATOR])
    parts = draw(st.lists(st.lists(document, max_size=6), min_size=1, max_size=5))
    cut = draw(st.integers(0, sum(map(len, parts))))
    return parts, layout, length, layout == "packed" and draw(st.booleans()), cut


@settings(deadline=None, max_examples=150)
@given(corpus=corpora(), dtype=st.sampled_from(["uint16", "uint32"]), seed=st.integers(0, 99))
def test_rows_equal_the_naive_ones(
    tmp_path_factory: pytest.TempPathFactory, corpus: Any, dtype: str, seed: int
) -> None:
    parts, layout, length, wrap, cut = corpus
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, parts, layout=layout, length=length, wrap=wrap, cut=cut, dtype=dtype)
    documents = [document for part in parts for document in part]
    for split, own in (("train", documents[:cut]), ("valid", documents[cut:])):
        expected = naive_rows(own, layout, length, wrap)
        if not expected:
            with pytest.raises(DataError, match="has no rows"):
                TokenRows.open(folder, split)
            continue
        rows = TokenRows.open(folder, split, verify=True)
        assert len(rows) == len(expected)
        indices = np.random.default_rng(seed).integers(0, len(rows), 20)
        taken = rows.take(indices)
        assert taken.dtype == np.int64
        assert taken.tolist() == [expected[i] for i in indices]
        lengths = [len(own[i]) if layout == "padded" else length for i in indices]
        assert rows.lengths(indices).tolist() == lengths


@pytest.mark.parametrize("wrap", [False, True])
def test_rows_across_parts_at_every_alignment(tmp_path: Path, wrap: bool) -> None:
    for first in range(1, 9):
        for second in range(1, 9):
            parts = [[[2] * (first - 1) + [1]], [[3] * (second - 1) + [1]], [], [[4] * 6 + [1]]]
            write_shards(tmp_path, parts, length=6 if wrap else 4, wrap=wrap)
            expected = naive_rows([document for part in parts for document in part], "packed", 6 if wrap else 4, wrap)
            rows = TokenRows.open(tmp_path, "train")
            assert rows.take(np.arange(len(rows))).tolist() == expected, (first, second)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path, [[[2, 3, 4, 1], [5, 6, 1]], [[7, 8, 9, 10, 1]], []], cut=2)
    return tmp_path


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_the_manifest_survives_saving(folder: Path) -> None:
    manifest = Manifest.load(folder)
    manifest.save(folder)
    assert Manifest.load(folder) == manifest


def test_no_rows_taken_and_rows_out_of_range(folder: Path) -> None:
    rows = TokenRows.open(folder, "train")
    assert rows.take(np.array([], dtype=np.int64)).shape == (0, 4)
    assert rows.take(np.array([0])).tolist() == [[2, 3, 4, 1]]
    for index in (-1, 1):
        with pytest.raises(IndexError, match="there are 1"):
            rows.take(np.array([index]))


def test_a_truncated_shard_is_named(folder: Path) -> None:
    path = folder / "part-00001.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"part-00001\.tokens has 8 bytes, its manifest says 10; delete"):
        TokenRows.open(folder, "train")
    path.unlink()
    with pytest.raises(DataError, match=r"part-00001\.tokens is missing"):
        TokenRows.open(folder, "train")


def test_an_id_outside_the_vocabulary_is_found(folder: Path) -> None:
    path = folder / "part-00000.tokens"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[1] = SIZE
    tokens.tofile(path)
    TokenRows.open(folder, "train")
    with pytest.raises(DataError, match=r"part-00000\.tokens holds id 50, the vocabulary has 50 tokens"):
        TokenRows.open(folder, "train", verify=True)


def test_documents_out_of_order_are_found(tmp_path: Path) -> None:
    write_shards(tmp_path, [[[2, 1], [3, 1], [4, 1]]], layout="padded")
    np.array([4, 2, 6], dtype=np.int64).tofile(tmp_path / "part-00000.docs")
    with pytest.raises(DataError, match=r"part-00000\.docs is damaged"):
        TokenRows.open(tmp_path, "train", verify=True)


def test_a_vocabulary_too_big_for_the_stored_type(folder: Path) -> None:
    edit_manifest(folder, tokenizer={**Manifest.load(folder).tokenizer, "size": 65537})
    with pytest.raises(DataError, match="a vocabulary of 65537 tokens does not fit the stored dtype uint16"):
        TokenRows.open(folder, "train")
    assert (dtype_for(65536), dtype_for(65537)) == ("uint16", "uint32")


def test_another_tokenizer_than_the_manifest_names(folder: Path) -> None:
    meta = folder / "tokenizer" / "tokenizer_meta.json"
    meta.write_text('{"fingerprint": "def", "name": "other"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"the manifest names tokenizer toy \(abc\), the folder holds other \(def\)"):
        TokenRows.open(folder, "train")
    meta.unlink()
    with pytest.raises(DataError, match=r"tokenizer_meta\.json is missing"):
        TokenRows.open(folder, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 99}', "has format 99, this version reads 1"),
    ],
)
def test_damaged_manifests(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        TokenRows.open(folder, "train")
    assert "\n" not in str(error.value)


def test_missing_shards_and_missing_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token shards in .*; run `rmdm prepare` first"):
        TokenRows.open(tmp_path, "train")
    write_shards(tmp_path, [[[2, 3, 4, 1]]])
    with pytest.raises(DataError, match=r"has no rows for 'valid'; .*data\.holdout"):
        TokenRows.open(tmp_path, "valid")
    edit_manifest(tmp_path, dtype="float8")
    with pytest.raises(DataError, match="names dtype 'float8'"):
        TokenRows.open(tmp_path, "train")
