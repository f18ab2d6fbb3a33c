"""Arrays beside the token shards: what is written is what is read, and a wrong or damaged array is never used."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmdm.encoders import cache
from rmdm.encoders.cache import (
    ArrayManifest,
    ArraySpec,
    LatentRows,
    RowsWriter,
    find_cache,
    fingerprint,
    fit_indices,
    refuse_differences,
)
from rmdm.errors import DataError

FACTS = {"encoder name": "toy", "encoder": "a" * 64, "groups": 3, "dim": 5, "tokenizer": "t" * 64}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PART_ROWS", 8)


def values(rows: int, groups: int = 3, dim: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, groups, dim)).astype(np.float32)


def write(folder: Path, data: np.ndarray, *, facts: dict[str, Any] | None = None, **spec_values: Any) -> ArraySpec:
    facts = FACTS if facts is None else facts
    rows, groups, dim = data.shape
    known = {"kind": "e", "rows": {"train": rows, "valid": 0}, "groups": groups, "dim": dim, "dtype": "fp16"}
    spec = ArraySpec(**{**known, **spec_values})
    writer = RowsWriter(folder, "train", spec)
    writer.create("x")
    for part in reversed(writer.todo()):
        first, after = writer.span(part)
        writer.write(part, *spec.pack(data[first:after]))
    ArrayManifest(fingerprint=fingerprint(facts), facts=facts, spec=spec, split_rows=dict(spec.rows), figures={}).save(
        folder
    )
    writer.clear()
    return spec


@pytest.mark.parametrize("rows", [1, 8, 21])
@pytest.mark.parametrize("kind", ["e", "z0"])
def test_rows_come_back_in_the_order_asked_for(tmp_path: Path, rows: int, kind: str) -> None:
    data = values(rows)
    write(tmp_path, data, kind=kind)
    array = LatentRows.open(tmp_path, "train", kind)
    assert (len(array), array.groups, array.dim) == (rows, 3, 5)
    assert (tmp_path / f"train.{kind}").stat().st_size == rows * 3 * 5 * 2
    order = np.random.default_rng(1).integers(0, rows, 50)
    taken = array.take(order)
    assert taken.dtype == np.float32
    assert np.array_equal(taken, data.astype(np.float16).astype(np.float32)[order])
    assert array.take(np.array([], dtype=np.int64)).shape == (0, 3, 5)
    for wrong in (-1, rows):
        with pytest.raises(IndexError, match=f"there are {rows}"):
            array.take(np.array([wrong]))


def test_two_arrays_lie_side_by_side(tmp_path: Path) -> None:
    write(tmp_path, values(9))
    write(tmp_path, values(9, dim=2), kind="z0")
    assert LatentRows.open(tmp_path, "train").dim == 5
    assert LatentRows.open(tmp_path, "train", "z0").dim == 2


def test_int8_is_off_by_half_a_step_at_most(tmp_path: Path) -> None:
    data = values(21)
    scale = np.abs(data).max((0, 1)) / 127
    spec = write(tmp_path, data, dtype="int8", scale=scale.tolist())
    assert spec.pack(data)[1] == 0
    error = np.abs(LatentRows.open(tmp_path, "train").take(np.arange(21)) - data)
    assert (error <= scale * 0.5001).all()
    assert (error.max((0, 1)) > scale * 0.4).all(), "the bound must be nearly reached, or it is not int8"


def test_int8_clips_what_lies_beyond_and_counts_it() -> None:
    spec = ArraySpec(kind="e", rows={"train": 1}, groups=1, dim=3, dtype="int8", scale=[0.1, 0.1, 1.0])
    stored, clipped = spec.pack(np.array([[[99.0, -99.0, 99.0]]], dtype=np.float32))
    assert stored.tolist() == [[[127, -127, 99]]]
    assert clipped == 2


def test_fit_indices_are_spread_evenly() -> None:
    assert fit_indices(5, 9).tolist() == fit_indices(5, 5).tolist() == [0, 1, 2, 3, 4]
    spread = fit_indices(10**9 + 7, 65_536)
    assert len(spread) == 65_536
    gaps = np.diff(spread)
    assert gaps.min() > 0
    assert gaps.max() - gaps.min() <= 1
    assert abs(int(spread[0]) - (10**9 + 6 - int(spread[-1]))) <= 1
    assert len(fit_indices(0, 5)) == 0


def test_parts_left_over_are_shared_by_the_ranks(tmp_path: Path) -> None:
    spec = ArraySpec(kind="e", rows={"train": 50}, groups=1, dim=1, dtype="fp16")
    writer = RowsWriter(tmp_path, "train", spec)
    writer.create("x")
    assert writer.todo() == list(range(7))
    assert writer.todo(1, 3) == [1, 4]
    for part in (1, 6):
        first, after = writer.span(part)
        writer.write(part, np.ones((after - first, 1, 1), np.float16), clipped=part)
    again = RowsWriter(tmp_path, "train", spec)
    again.create("x")
    assert again.todo() == [0, 2, 3, 4, 5]
    assert np.fromfile(tmp_path / "train.e", np.float16).sum() == 8 + 2
    (tmp_path / "train.e").unlink()
    again.create("x")
    assert again.todo() == list(range(7)), "marks of a file that is gone count for nothing"
    again.write(0, np.ones((8, 1, 1), np.float16))
    again.create("x")
    assert again.todo() == list(range(1, 7))
    again.create("y")
    assert again.todo() == list(range(7)), "parts of other content count for nothing"
    with pytest.raises(ValueError, match="part 6 has 2 rows"):
        again.write(6, np.ones((3, 1, 1), np.float16))


def test_clipped_numbers_are_summed_over_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmdm.data.writer.PATIENCE", 0.01)
    writer = RowsWriter(tmp_path, "train", ArraySpec(kind="e", rows={"train": 9}, groups=1, dim=1, dtype="fp16"))
    writer.create("x")
    writer.write(0, np.ones((8, 1, 1), np.float16), clipped=3)
    with pytest.raises(DataError, match=r"000001\.json was written by another rank but is not visible here"):
        writer.clipped()
    writer.write(1, np.ones((1, 1, 1), np.float16), clipped=4)
    assert writer.clipped() == 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "encoder",
            "b" * 64,
            r"with encoder toy \(aaaaaaaaaaaa\), this run asks for encoder toy \(bbbbbbbbbbbb\); use the",
        ),
        (
            "tokenizer",
            "u" * 64,
            r"with tokenizer tttttttttttt, this run asks for tokenizer uuuuuuuuuuuu; use the folder",
        ),
        ("groups", 4, r"was made with groups 3, this run asks for groups 4; .* run `rmdm encode` again"),
    ],
)
def test_an_array_made_otherwise_is_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    write(tmp_path, values(4))
    with pytest.raises(DataError, match=message):
        LatentRows.open(tmp_path, "train", facts={**FACTS, name: value})
    assert fingerprint({**FACTS, name: value}) != fingerprint(FACTS)


def test_where_the_encoder_lies_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path, values(4))
    moved = {**FACTS, "encoder name": "/elsewhere/toy"}
    assert len(LatentRows.open(tmp_path, "train", facts=moved)) == 4
    assert fingerprint(moved) == fingerprint(FACTS)


def test_the_cache_is_found_without_the_encoder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no embeddings; run `rmdm encode` first"):
        find_cache(tmp_path, {"groups": 3})
    for number, facts in enumerate([FACTS, {**FACTS, "groups": 1}, {**FACTS, "dim": 4}]):
        write(tmp_path / f"latents-{number}", values(4), facts=facts)
    asked = {name: value for name, value in FACTS.items() if name != "encoder"}
    assert find_cache(tmp_path, asked) == tmp_path / "latents-0"
    with pytest.raises(DataError, match=r"the closest, latents-0, has dim 5 where this run asks for 7"):
        find_cache(tmp_path, {**asked, "dim": 7})
    with pytest.raises(DataError, match=r"latents-0, .*latents-1 all fit these settings; delete all but one"):
        find_cache(tmp_path, {"dim": 5})


def test_damage_is_found_on_opening(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no finished e in .*: manifest\.json is missing; run `rmdm encode` first"):
        LatentRows.open(tmp_path, "train")
    write(tmp_path, values(9))
    with pytest.raises(DataError, match=r"has no e for 'valid'"):
        LatentRows.open(tmp_path, "valid")
    path = tmp_path / "train.e"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train\.e has 268 bytes, its manifest says 270; delete"):
        LatentRows.open(tmp_path, "train")
    write(tmp_path, values(9), kind="z0")
    (tmp_path / "train.z0").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.z0 has 0 bytes, .*; delete .*/train\.z0 and run `rmdm align` again"):
        LatentRows.open(tmp_path, "train", "z0")
    path.unlink()
    with pytest.raises(DataError, match=r"train\.e is missing"):
        ArrayManifest.load(tmp_path).check_files(tmp_path)
    manifest = tmp_path / "manifest.json"
    whole = manifest.read_text()
    for damaged, message in (
        (whole[:50], "is damaged"),
        (whole.replace('"format": 1', '"format": 99'), "has format 99, this version reads 1"),
        (whole.replace('"dim"', '"dimm"'), "is damaged"),
        (whole.replace('"fp16"', '"int8"'), "no scale for each dimension"),
    ):
        manifest.write_text(damaged)
        with pytest.raises(DataError, match=rf"{message}.*run `rmdm encode` again"):
            LatentRows.open(tmp_path, "train")


def test_refusing_names_facts_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="with dtype None, this run asks for dtype int8"):
        refuse_differences(tmp_path, FACTS, {"dtype": "int8"})


def test_the_manifest_reads_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, values(4), dtype="int8", scale=[0.1, 1 / 3, 2.0, 1e-9, 7.0])
    manifest = ArrayManifest.load(tmp_path)
    assert manifest.spec.scale == [0.1, 1 / 3, 2.0, 1e-9, 7.0]
    assert dataclasses.replace(manifest) == ArrayManifest.load(tmp_path)
    assert manifest.fingerprint == fingerprint(manifest.facts)
