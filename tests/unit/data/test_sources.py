"""Every kind of source gives its documents in order, in parts that depend on nothing but the corpus."""

import csv
import gzip
import io
import json
import lzma
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from rmdm.config import DataConfig
from rmdm.data import files
from rmdm.data.sources import STORY_SEED, Source, open_source
from rmdm.errors import ConfigError, DataError, StoppedError

TEXTS = ["The first document.", "  Zürich, 東京 and 🙂.", "", "A third, after a blank one.", "   ", "The last."]
KEPT = [text for text in TEXTS if text.strip()]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def jsonl(texts: Sequence[str | None]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def encoded(kind: str, texts: Sequence[str]) -> bytes:
    if kind == ".txt":
        return "\n".join(texts).encode()
    if kind == ".jsonl":
        return jsonl(texts)
    if kind == ".csv":
        out = io.StringIO(newline="")
        csv.writer(out).writerows([["id", "text"], *([i, text] for i, text in enumerate(texts))])
        return out.getvalue().encode()
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": list(texts)}), sink)
    return sink.getvalue()


def source_of(path: Path | str, **settings: object) -> Source:
    source = open_source(DataConfig(path=str(path), **settings), "train")  # type: ignore[arg-type]
    assert source is not None
    return source


def read(source: Source) -> list[str]:
    """All documents, each part and block taken through a pickle as a worker would get it."""
    parts = pickle.loads(pickle.dumps(list(source.parts)))
    return [text for part in parts for block in part.blocks() for text in pickle.loads(pickle.dumps(block)).documents()]


@pytest.mark.parametrize("compression", list(COMPRESS))
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv", ".parquet"])
def test_every_kind_and_compression(tmp_path: Path, kind: str, compression: str) -> None:
    path = tmp_path / f"corpus{kind}{compression}"
    path.write_bytes(COMPRESS[compression](encoded(kind, TEXTS)))
    assert read(source_of(path)) == KEPT


def test_files_of_several_streams_are_read_to_the_end(tmp_path: Path) -> None:
    halves = jsonl(KEPT[:2]), jsonl(KEPT[2:])
    for compression in (".gz", ".xz", ".zst"):
        path = tmp_path / f"corpus.jsonl{compression}"
        path.write_bytes(b"".join(map(COMPRESS[compression], halves)))
        assert read(source_of(path)) == KEPT


def test_long_corpora_come_in_many_blocks_with_nothing_lost(tmp_path: Path) -> None:
    texts = [f"{i} " + "word " * (i % 400) for i in range(8000)]
    texts[100] = "long " * 600_000  # a record larger than a block
    stripped = [text.strip() for text in texts]
    for kind in (".txt", ".jsonl", ".csv", ".parquet"):
        path = tmp_path / f"corpus{kind}.zst"
        path.write_bytes(COMPRESS[".zst"](encoded(kind, texts)))
        source = source_of(path)
        blocks = [block for part in source.parts for block in part.blocks()]
        assert len(blocks) > 5
        assert [text.strip() for block in blocks for text in block.documents()] == stripped
        assert sum(block.consumed for block in blocks) == pytest.approx(source.size, abs=4)


def test_folders_and_globs_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.jsonl", "c.txt.gz", ".hidden.txt", "notes.md", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        kind = ".jsonl" if "jsonl" in name else ".txt"
        raw = encoded(kind, [f"text of {name}"])
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert read(source_of(tmp_path)) == [f"text of {n}" for n in ("a/1.jsonl", "b/1.txt", "b/2.txt", "c.txt.gz")]
    assert read(source_of(tmp_path / "b" / "*.txt")) == ["text of b/1.txt", "text of b/2.txt"]
    assert read(source_of(f"{tmp_path}/**/1.*")) == ["text of a/1.jsonl", "text of b/1.txt"]


def test_a_document_is_a_line_a_paragraph_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n\r\n \r\nthree\r\n".encode())
    assert read(source_of(path)) == ["one", "two", "three"]
    assert read(source_of(path, document="paragraph")) == ["one\ntwo", "three"]
    assert read(source_of(path, document="file")) == ["one\ntwo\n\n \nthree"]


def test_paragraphs_that_cross_blocks(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i}\n" + "line of text\n" * 50 + "end" for i in range(4000)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    assert len(list(source_of(path, document="paragraph").parts[0].blocks())) > 1
    assert read(source_of(path, document="paragraph")) == paragraphs


@pytest.mark.parametrize("cut", [7, 64, 1000])
def test_large_plain_files_split_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    monkeypatch.setattr(files, "SPLIT_BYTES", cut)
    monkeypatch.setattr(files, "MAX_PARTS", 10_000)
    texts = [f"line {i} " + "x" * (i * 7 % 90) for i in range(60)]
    for kind in (".txt", ".jsonl"):
        path = tmp_path / f"corpus{kind}"
        path.write_bytes(encoded(kind, texts))
        source = source_of(path)
        assert len(source.parts) > 3
        assert read(source) == texts
        assert source.size == path.stat().st_size


def test_small_files_share_a_part_and_large_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "JOIN_BYTES", 1000)
    for i, size in enumerate([400, 400, 400, 3000, 100]):
        (tmp_path / f"{i}.txt").write_text("x" * size, encoding="utf-8")
    source = source_of(tmp_path)
    assert [part.size for part in source.parts] == [800, 400, 3000, 100]
    assert [len(text) for text in read(source)] == [400, 400, 400, 3000, 100]


def test_fingerprint_follows_the_documents_not_the_place(tmp_path: Path) -> None:
    for folder in ("a", "b", "c", "d"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "corpus.txt").write_bytes(b"some text\n" + (b"and more" if folder == "c" else b"and less"))
    (tmp_path / "d" / "corpus.txt").rename(tmp_path / "d" / "other.txt")
    prints = {folder: source_of(tmp_path / folder).fingerprint for folder in "abcd"}
    assert prints["a"] == prints["b"]
    assert len({prints["a"], prints["c"], prints["d"], source_of(tmp_path / "a", document="file").fingerprint}) == 4


def test_validation_source_is_its_own_or_none(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("train", encoding="utf-8")
    (tmp_path / "valid.txt").write_text("valid", encoding="utf-8")
    assert open_source(DataConfig(path=str(tmp_path / "train.txt")), "valid") is None
    both = DataConfig(path=str(tmp_path / "train.txt"), valid_path=str(tmp_path / "valid.txt"))
    valid = open_source(both, "valid")
    assert valid is not None
    assert read(valid) == ["valid"]


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Name of a bad file -> its content and what the error must say."""
    lines = jsonl([f"document {i} " + "text " * 200 for i in range(500)])
    squeezed = {name: compress(lines) for name, compress in COMPRESS.items()}
    table = encoded(".parquet", TEXTS)
    return {
        "a.jsonl": (b'{"text": "fine"}\n{"text": "cut\n', r"a\.jsonl, line 2 is not JSON .*; fix or remove it"),
        "b.jsonl": (b'{"body": "x", "title": "y"}\n', r"b\.jsonl, line 1 has no column 'text'; .* body, title"),
        "c.jsonl": (b'{"text": 5}\n', r"c\.jsonl, line 1: column 'text' holds int, not text"),
        "d.jsonl": (b'["text"]\n', r"d\.jsonl, line 1 is a JSON list, not an object with a field 'text'"),
        "e.txt": (b"fine\nalso fine\nb\xe9d\n", r"e\.txt, line 3: byte 0xe9 is not UTF-8 text; convert"),
        "f.csv": (b"id,body\n1,x\n", r"f\.csv has no column 'text'; set data\.column to one of: id, body"),
        "semicolon.csv": (b"id;text\n1;x\n", r"n\.csv has one column, 'id;text': only commas separate; save it with"),
        "tab.csv": (b"id\ttext\n1\tx\n", r"tab\.csv has one column, 'id\\ttext': only commas separate; save it with"),
        "g.csv": (b"id,text\n1,x\n2\n", r"g\.csv, line 3 has 1 fields, column 'text' is number 2"),
        "h.csv": (b'id,text\n1,"open\n', r"h\.csv, line \d is not CSV"),
        "i.csv": (b"id,text\n1,\xff\n", r"i\.csv, line 2: byte 0xff is not UTF-8"),
        "j.parquet": (table[: len(table) // 2], r"j\.parquet (is truncated or damaged|cannot be read)"),
        "k.jsonl.xz": (squeezed[".xz"][:-200], r"k\.jsonl\.xz is truncated or damaged .*; fetch the file again"),
        "l.jsonl.gz": (squeezed[".gz"][:-200], r"l\.jsonl\.gz is truncated or damaged .*; fetch the file again"),
        "m.jsonl.zst": (squeezed[".zst"][:-200], r"m\.jsonl\.zst is truncated or damaged .*; fetch the file again"),
        "n.jsonl.xz": (b"not xz at all", r"n\.jsonl\.xz is truncated or damaged"),
        "o.jsonl.gz": (b"not gzip at all", r"o\.jsonl\.gz is truncated or damaged"),
        "p.jsonl.zst": (b"not zstd at all", r"p\.jsonl\.zst is truncated or damaged"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_files_are_one_clear_line(tmp_path: Path, name: str) -> None:
    content, message = bad_files()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(source_of(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_parquet_file_without_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "text": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet has no column 'words'; set data\.column to one of: body, text"):
        read(source_of(tmp_path / "t.parquet", column="words"))
    with pytest.raises(DataError, match=r"column 'text' holds int64, not text"):
        read(source_of(tmp_path / "t.parquet"))
    places = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 4)))
    broken = pa.Array.from_buffers(pa.utf8(), 1, [None, places, pa.py_buffer(b"ok\xff\xfe")])
    pq.write_table(pa.table({"text": broken}), tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match=r"t\.parquet: column 'text' holds text that is not UTF-8 \(.*\); write it anew"
    ):
        read(source_of(tmp_path / "t.parquet"))


def test_what_fails_for_a_passing_reason_is_told_from_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(2000)]}), bad)
    table = bytearray(bad.read_bytes())
    table[100:300] = bytes(200)
    bad.write_bytes(table)
    with pytest.raises(DataError, match=r"bad\.parquet is truncated or damaged \(.*\); fetch the file") as damaged:
        read(source_of(bad))
    assert not isinstance(damaged.value, StoppedError), "Arrow has OSErrors of its own"
    (tmp_path / "t.parquet.gz").write_bytes(gzip.compress(encoded(".parquet", TEXTS)))
    source = source_of(tmp_path / "t.parquet.gz")

    def full() -> IO[bytes]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    message = r"t\.parquet\.gz cannot be read \(No space left on device\); check the file and the room in TMPDIR"
    with pytest.raises(StoppedError, match=message):
        read(source)


def test_paths_that_name_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist; give a file, a folder or a glob"):
        source_of(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"~nobody-here/t\.txt does not exist; give a file, a folder or a glob"):
        source_of("~nobody-here/t.txt")
    with pytest.raises(DataError, match=r"no corpus in .*empty: the folder holds no file that ends in \.txt"):
        source_of(tmp_path / "empty")
    with pytest.raises(DataError, match=r"no corpus in .*\*\.jsonl: the glob matches no file"):
        source_of(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match=r"book\.pdf is no corpus file: its name must end in"):
        source_of(tmp_path / "book.pdf")
    with pytest.raises(ConfigError, match=r"no corpus is named; set data\.path .* data\.dataset .* data\.storyworld"):
        open_source(DataConfig(), "train")


def test_half_a_surrogate_pair_in_json_does_not_stop_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "half \\ud83d pair, whole \\ud83d\\ude42"}\n{"text": null}\n')
    assert read(source_of(tmp_path / "t.jsonl")) == ["half ? pair, whole 🙂"]


def test_storyworld_stories_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from rmdm.data import sources
    from rmdm.data.storyworld import storyworld

    monkeypatch.setattr(sources, "STORIES_PER_PART", 30)
    monkeypatch.setattr(sources, "STORIES_PER_BLOCK", 8)
    source = open_source(DataConfig(storyworld="mini", stories=70), "train")
    assert source is not None
    assert len(source.parts) == 3
    assert read(source) == [storyworld("mini").story(STORY_SEED, i) for i in range(70)]
    more = open_source(DataConfig(storyworld="mini", stories=71), "train")
    assert more is not None
    assert more.fingerprint != source.fingerprint
    with pytest.raises(ConfigError, match=r"data\.stories=0"):
        open_source(DataConfig(storyworld="mini", stories=0), "train")


class TestHuggingFace:
    """Local folders stand in for the hub: the same library loads both."""

    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()

    def test_a_folder_of_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "corpus"
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(jsonl([*TEXTS, None]))
        (folder / "test.jsonl").write_bytes(jsonl(["held out"]))
        config = DataConfig(dataset=str(folder), split="train", valid_split="test")
        train, valid = open_source(config, "train"), open_source(config, "valid")
        assert train is not None
        assert valid is not None
        assert read(train) == KEPT
        assert read(valid) == ["held out"]
        assert train.fingerprint != valid.fingerprint
        with pytest.raises(DataError, match=r"has no column 'body'; set data\.column to one of: id, text"):
            open_source(DataConfig(dataset=str(folder), column="body"), "train")

    def test_a_saved_dataset_in_several_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        from rmdm.data import sources

        monkeypatch.setattr(sources, "HF_PART_BYTES", 1000)
        texts = [f"document {i} with some words" for i in range(700)]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
        source = open_source(DataConfig(dataset=str(tmp_path / "saved")), "train")
        assert source is not None
        assert len(source.parts) > 10
        assert read(source) == texts
        (tmp_path / "both").mkdir()
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts[:3]})}).save_to_disk(tmp_path / "both")
        source = open_source(DataConfig(dataset=str(tmp_path / "both")), "train")
        assert source is not None
        assert read(source) == texts[:3]

    def test_what_cannot_be_loaded_is_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "void").mkdir()
        with pytest.raises(
            DataError, match=r"dataset '.*void', split 'train', cannot be loaded .*data\.dataset"
        ) as error:
            open_source(DataConfig(dataset=str(tmp_path / "void")), "train")
        assert "\n" not in str(error.value)

    def test_a_hub_name_without_a_network_fails_at_once(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        import socket

        def no_network(*_: object, **__: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", no_network)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(DataError, match="dataset 'nobody/nothing', split 'train', cannot be loaded"):
            open_source(DataConfig(dataset="nobody/nothing"), "train")
        assert "Retrying" not in capfd.readouterr().err
