"""Tokenizers of all three kinds: same ids after saving, text survives, and the special ids are what is promised."""

import itertools
import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data import tokenizer as module
from rmdm.data.sources import Source, open_source
from rmdm.data.tokenizer import Tokenizer, build_tokenizer, load_pretrained, sample_texts
from rmdm.errors import ConfigError, DataError, RMDMError

BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "mat", "on", "##s", ".", "dog"]


def bert_backend() -> tokenizers.Tokenizer:
    """A tiny tokenizer built like BERT's."""
    vocabulary = {word: i for i, word in enumerate(BERT_WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(BERT_WORDS[:5])
    return backend


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    folder.mkdir()
    backend = bert_backend()
    # Published tokenizers carry such settings; they must not cut or pad what we encode.
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    named = {"sep_token": "[SEP]", "pad_token": {"content": "[PAD]"}, "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def corpus(tmp_path: Path, texts: list[str]) -> Source:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    source = open_source(DataConfig(path=str(path)), "train")
    assert source is not None
    return source


ENGLISH = [f"The quick brown fox number {i} jumps over the lazy dog; Zürich 東京 🙂." for i in range(200)]


def test_bpe_is_lossless_and_has_the_size_asked_for(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=400), corpus(tmp_path, ENGLISH))
    assert tokenizer.size == 400
    assert tokenizer.mask_id == 400
    assert (tokenizer.pad_id, tokenizer.separator_id) == (0, 1)
    for text in (ENGLISH[3], "  Unseen\ttext,\n\nçà et là — ☃ ", "CASED cased"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(ENGLISH[0])) < len(ENGLISH[0].encode()) / 2


def test_bpe_training_is_deterministic(tmp_path: Path) -> None:
    source = corpus(tmp_path, ENGLISH)
    one, two = (build_tokenizer(TokenizerConfig(vocab_size=350), source) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != build_tokenizer(TokenizerConfig(vocab_size=351), source).fingerprint


def test_bpe_reads_its_share_of_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmdm.data import files

    monkeypatch.setattr(files, "JOIN_BYTES", 1)
    for name, count in (("a", 1), ("b", 100), ("c", 100)):
        (tmp_path / f"{name}.txt").write_text(f"{name * 9}\n" * count, encoding="utf-8")
    source = open_source(DataConfig(path=str(tmp_path)), "train")
    assert source is not None
    texts = [text for batch in sample_texts(source, 90) for text in batch]
    # The first part has 9 bytes of its share of 30; what it leaves goes to the others.
    assert sum(map(len, texts)) == 90
    assert [sum(name in text for text in texts) for name in "abc"] == [1, 5, 5]
    everything = [text for batch in sample_texts(source, 10**6) for text in batch]
    assert len(everything) == 201


def test_words_of_a_corpus(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="word"), corpus(tmp_path, ["a cat sat .", "a dog ."]))
    assert tokenizer.size == 3 + 5
    assert tokenizer.decode(tokenizer.encode("a dog sat .")) == "a dog sat ."
    assert tokenizer.decode(tokenizer.encode("a bird .")) == "a <unk> ."


def test_words_of_storyworld_need_no_reading() -> None:
    from rmdm.data.storyworld import storyworld

    source = open_source(DataConfig(storyworld="mini", stories=10**9), "train")
    assert source is not None
    tokenizer = build_tokenizer(TokenizerConfig(kind="word"), source)
    world = storyworld("mini")
    assert tokenizer.size == 3 + len(world.vocabulary)
    story = world.story(0, 5)
    assert tokenizer.decode(tokenizer.encode(story)) == story
    assert len(tokenizer.encode(story)) == len(story.split())


def test_pretrained_folder_and_file(bert: Path) -> None:
    for name in (str(bert), str(bert / "tokenizer.json")):
        tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=name))
        assert (tokenizer.size, tokenizer.mask_id) == (13, 13)
        assert (tokenizer.separator_id, tokenizer.pad_id) == (3, 0)
        ids = tokenizer.encode("The cats sat on the mat.")
        assert [BERT_WORDS[i] for i in ids] == ["the", "cat", "##s", "sat", "on", "the", "mat", "."]
    framed = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert), add_special=True))
    assert framed.encode("cat").tolist() == [2, 6, 3]
    assert framed.fingerprint != tokenizer.fingerprint


def test_pretrained_separator_can_be_chosen(bert: Path) -> None:
    chosen = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert), separator="[CLS]"))
    assert chosen.separator_id == 2
    with pytest.raises(ConfigError, match=r"separator='\[SEPP\]' is no token of .*did you mean '\[SEP\]'"):
        load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert), separator="[SEPP]"))


def test_a_tokenizer_without_a_pad_pads_with_its_separator(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    backend.save(str(tmp_path / "gpt.json"))
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(tmp_path / "gpt.json")))
    assert tokenizer.pad_id == tokenizer.separator_id == 1


def test_a_folder_of_vocabulary_files_alone(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(BERT_WORDS) + "\n", encoding="utf-8")
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(tmp_path)))
    assert (tokenizer.separator_id, tokenizer.pad_id, tokenizer.size) == (3, 0, 13)
    assert [BERT_WORDS[i] for i in tokenizer.encode("The cats sat.")] == ["the", "cat", "##s", "sat", "."]


def test_batches_equal_single_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=400), corpus(tmp_path, ENGLISH))
    monkeypatch.setattr(module, "ENCODE_CHARS", 150)
    texts = ["", *ENGLISH[:9], "x", "", ENGLISH[10] * 5]
    ids, lengths = tokenizer.encode_batch(texts)
    assert np.split(ids, np.cumsum(lengths))[-1].size == 0
    for text, own in zip(texts, np.split(ids, np.cumsum(lengths)), strict=False):
        assert own.tolist() == tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert [len(array) for array in tokenizer.encode_batch([])] == [0, 0]


def test_long_documents_are_cut_where_words_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """text8 is one line of 100 MB: encoded in pieces, it must give the ids of the whole."""
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=400), corpus(tmp_path, ENGLISH))
    text = "Some words, 1 2  3 and\n\nmore.  Ümlaut words " * 40 + "unbroken" * 60 + " end"
    whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(module, "ENCODE_CHARS", 100)
    monkeypatch.setattr(module, "LONG_CHARS", 300)
    pieces = list(module._pieces(text))
    assert len(pieces) > 10
    assert "".join(pieces) == text
    assert tokenizer.encode(text).tolist() == whole


def test_decoding_rows(bert: Path) -> None:
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert)))
    row = np.array([2, 5, 6, 3, 5, 12, 3, 0, 0])
    assert tokenizer.decode(row) == "the cat\nthe dog"
    assert tokenizer.decode(row, separator=" | ") == "the cat | the dog"
    assert tokenizer.decode(row, stop_at_separator=True) == "the cat"
    assert tokenizer.decode([3, 5, 6], stop_at_separator=True) == ""
    masked = np.array([5, 13, 13, 7, 13])
    assert tokenizer.decode(masked) == "the sat"
    assert tokenizer.decode(masked, mask="_") == "the _ _ sat _"


def test_saving_and_loading_changes_nothing(bert: Path, tmp_path: Path) -> None:
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert), add_special=True))
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    for name in ("name", "fingerprint", "size", "mask_id", "pad_id", "separator_id", "add_special"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.encode("the dogs").tolist() == tokenizer.encode("the dogs").tolist()
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["tokenizer.json", "tokenizer_meta.json"]


def test_damaged_saves_are_found(bert: Path, tmp_path: Path) -> None:
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert)))
    with pytest.raises(DataError, match=r"no tokenizer in .*saved: tokenizer\.json is missing"):
        Tokenizer.load(tmp_path / "saved")
    tokenizer.save(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.json"
    good = file.read_text(encoding="utf-8")
    file.write_text(good.replace('"dog"', '"hog"'), encoding="utf-8")
    with pytest.raises(DataError, match="was changed after it was saved"):
        Tokenizer.load(tmp_path / "saved")
    file.write_text(good[:100], encoding="utf-8")
    with pytest.raises(DataError, match="is damaged") as error:
        Tokenizer.load(tmp_path / "saved")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pretrained"}, r"needs data\.tokenizer\.name"),
        ({"kind": "bpe", "vocab_size": 100}, r"vocab_size=100 is below 258"),
        ({"kind": "bpe", "name": "x"}, r"kind='bpe' takes no name, add_special or separator"),
        ({"kind": "word", "separator": "x"}, r"kind='word' takes no name, add_special or separator"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(TokenizerConfig(**options), corpus(tmp_path, ENGLISH))  # type: ignore[arg-type]


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    (tmp_path / "void").mkdir()
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    for name, message in (
        ("broken.json", "is no tokenizer"),
        ("void", r"cannot be loaded .* tokenizer\.json"),
        ("words", r"cannot be loaded \(there is no vocabulary\)"),
    ):
        with pytest.raises(RMDMError, match=message) as error:
            load_pretrained(TokenizerConfig(kind="pretrained", name=str(tmp_path / name)))
        assert "\n" not in str(error.value)


def test_a_hub_name_without_a_network_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import socket

    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"tokenizer 'nobody/nothing' cannot be loaded .*; check the name"):
        load_pretrained(TokenizerConfig(kind="pretrained", name="nobody/nothing"))
    assert "Retrying" not in capfd.readouterr().err


def spelled(tokenizer: Tokenizer, row: list[int], length: int | None = None) -> list[str]:
    """The stretch of text each token wrote; together they are the whole text."""
    texts, edges = tokenizer.spans(np.array([row]), None if length is None else np.array([length]))
    assert (edges[0, 0], edges[0, -1]) == (0, len(texts[0]))
    assert (np.diff(edges[0]) >= 0).all()
    return [texts[0][a:b] for a, b in itertools.pairwise(edges[0].tolist())]


def test_spans_of_bytes_give_a_character_to_its_first_byte(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=258), corpus(tmp_path, ["a"]))  # one token a byte
    row = tokenizer.encode("aü🙂b").tolist()
    assert spelled(tokenizer, row) == ["a", "ü", "", "🙂", "", "", "", "b"]
    # Cut inside a character, at either end: the half is left out.
    assert spelled(tokenizer, row[2:]) == ["", "🙂", "", "", "", "b"]
    assert spelled(tokenizer, row[4:7]) == ["", "", ""]
    assert spelled(tokenizer, row[:5]) == ["a", "ü", "", "", ""]
    # Two halves in two documents, or in two rows, do not join.
    assert spelled(tokenizer, [*row[:2], 1, *row[2:3], *row[7:]]) == ["a", "", "\n", "", "b"]
    texts, edges = tokenizer.spans(np.array([row[:2], row[2:4]]))
    assert (texts, edges.tolist()) == (["a", ""], [[0, 1, 1], [0, 0, 0]])


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abc \n\tüß東京🙂é", max_size=12), min_size=1, max_size=5),
    cut=st.integers(0, 6),
    length=st.integers(1, 40),
)
def test_spans_spell_what_decoding_gives(texts: list[str], cut: int, length: int) -> None:
    tokenizer = trained_once()
    ids = [i for text in texts for i in [*tokenizer.encode(text).tolist(), tokenizer.separator_id]][cut:][:length]
    row = ids + [tokenizer.pad_id] * (length - len(ids))
    assert "".join(spelled(tokenizer, row)) == tokenizer.decode(row).replace("\ufffd", "")
    assert spelled(tokenizer, row)[: len(ids)] == spelled(tokenizer, ids)


@cache
def trained_once() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return build_tokenizer(TokenizerConfig(vocab_size=400), corpus(Path(folder), ENGLISH))


def test_spans_of_words_and_word_pieces(bert: Path, tmp_path: Path) -> None:
    framed = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert), add_special=True))
    row = [2, 5, 6, 10, 11, 3, 2, 12, 10, 3, 0, 0]
    assert spelled(framed, row) == ["", "the", " cat", "s", " .", "\n", "", "dog", "s", "", "", ""]
    assert spelled(framed, [10, 6, 3, 3, 13, 6]) == ["s", " cat", "\n", "", "", "cat"]
    assert spelled(framed, [6, 3, 6, 6], length=3) == ["cat", "\n", "cat", ""]
    words = build_tokenizer(TokenizerConfig(kind="word"), corpus(tmp_path, ["a cat sat .", "a dog ."]))
    assert spelled(words, words.encode("a bird sat .").tolist()) == ["a", " <unk>", " sat", " ."]
    assert spelled(words, [1, 1, 0]) == ["", "", ""]


def test_spans_of_sentence_pieces() -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁c": 3, "at": 4, "<0xC3>": 5, "<0xBC>": 6, "▁": 7}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, name="llama", separator_id=1, pad_id=1)
    row = [2, 3, 4, 7, 5, 6, 1, 2, 4]
    assert spelled(tokenizer, row) == ["the", " c", "at", " ", "ü", "", "\n", "the", "at"]
    assert "".join(spelled(tokenizer, row)) == tokenizer.decode(row)


def test_control_tokens_are_those_without_text(bert: Path) -> None:
    tokenizer = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert)))
    control = [
        token for token, is_control in zip([*BERT_WORDS, "mask"], tokenizer.is_control, strict=True) if is_control
    ]
    assert control == ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "mask"]


def test_tokens_inside_a_word_are_told_from_those_that_begin_one(bert: Path, tmp_path: Path) -> None:
    def inside(tokenizer: Tokenizer) -> list[str]:
        return [str(tokenizer.backend.id_to_token(int(id_))) for id_ in np.flatnonzero(tokenizer.is_inside)]

    bpe = trained_once()
    assert len(bpe.is_inside) == bpe.size + 1
    assert {"a", "e", "."} <= set(inside(bpe))
    assert not any(token.startswith("Ġ") or bpe.is_control[bpe.backend.token_to_id(token)] for token in inside(bpe))
    pieces = load_pretrained(TokenizerConfig(kind="pretrained", name=str(bert)))
    pieces.backend.decoder = decoders.WordPiece()
    assert inside(pieces) == ["##s"], "a full stop may stand after a space"
    assert inside(build_tokenizer(TokenizerConfig(kind="word"), corpus(tmp_path, ["a cat sat .", "a dog ."]))) == []
