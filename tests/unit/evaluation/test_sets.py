"""Sets become rows in which every token is scored once and every byte is counted once."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data.prepare import prepare
from rmdm.data.shards import TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import DataError
from rmdm.evaluation.sets import SETS, Losses, articles, held_out, open_set
from tests.release import WORDS, byte_tokenizer, word_tokenizer

TEXTS = [
    "anna was happy near the river .",
    "Tom saw a naïve café, 日本語 and  two spaces",
    "one day " * 30,
    "he was sad .",
]
LAYOUTS = [("packed", False), ("packed", True), ("padded", False)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    return path


def data_of(layout: str, wrap: bool, length: int = 16) -> DataConfig:
    return DataConfig(layout=layout, wrap=wrap, length=length)


@pytest.mark.parametrize(("layout", "wrap"), LAYOUTS)
@pytest.mark.parametrize("length", [5, 16, 37])
def test_every_token_is_scored_once_and_in_order(file, layout, wrap, length):
    tokenizer = byte_tokenizer()
    rows = open_set(str(file), tokenizer, data_of(layout, wrap, length))
    scored = rows.text_NL.copy()
    if wrap:
        assert (rows.x_NL[:, [0, -1]] == tokenizer.separator_id).all()
        scored[:, [0, -1]] = False
    expected = np.concatenate([[*tokenizer.encode(text), tokenizer.separator_id] for text in TEXTS])
    assert rows.x_NL[scored].tolist() == expected.tolist()


@pytest.mark.parametrize(("layout", "wrap"), LAYOUTS)
def test_bytes_are_those_of_the_text_and_belong_to_rows(file, layout, wrap):
    rows = open_set(str(file), byte_tokenizer(), data_of(layout, wrap))
    assert rows.bytes_N.sum() == sum(len(text.encode()) for text in TEXTS)
    assert rows.lossy is None
    few = rows.at_most(3)
    assert len(few) == 3
    assert few.bytes_N.sum() < rows.bytes_N.sum()
    texts, _ = byte_tokenizer().spans(rows.x_NL.astype(np.int64), rows.lengths_N)
    whole = [row for row in range(len(rows)) if rows.scored_NL[row].all() and texts[row].isascii()]
    assert whole
    for row in whole:
        assert rows.bytes_N[row] == len(texts[row].replace("\n", ""))


def test_the_last_packed_row_begins_with_tokens_that_are_given(file):
    rows = open_set(str(file), byte_tokenizer(), data_of("packed", False))
    assert rows.scored_NL[:-1].all()
    given = ~rows.scored_NL[-1]
    assert 0 < given.sum() < 16
    assert rows.x_NL[-1, given].tolist() == rows.x_NL[-2, -given.sum() :].tolist()


def test_documents_longer_than_a_padded_row_go_on_in_the_next(file):
    tokenizer = word_tokenizer()
    rows = open_set(str(file), tokenizer, data_of("padded", False))
    assert rows.scored_NL.all()
    lengths = [len(tokenizer.encode(text)) + 1 for text in TEXTS]
    assert lengths[2] == 61
    assert rows.lengths_N.tolist() == [lengths[0], lengths[1], 16, 16, 16, 13, lengths[3]]
    assert (rows.x_NL[rows.lengths_N < 16, -1] == tokenizer.pad_id).all()


def test_a_set_shorter_than_one_row_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("anna was happy\n")
    with pytest.raises(DataError, match=r"short.txt' has 4 tokens, fewer than one row of 16; use a longer text"):
        open_set(str(short), word_tokenizer(), data_of("packed", False))
    assert len(open_set(str(short), word_tokenizer(), data_of("padded", False))) == 1


def test_a_set_without_text_is_refused(tmp_path):
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n\n")
    with pytest.raises(DataError, match="has no text to score"):
        open_set(str(blank), word_tokenizer(), data_of("packed", False))


def test_named_sets_are_read_from_local_copies(tmp_path, monkeypatch):
    (tmp_path / "wikitext2-test.jsonl").write_text(json.dumps({"text": "anna was happy near the river"}))
    (tmp_path / "owt-val.txt").write_text("tom was sad")
    (tmp_path / "notes.md").write_text("no set")
    data = data_of("padded", False)
    found = open_set("wikitext", word_tokenizer(), data, folder=tmp_path)
    assert found.lengths_N.tolist() == [7]
    monkeypatch.setenv("RMDM_EVAL_DATA", str(tmp_path))
    assert open_set("openwebtext", word_tokenizer(), data).lengths_N.tolist() == [4]


def test_local_copies_are_taken_whole_or_not_at_all(tmp_path):
    data = data_of("padded", False)
    for name in ("wikitext-1.txt", "wikitext-2.txt"):
        (tmp_path / name).write_text("anna was happy\n")
    with pytest.raises(DataError, match=r"may be any of wikitext-1.txt, wikitext-2.txt in .*; leave one of them there"):
        open_set("wikitext", word_tokenizer(), data, folder=tmp_path)
    (tmp_path / "lambada").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "lambada" / name).write_text("anna was happy\n")
    assert len(open_set("lambada", word_tokenizer(), data, folder=tmp_path)) == 2


def test_local_copies_are_cut_to_documents_as_asked(tmp_path):
    data = data_of("padded", False)
    (tmp_path / "wikitext.txt").write_text(" = One = \n anna was happy \n = Two = \n tom was sad \n")
    (tmp_path / "lm1b.txt").write_text("anna was happy\ntom was sad\n")
    assert len(open_set("wikitext", word_tokenizer(), data, folder=tmp_path)) == 2, "lines are joined to articles"
    assert len(open_set("wikitext", word_tokenizer(), data, folder=tmp_path, document="file")) == 1
    assert len(open_set("lm1b", word_tokenizer(), data, folder=tmp_path)) == 2
    assert len(open_set("lm1b", word_tokenizer(), data, folder=tmp_path, document="file")) == 1
    (tmp_path / "arxiv.jsonl").write_text(json.dumps({"article": "tom was sad"}))
    with pytest.raises(DataError, match=r"no column 'text'; set --column to one of: article"):
        open_set("arxiv", word_tokenizer(), data, folder=tmp_path)
    assert len(open_set("arxiv", word_tokenizer(), data, folder=tmp_path, column="article")) == 1


def test_what_cannot_be_had_is_said_with_the_ways_to_get_it(tmp_path, monkeypatch):
    data = data_of("padded", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"set 'agnews': .*--data-dir a folder with a file agnews\*"):
        open_set("agnews", word_tokenizer(), data, folder=tmp_path)
    with pytest.raises(DataError, match="'wikitxt' is no set, file or folder; did you mean 'wikitext'"):
        open_set("wikitxt", word_tokenizer(), data)
    with pytest.raises(DataError, match="/no/such/folder is no folder"):
        open_set("lm1b", word_tokenizer(), data, folder=tmp_path / "no/such/folder")
    with pytest.raises(DataError, match=r"held-out rows are not at hand .*name a set with --data"):
        open_set("valid", word_tokenizer(), dataclasses.replace(data, dir=str(tmp_path / "gone")))


def test_every_named_set_names_a_place_on_the_hub():
    assert set(SETS) == {"wikitext", "lm1b", "lambada", "agnews", "pubmed", "arxiv", "openwebtext"}
    assert all(named.dataset.count("/") == 1 for named in SETS.values())


def test_wikitext_s_lines_are_joined_to_articles():
    lines = [" = One = \n", " first \n", " = = Part = = \n", " more \n", " = Two = \n", " last \n"]
    assert list(articles(lines)) == ["".join(lines[:4]), "".join(lines[4:])]


def test_tokenizers_that_lose_text_are_marked(file):
    data = data_of("padded", False)
    assert "unknown words" in open_set(str(file), word_tokenizer(), data).lossy
    assert open_set(str(file), lower_case(), data).lossy == "letter case is lost in 1 of 4 documents"
    losses = Losses(lower_case())
    losses.add_rows(np.array([[3, 4]]), np.array([[True, True]]))
    assert losses.reason() == "letter case is lost"


def lower_case() -> Tokenizer:
    vocabulary = ["<pad>", "<eos>", "<unk>", *sorted({word for text in TEXTS for word in text.lower().split()})]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, name="lower", separator_id=1, pad_id=0)


@pytest.mark.parametrize("wrap", [False, True])
def test_nothing_of_a_packed_held_out_split_is_left_out(tmp_path, wrap):
    texts = [" ".join(WORDS[i % 7 : i % 7 + 9]) + f" x{i}" for i in range(40)]
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    data = DataConfig(
        path=str(tmp_path / "corpus.txt"), holdout=15, layout="packed", length=16, wrap=wrap,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=300), dir=str(tmp_path / "shards"),
    )  # fmt: skip
    prepared = prepare(data, progress=False)
    kept = TokenRows.open(prepared.dir, "valid").counts
    assert kept.dropped > 0, "the test needs a partial row"
    rows = held_out(prepared.tokenizer, data)
    scored = rows.scored_NL.copy()
    if wrap:
        scored[:, [0, -1]] = False
    stream = np.concatenate([[*prepared.tokenizer.encode(text), 1] for text in texts[-15:]])
    assert rows.x_NL[scored].tolist() == stream.tolist()
    assert rows.bytes_N.sum() == sum(map(len, texts[-15:]))
    assert rows.lossy is None
    ends = np.cumsum([len(prepared.tokenizer.encode(text)) + 1 for text in texts[-15:]])
    starts = np.arange(len(rows)) * (14 if wrap else 16)
    assert rows.document_N.tolist() == np.searchsorted(ends, starts, side="right").tolist()
    file = tmp_path / "held-out.txt"
    file.write_text("\n".join(texts[-15:]))
    same = open_set(str(file), prepared.tokenizer, data)
    assert same.document_N.tolist() == rows.document_N.tolist()
    for count in (1, 4, len(rows)):
        few, those = held_out(prepared.tokenizer, data, count), rows.at_most(count)
        assert few.set_rows == len(rows)
        for name in ("x_NL", "lengths_N", "scored_NL", "bytes_N", "document_N"):
            assert getattr(few, name).tolist() == getattr(those, name).tolist(), name


def test_held_out_bytes_of_tokens_without_white_space_are_marked(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the dog's bone (no. {i}) is here, isn't it?" for i in range(40)))
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789"])
    }
    vocabulary |= {f"##{sign}": len(vocabulary) + i for i, sign in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")}
    vocabulary |= {sign: len(vocabulary) + i for i, sign in enumerate("().,'?")}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    data = DataConfig(
        path=str(corpus), holdout=10, layout="packed", length=16, dir=str(tmp_path / "shards"),
        tokenizer=TokenizerConfig(kind="pretrained", name=str(tmp_path / "tokenizer.json"), separator="[SEP]"),
    )  # fmt: skip
    prepared = prepare(data, progress=False)
    assert "white space" in held_out(prepared.tokenizer, data).lossy
    assert open_set(str(corpus), prepared.tokenizer, data).lossy is None


def test_held_out_stories_are_lossless_and_counted_without_pad(shards):
    tokenizer = Tokenizer.load(shards / "tokenizer")
    rows = held_out(tokenizer, DataConfig(dir=str(shards)))
    texts = [tokenizer.decode(row, stop_at_separator=True) for row in rows.x_NL]
    assert rows.bytes_N.tolist() == [len(text) for text in texts]
    assert rows.is_padded
    assert rows.lossy is None
    with pytest.raises(DataError, match="made with another tokenizer"):
        held_out(word_tokenizer(), DataConfig(dir=str(shards)))
