"""Shards hold exactly the corpus: whatever the number of ranks and workers, and however often it was killed."""

import json
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data import files, prepare, progress, writer
from rmdm.data.prepare import Prepared, shard_dir
from rmdm.data.shards import TokenRows
from rmdm.data.workers import Encoder
from rmdm.errors import ConfigError, DataError
from tests import warm

WORDS = [f"word{i}" for i in range(300)]
WORD = TokenizerConfig(kind="word")


def texts(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, int(random.integers(1, 40)))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five files of 30 documents, each a part of its own, read in several blocks."""
    monkeypatch.setattr(files, "JOIN_BYTES", 1)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1500)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(5):
        lines = [json.dumps({"text": text}) for text in texts(30, seed=i)]
        (folder / f"{i}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


ALL = [text for i in range(5) for text in texts(30, seed=i)]


def make(config: DataConfig, **options: Any) -> Prepared:
    return prepare.prepare(config, **{"progress": False, **options})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def all_rows(prepared: Prepared, split: Any) -> np.ndarray:
    rows = TokenRows.open(prepared.dir, split, verify=True)
    return rows.take(np.arange(len(rows)))


@pytest.mark.parametrize("wrap", [False, True])
def test_packed_rows_are_the_corpus_cut_in_pieces(corpus: Path, tmp_path: Path, wrap: bool) -> None:
    config = DataConfig(
        path=str(corpus), tokenizer=WORD, length=16, wrap=wrap, holdout=40, dir=str(tmp_path / "shards"), workers=1
    )
    prepared = make(config)
    tokenizer, separator = prepared.tokenizer, prepared.tokenizer.separator_id
    for split, own in (("train", ALL[:-40]), ("valid", ALL[-40:])):
        flat = [token for text in own for token in [*tokenizer.encode(text).tolist(), separator]]
        unit = 14 if wrap else 16
        pieces = [flat[i : i + unit] for i in range(0, len(flat) - unit + 1, unit)]
        expected = [[separator, *piece, separator] for piece in pieces] if wrap else pieces
        assert all_rows(prepared, split).tolist() == expected
        counts = prepared.manifest.splits[split]
        assert (counts.documents, counts.tokens, counts.rows) == (len(own), len(flat), len(pieces))
        assert counts.dropped == len(flat) - unit * len(pieces)


def test_padded_rows_are_single_documents(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(
        path=str(corpus), tokenizer=WORD, layout="padded", length=20, holdout=7, dir=str(tmp_path / "shards"), workers=1
    )
    prepared = make(config)
    tokenizer = prepared.tokenizer
    for split, own in (("train", ALL[:-7]), ("valid", ALL[-7:])):
        expected = []
        for text in own:
            row = [*tokenizer.encode(text).tolist()[:19], tokenizer.separator_id]
            expected.append(row + [tokenizer.pad_id] * (20 - len(row)))
        assert all_rows(prepared, split).tolist() == expected
    cut = sum(len(text.split()) > 19 for text in ALL)
    assert cut > 0
    assert sum(part.truncated for part in prepared.manifest.parts) == cut


def bert_like(folder: Path, words: list[str]) -> Path:
    """A tokenizer folder built like BERT's: [CLS] text [SEP], padded with [PAD]."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_bert_rows_are_padded_and_truncated_as_the_paper_does(corpus: Path, tmp_path: Path) -> None:
    folder = bert_like(tmp_path / "bert", WORDS)
    config = DataConfig(
        path=str(corpus),
        tokenizer=TokenizerConfig(kind="pretrained", name=str(folder), add_special=True),
        layout="padded",
        length=24,
        holdout=10,
        dir=str(tmp_path / "shards"),
        workers=1,
    )
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.enable_truncation(24)
    reference.enable_padding(length=24, pad_id=0, pad_token="[PAD]")
    assert all_rows(make(config), "train").tolist() == [e.ids for e in reference.encode_batch(ALL[:-10])]


def test_a_document_gets_one_separator_even_if_the_tokenizer_adds_it(corpus: Path, tmp_path: Path) -> None:
    folder = bert_like(tmp_path / "bert", WORDS)
    tokenizer = TokenizerConfig(kind="pretrained", name=str(folder), add_special=True)
    config = DataConfig(path=str(corpus), tokenizer=tokenizer, length=8, holdout=9, dir=str(tmp_path / "shards"))
    flat = all_rows(make(config), "train").ravel()
    assert (flat[:-1][flat[1:] == 2] == 3).all()
    assert not ((flat[:-1] == 3) & (flat[1:] == 3)).any()


def test_a_separate_validation_source(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("word1 word2 word3\nword4", encoding="utf-8")
    config = DataConfig(
        path=str(corpus), valid_path=str(tmp_path / "valid.txt"), tokenizer=WORD, length=3, dir=str(tmp_path / "shards")
    )
    prepared = make(config)
    assert prepared.manifest.splits["train"].documents == len(ALL)
    rows = all_rows(prepared, "valid")
    assert [prepared.tokenizer.decode(row) for row in rows] == ["word1 word2 word3", "word4"]


def test_done_is_done(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    first, before = make(config), files_of(tmp_path / "shards")
    second = make(config)
    assert (first.skipped, second.skipped) == (False, True)
    assert second.manifest == first.manifest
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert files_of(tmp_path / "shards") == before


def test_the_number_of_workers_changes_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    config = DataConfig(path=str(corpus), length=8, holdout=9, tokenizer=TokenizerConfig(vocab_size=300))
    for workers in (1, 3):
        make(replace(config, workers=workers, dir=str(tmp_path / f"by-{workers}")))
    assert files_of(tmp_path / "by-1") == files_of(tmp_path / "by-3")


def run_ranks(config: DataConfig, world: int, **options: Any) -> list[Prepared]:
    """All ranks at once, each a thread; the first error of any is raised."""
    barrier = threading.Barrier(world, timeout=60)
    out: list[Prepared | BaseException | None] = [None] * world

    def work(rank: int) -> None:
        try:
            out[rank] = make(config, rank=rank, world=world, barrier=barrier.wait, **options)
        except BaseException as error:
            out[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = []
    for result in out:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
        assert isinstance(result, Prepared)
        results.append(result)
    return results


@pytest.mark.parametrize("world", [2, 3, 7])
def test_the_number_of_ranks_changes_nothing(corpus: Path, tmp_path: Path, world: int) -> None:
    config = DataConfig(path=str(corpus), valid_path=str(corpus / "2.jsonl"), tokenizer=WORD, length=8, workers=1)
    one = make(replace(config, dir=str(tmp_path / "one")))
    many = run_ranks(replace(config, dir=str(tmp_path / "many")), world)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")
    assert all(prepared.manifest == one.manifest for prepared in many)
    assert [prepared.skipped for prepared in run_ranks(replace(config, dir=str(tmp_path / "many")), world)] == [
        True
    ] * world


def test_machines_that_share_no_folder_are_told(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PATIENCE", 0.05)
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "only-here"))
    with pytest.raises(DataError, match=r"not visible here; .* set data\.dir to a folder they share"):
        make(config, rank=1, world=2)


def test_machines_with_different_corpora_are_told(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    gone = RuntimeError("rank 0 stops after laying down the plan")

    def stop() -> None:
        raise gone

    with pytest.raises(RuntimeError, match="rank 0 stops"):
        make(config, barrier=stop)
    (corpus / "5.jsonl").write_text('{"text": "one more"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"holds shards with source \w{12}, this run asks for source \w{12}"):
        make(config, rank=1, world=2)


PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    from rmdm.config import DataConfig, TokenizerConfig
    from rmdm.data import files, prepare, writer

    files.JOIN_BYTES, files.BLOCK_BYTES, writer.CHECKPOINT_BYTES, prepare.SMALL_BYTES = 1, 1500, 2500, 0
    path, folder, workers, kill_at, pause = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
    events = 0

    def event():
        global events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    replace, write = os.replace, writer.PartWriter.add

    def replace_or_die(*names):
        event()
        replace(*names)
        event()

    def write_or_die(self, encoded):
        time.sleep(pause)
        self._files[0].write(encoded.tokens[: len(encoded.tokens) // 2])
        self._files[0].flush()
        event()
        self._files[0].seek(-(len(encoded.tokens) // 2), 1)
        write(self, encoded)

    os.replace, writer.PartWriter.add = replace_or_die, write_or_die
    config = DataConfig(path=path, dir=folder, length=8, holdout=9, workers=int(workers),
                        tokenizer=TokenizerConfig(vocab_size=300))
    prepare.prepare(config, progress=False)
    """
)


def start(
    corpus: Path, folder: Path, *, workers: int = 1, kill_at: int = 0, pause: float = 0
) -> subprocess.Popen[bytes]:
    arguments = [str(corpus), str(folder), str(workers), str(kill_at), str(pause)]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])


def reference_files(corpus: Path, folder: Path) -> dict[str, bytes]:
    make(
        DataConfig(
            path=str(corpus), dir=str(folder), length=8, holdout=9, workers=1, tokenizer=TokenizerConfig(vocab_size=300)
        )
    )
    return files_of(folder)


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """Each run dies at a later moment: in the middle of a write, before or after a rename."""
    expected = reference_files(corpus, tmp_path / "whole")
    folder, kills = tmp_path / "killed", 0
    while start(corpus, folder, kill_at=3 + 3 * kills).wait(60) == -signal.SIGKILL:
        kills += 1
    assert kills >= 5
    assert files_of(folder) == expected


def test_killed_from_outside_with_workers_it_goes_on_and_leaves_nobody_behind(corpus: Path, tmp_path: Path) -> None:
    expected = reference_files(corpus, tmp_path / "whole")
    folder = tmp_path / "killed"
    process = start(corpus, folder, workers=2, pause=0.1)
    warm.until(process, lambda: list(folder.glob("*.progress.json")))
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert len(children) == 2
    assert not (folder / "manifest.json").exists()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.01)
    assert start(corpus, folder, workers=2).wait(60) == 0
    assert files_of(folder) == expected


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_going_on_does_not_tokenise_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_BYTES", 1)
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=1)
    real, calls = Encoder.__call__, 0

    def counted(limit: int) -> Callable[[Encoder, Any], Any]:
        def call(self: Encoder, block: Any) -> Any:
            nonlocal calls
            if calls == limit:
                raise KeyboardInterrupt
            calls += 1
            return real(self, block)

        return call

    monkeypatch.setattr(Encoder, "__call__", counted(10))
    with pytest.raises(KeyboardInterrupt):
        make(config)
    monkeypatch.setattr(Encoder, "__call__", counted(-1))
    make(config)
    resumed, calls = calls, 0
    make(replace(config, dir=str(tmp_path / "whole")))
    assert resumed == calls > 15
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "whole")


def test_a_finished_part_that_was_cut_is_made_again(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    make(config)
    expected = files_of(tmp_path / "shards")
    shard = tmp_path / "shards" / "part-00001.tokens"
    shard.write_bytes(shard.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"part-00001\.tokens has \d+ bytes, its manifest says \d+"):
        make(config)
    (tmp_path / "shards" / "manifest.json").unlink()
    make(config)
    assert files_of(tmp_path / "shards") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 16}, "holds shards with length 8, this run asks for length 16; set another data.dir, or delete"),
        ({"layout": "padded"}, "holds shards with layout packed, this run asks for layout padded"),
        ({"wrap": True}, "holds shards with wrap False, this run asks for wrap True"),
        ({"holdout": 10}, "holds shards with holdout 9, this run asks for holdout 10"),
        (
            {"tokenizer": TokenizerConfig(vocab_size=300)},
            "with tokenizer word, this run asks for tokenizer bpe",
        ),
        ({"column": "body"}, "holds shards with source .*, this run asks for source"),
    ],
)
def test_shards_made_with_other_settings_are_never_used(
    corpus: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    make(config)
    before = files_of(tmp_path / "shards")
    with pytest.raises(DataError, match=message):
        make(replace(config, **change))
    assert files_of(tmp_path / "shards") == before


def test_a_tokenizer_that_changed_under_its_name_is_noticed(corpus: Path, tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(kind="pretrained", name=str(bert_like(tmp_path / "bert", WORDS)))
    config = DataConfig(path=str(corpus), tokenizer=tokenizer, length=8, holdout=9, dir=str(tmp_path / "shards"))
    make(config)
    # The same tokenizer elsewhere is the same tokenizer.
    moved = bert_like(tmp_path / "moved", WORDS)
    assert make(replace(config, tokenizer=replace(tokenizer, name=str(moved)))).skipped
    bert_like(tmp_path / "bert", WORDS[1:])
    with pytest.raises(
        DataError, match=r"with tokenizer .*bert \(\w{12}\), this run asks for tokenizer .*bert \(\w{12}\)"
    ):
        make(config)


def test_shards_serve_without_their_source(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    make(config)
    corpus.rename(tmp_path / "elsewhere")
    said: list[str] = []
    assert prepare.prepare(config, log=said.append).skipped
    assert "their source is not at hand" in said[0]
    with pytest.raises(DataError, match="length 8, this run asks for length 9"):
        make(replace(config, length=9))
    with pytest.raises(DataError, match="does not exist"):
        make(replace(config, dir=str(tmp_path / "new")))


def test_the_default_folder_is_named_after_all_that_matters(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = DataConfig(name="toy", path=str(corpus), tokenizer=WORD, length=8, holdout=9)
    assert make(config).dir == shard_dir(config)
    assert shard_dir(config).parent == Path("data")
    assert shard_dir(config).name.startswith("toy-")
    others = [
        replace(config, length=9),
        replace(config, wrap=True),
        replace(config, layout="padded"),
        replace(config, holdout=8),
        replace(config, tokenizer=TokenizerConfig()),
        replace(config, path=str(corpus / "1.jsonl")),
    ]
    assert len({shard_dir(c) for c in [config, *others]}) == 7
    assert shard_dir(replace(config, workers=3, pad_in_loss=False)) == shard_dir(config)


def test_corpora_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    config = DataConfig(path=str(path), tokenizer=WORD, length=8, holdout=1, dir=str(tmp_path / "shards"))
    with pytest.raises(DataError, match=r"corpus\.txt does not exist"):
        make(config)
    for number, content in enumerate(["", "\n  \n\n"]):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"no documents in .*corpus\.txt"):
            make(replace(config, dir=str(tmp_path / f"blank-{number}")))
    path.write_text("a b c\nd e\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"the corpus has 4 tokens, fewer than one row of data\.length=8; lower data"):
        make(config)
    with pytest.raises(DataError, match=r"data\.holdout=2 leaves nothing to train on: .* has 2 documents; lower"):
        make(replace(config, holdout=2))
    with pytest.raises(
        DataError, match=r"the held-out split has 3 tokens, fewer than one row of data\.length=4; .*holdout"
    ):
        make(replace(config, length=4))
    # What was tokenised is of use as soon as the settings fit.
    prepared = make(replace(config, length=3))
    assert [prepared.tokenizer.decode(row) for row in all_rows(prepared, "train")] == ["a b c"]
    without = make(replace(config, holdout=0, dir=str(tmp_path / "no-holdout"), length=7))
    assert without.manifest.splits["valid"].rows == 0


def test_a_folder_made_for_bad_input_goes_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given input that cannot be used, when nothing made of it is of use later, then no folder is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    tiny = TokenizerConfig(vocab_size=10)
    blank = str(tmp_path / "empty.txt")
    for bad in (
        DataConfig(path=blank, tokenizer=WORD, length=8),
        DataConfig(path=blank, tokenizer=WORD, length=8, dir="named"),
        DataConfig(path=str(tmp_path / "latin.txt"), tokenizer=WORD, length=8),
        DataConfig(path=str(corpus), tokenizer=tiny, length=8),
        DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=10**6),  # its folder is named after the holdout
        DataConfig(path=str(corpus), tokenizer=WORD, length=8, valid_path=blank, dir="named"),
    ):
        with pytest.raises((ConfigError, DataError)):
            make(bad)
        assert not [*(tmp_path / "data").glob("*"), *tmp_path.glob("named")]


def test_a_folder_of_another_call_or_of_use_stays(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    mine = DataConfig(path=str(tmp_path / "empty.txt"), tokenizer=WORD, length=8, dir=str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="no documents"):
        make(mine)
    assert (tmp_path / "mine").is_dir()
    named = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=10**6, dir=str(tmp_path / "shards"))
    with pytest.raises(DataError, match="leaves nothing to train on"):
        make(named)
    assert (tmp_path / "shards" / "part-00004.json").is_file()
    killed = replace(named, holdout=9, dir=str(tmp_path / "killed"))
    with pytest.raises(KeyboardInterrupt):
        make(killed, barrier=lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert (tmp_path / "killed" / "tokenizer").is_dir()


def test_an_unfinished_folder_of_another_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=10**6, holdout=9, dir=str(tmp_path / "shards"))
    with pytest.raises(DataError, match="fewer than one row"):
        make(config)
    with pytest.raises(DataError, match="holds shards with tokenizer word, this run asks for tokenizer bpe"):
        make(replace(config, length=8, tokenizer=TokenizerConfig(vocab_size=300)))
    assert not make(replace(config, length=8)).skipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 1}, r"data\.length=1 is too short"),
        ({"length": 2, "wrap": True}, r"data\.length=2 is too short for a row; use at least 3"),
        ({"holdout": -1}, r"data\.holdout=-1 is negative"),
        ({"workers": 0}, r"data\.workers=0: use at least 1 process"),
    ],
)
def test_settings_that_cannot_be(corpus: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(replace(DataConfig(path=str(corpus)), **change))


def test_bad_input_found_by_a_worker_is_one_line(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=2)
    make(replace(config, dir=str(tmp_path / "fine")))
    with open(corpus / "3.jsonl", "a", encoding="utf-8") as file:
        file.write("\nnot json\n")
    # The tokenizer is there already, so that it is a worker that meets the bad line.
    fine = TokenizerConfig(kind="pretrained", name=str(tmp_path / "fine" / "tokenizer"), separator="<eos>")
    with pytest.raises(DataError, match=r"3\.jsonl, line 31 is not JSON") as error:
        make(replace(config, tokenizer=fine))
    assert "\n" not in str(error.value)


def test_a_worker_that_dies_is_one_line(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    real = subprocess.Popen

    def short_lived(command: list[str], **options: Any) -> Any:
        return real([*command[:-1], "import sys; sys.stdin.buffer.read(10); sys.exit(9)"], **options)

    monkeypatch.setattr(subprocess, "Popen", short_lived)
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=2)
    with pytest.raises(DataError, match=r"a tokenising process ended with status 9, .*lower data\.workers \(now 2\)"):
        make(config)
    assert (tmp_path / "shards" / "plan.json").is_file(), "the same command goes on there"


def test_a_full_disk_is_one_line_and_costs_nothing(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=1)
    with pytest.raises(RuntimeError, match="stop"):
        make(config, barrier=lambda: (_ for _ in ()).throw(RuntimeError("stop")))  # the tokenizer is written
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write token shards to .* \(File too large\); make room") as error:
            make(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    make(config)
    make(replace(config, dir=str(tmp_path / "whole")))
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "whole")


def test_reading_that_fails_for_a_passing_reason_costs_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=1)
    real = files.FilePart._blocks_of

    def once_tokenising(part: files.FilePart, piece: files.FileRange) -> Any:
        if piece.path.endswith("3.jsonl") and (tmp_path / "shards" / "tokenizer").exists():
            raise OSError(5, "Input/output error")
        return real(part, piece)

    monkeypatch.setattr(files.FilePart, "_blocks_of", once_tokenising)
    message = r"3\.jsonl cannot be read \(Input/output error\); check the file; the same command goes on"
    with pytest.raises(DataError, match=message):
        make(config)
    assert (tmp_path / "shards" / "part-00002.json").is_file()
    monkeypatch.undo()
    monkeypatch.setattr(files, "JOIN_BYTES", 1)
    make(config)
    make(replace(config, dir=str(tmp_path / "whole")))
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "whole")


def test_places_that_cannot_be_a_folder_of_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_make", lambda folder: pytest.fail(f"{folder} was about to be filled"))
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9)
    with pytest.raises(ConfigError, match=r"data\.dir=/ is the root of the disk; name a folder for the shards alone"):
        make(replace(config, dir="/"))
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path / "loop", tmp_path / "loop" / "shards"):
        with pytest.raises(ConfigError, match=rf"{place} is a link that leads back to itself; name another folder"):
            make(replace(config, dir=str(place)))


def test_two_processes_do_not_write_one_folder(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"))
    (tmp_path / "shards").mkdir()
    other = writer.PartWriter(tmp_path / "shards", "part-00000", "uint16")
    with pytest.raises(DataError, match=r"part-00000\.tokens is being written by another process"):
        make(config)
    other.close()
    make(config)


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_who_comes_second_waits_and_uses_what_the_first_made(
    corpus: Path, tmp_path: Path, world: int, is_killed: bool
) -> None:
    expected = reference_files(corpus, tmp_path / "whole")
    folder = tmp_path / "shards"
    first = start(corpus, folder, pause=0.1)
    warm.until(first, lambda: list(folder.glob("*.tokens")))
    said: list[str] = []

    def log(text: str) -> None:
        said.append(text)
        if is_killed and "waiting" in text:
            first.kill()

    tokenizer = TokenizerConfig(vocab_size=300)
    config = DataConfig(path=str(corpus), dir=str(folder), length=8, holdout=9, workers=1, tokenizer=tokenizer)
    prepared = run_ranks(config, world, progress=True, log=log)
    assert first.wait(60) == (-signal.SIGKILL if is_killed else 0)
    assert [one.skipped for one in prepared] == [not is_killed] * world
    assert f"{folder} is being made by another process (pid {first.pid} on " in said[0]
    assert sum("waiting for it" in line for line in said) == 1
    assert files_of(folder) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "shards", "whole"]


def test_storyworld_from_end_to_end(tmp_path: Path) -> None:
    from rmdm.data.storyworld import storyworld

    config = DataConfig(
        storyworld="mini", stories=300, holdout=50, layout="padded", length=72, tokenizer=WORD, dir=str(tmp_path / "s")
    )
    prepared = make(config)
    stories = [prepared.tokenizer.decode(row) for row in all_rows(prepared, "valid")]
    assert stories == [storyworld("mini").story(0, i) for i in range(250, 300)]


def test_progress_is_told_in_lines_without_a_terminal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    said: list[str] = []
    config = DataConfig(path=str(corpus), tokenizer=WORD, length=8, holdout=9, dir=str(tmp_path / "shards"), workers=1)
    prepare.prepare(config, log=said.append)
    shares = [int(line.split("%")[0].split()[-1]) for line in said if line.startswith("tokenising:")]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert said[-1].startswith(str(tmp_path / "shards"))
    assert "141 documents" in said[-1]
    silent: list[str] = []
    prepare.prepare(config, log=silent.append, progress=False)
    assert silent == []


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("w0 w65535 w65536 w69999\nw1\n", encoding="utf-8")
    backend = tokenizers.Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(70_000)}, "</s>": 70_000}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = DataConfig(
        path=str(tmp_path / "corpus.txt"),
        tokenizer=TokenizerConfig(kind="pretrained", name=str(tmp_path / "tokenizer.json")),
        length=5,
        holdout=0,
        dir=str(tmp_path / "shards"),
    )
    prepared = make(config)
    assert prepared.manifest.dtype == "uint32"
    assert all_rows(prepared, "train").tolist() == [[0, 65535, 65536, 69999, 70000]]
