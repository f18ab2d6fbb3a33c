"""Texts with gaps as rows: what is given is exactly the text, and where it stands is where training would have it."""

import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError
from rmdm.samplers.infill import Page, parse
from tests.release import WORDS, byte_tokenizer, word_tokenizer

WORD, BYTE = word_tokenizer(), byte_tokenizer()
MASK, EOS, PAD = WORD.mask_id, WORD.separator_id, WORD.pad_id


def framed_tokenizer() -> Tokenizer:
    """Words between [CLS] and [SEP], of which [SEP] ends a document."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(names[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return Tokenizer(backend, name="framed", separator_id=2, pad_id=0, add_special=True)


def ids(text: str) -> list[int]:
    return WORD.encode(text).tolist()


def padded(length: int = 8, tokenizer: Tokenizer = WORD) -> Page:
    return Page(tokenizer, length, is_padded=True, wraps=False)


def packed(length: int = 8, tokenizer: Tokenizer = WORD, wraps: bool = False) -> Page:
    return Page(tokenizer, length, is_padded=False, wraps=wraps)


def test_gaps_have_a_size():
    assert parse("The [MASK] is [MASK:12].") == ["The ", 1, " is ", 12, "."]
    assert parse("[MASK][MASK:1]") == ["", 1, "", 1, ""]
    assert parse("none [mask] [MASK") == ["none [mask] [MASK"]


@pytest.mark.parametrize("gap", ["[MASK:]", "[MASK:x]", "[MASK:-1]", "[MASK:1.5]", "[MASK: 2]", "[MASK:²]"])
def test_a_size_that_is_no_number_is_refused(gap):
    with pytest.raises(ConfigError, match=rf"^{re.escape(repr(gap))} names no number of tokens; write \[MASK:3\]"):
        parse(f"a {gap}")


def test_a_gap_of_no_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"'\[MASK:00\]' asks for no token"):
        parse("a [MASK:00]")


def test_a_padded_text_gives_its_end_too():
    pattern = padded().infill("anna was [MASK:2] .")
    assert pattern.x_L.tolist() == [*ids("anna was"), MASK, MASK, *ids("."), EOS, PAD, PAD]
    assert pattern.shown == slice(0, 5)


def test_a_stream_goes_on_after_the_text():
    assert packed().infill("anna was [MASK:2] .").x_L.tolist() == [
        *ids("anna was"),
        MASK,
        MASK,
        *ids("."),
        MASK,
        MASK,
        MASK,
    ]
    wrapped = packed(wraps=True).infill("anna was [MASK:2] .")
    assert wrapped.x_L.tolist() == [EOS, *ids("anna was"), MASK, MASK, *ids("."), MASK, EOS]
    assert wrapped.shown == slice(1, 6)


def test_a_tokenizer_that_frames_documents_frames_the_text():
    tokenizer = framed_tokenizer()
    anna, day = tokenizer.backend.token_to_id("anna"), tokenizer.backend.token_to_id("day")
    pattern = padded(8, tokenizer).infill("anna [MASK:2] day")
    assert pattern.x_L.tolist() == [1, anna, tokenizer.mask_id, tokenizer.mask_id, day, 2, 0, 0]
    assert pattern.shown == slice(1, 5)
    assert padded(8, tokenizer).affix("anna", None, None).x_L.tolist() == [1, anna] + [tokenizer.mask_id] * 6
    assert padded(8, tokenizer).whole("anna day")[0].tolist() == [1, anna, day, 2, 0, 0, 0, 0]
    with pytest.raises(
        ConfigError, match="'xyz' is not in the model's vocabulary of 29; use what its training text has"
    ):
        padded(8, tokenizer).infill("xyz [MASK]")
    assert padded(8, tokenizer).whole("anna xyz")[0].tolist()[:4] == [1, anna, 3, 2]


def test_a_prefix_leaves_everything_after_it_free():
    assert padded().affix("anna was", None, None).x_L.tolist() == [*ids("anna was"), *[MASK] * 6]
    assert packed(wraps=True).affix("anna", None, None).x_L.tolist() == [EOS, *ids("anna"), *[MASK] * 5, EOS]
    assert padded().affix(None, None, None).x_L.tolist() == [MASK] * 8
    assert packed(wraps=True).affix("", None, None).x_L.tolist() == [MASK] * 8


def test_a_suffix_stands_after_so_many_tokens_or_at_the_end_of_the_row():
    page = padded()
    assert page.affix("anna", "day .", 2).x_L.tolist() == [*ids("anna"), MASK, MASK, *ids("day ."), EOS, PAD, PAD]
    assert page.affix("anna", "day .", None).x_L.tolist() == [*ids("anna"), *[MASK] * 4, *ids("day ."), EOS]
    assert page.affix(None, "day .", None).x_L.tolist() == [*[MASK] * 5, *ids("day ."), EOS]
    assert page.affix("anna", None, 3).x_L.tolist() == [*ids("anna"), MASK, MASK, MASK, EOS, PAD, PAD, PAD]
    assert packed().affix("anna", "day", None).x_L.tolist() == [*ids("anna"), *[MASK] * 6, *ids("day")]
    assert packed().affix("anna", "day", 2).x_L.tolist() == [*ids("anna"), MASK, MASK, *ids("day"), *[MASK] * 4]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p: p.infill("anna was happy"), r"infill='anna was happy' has no gap; write \[MASK\]"),
        (lambda p: p.infill("anna [MASK:7]"), "infill: 8 tokens do not fit the model's length, which has room for 7"),
        (lambda p: p.infill("anna [MASK:999999999]"), "infill: 1000000000 tokens do not fit"),
        (lambda p: p.infill("ana [MASK]"), "'ana' is not in the model's vocabulary of 28; did you mean 'anna'?"),
        (lambda p: p.infill("qqqq [MASK]"), "'qqqq' is not in the model's vocabulary of 28; use what its training"),
        (lambda p: p.infill("the <pad> [MASK]"), "'<pad>' is a control token"),
        (lambda p: p.infill("the <eos> [MASK]"), "'<eos>' is a control token"),
        (lambda p: p.affix("a " * 7, None, None), "prefix: 7 tokens and 1 to be written do not fit"),
        (
            lambda p: p.affix("a " * 4, "a " * 3, None),
            "prefix and suffix together: 7 tokens and 1 to be written do not",
        ),
        (lambda p: p.affix("a", "a", 6), "prefix, tokens and suffix together: 8 tokens do not fit"),
        (lambda p: p.affix(None, "ana", None), "'ana' is not in"),
        (lambda p: p.whole("a " * 8), "like: 8 tokens do not fit"),
        (lambda p: p.whole(" "), "like=' ' is no text"),
        (lambda p: p.whole("ana"), "'ana' is not in"),
    ],
)
def test_what_cannot_be_is_one_line(ask, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        ask(padded())
    assert "\n" not in str(caught.value)


def test_the_longest_texts_fit():
    assert padded().infill("a " * 6 + "[MASK]").x_L.tolist() == [*ids("a " * 6), MASK, EOS]
    assert packed().infill("a " * 7 + "[MASK]").x_L.tolist() == [*ids("a " * 7), MASK]
    assert padded().whole("a " * 7) == (pytest.approx(np.array([*ids("a " * 7), EOS])), 8)


def test_a_stream_may_name_its_separator():
    assert packed().infill("a <eos> [MASK]").x_L.tolist()[:3] == [*ids("a"), EOS, MASK]


def test_a_space_before_a_gap_goes_into_the_gap():
    page = packed(24, BYTE)
    pattern = page.infill("The capital of [MASK] is [MASK:3].")
    expected = [
        *BYTE.encode("The capital of"),
        BYTE.mask_id,
        *BYTE.encode(" is"),
        *[BYTE.mask_id] * 3,
        *BYTE.encode("."),
    ]
    assert pattern.x_L[pattern.shown].tolist() == expected
    masked = np.flatnonzero(pattern.x_L[pattern.shown] == BYTE.mask_id)
    assert pattern.begins == (masked[0], masked[1]), "the first of each gap"
    assert page.infill("The[MASK] is[MASK:2].").begins == ()
    assert page.infill("The [MASK] [MASK] is.").begins == (len(BYTE.encode("The")), len(BYTE.encode("The")) + 1)
    assert packed(24, BYTE, wraps=True).affix("The ", None, 3).begins == (1 + len(BYTE.encode("The")),)
    assert page.affix("The ", None, None).begins == (len(BYTE.encode("The")),)
    assert page.affix("The", None, None).begins == page.affix(" ", None, None).begins == ()
    assert (
        page.affix("The capital of ", None, None).x_L.tolist() == page.affix("The capital of", None, None).x_L.tolist()
    )
    filled = pattern.x_L.copy()
    filled[filled == BYTE.mask_id] = token = BYTE.encode(" the")[0]
    word = BYTE.decode([token])
    assert word.startswith(" ")
    assert BYTE.decode(filled[pattern.shown]) == f"The capital of{word} is{word * 3}."


texts = st.lists(st.sampled_from([*WORDS, "Paris", "naïve", "été", "x1"]), min_size=2, max_size=12)


@given(texts, st.data())
@settings(max_examples=100, deadline=None)
def test_a_text_whose_gaps_get_their_own_tokens_back_is_the_text(words, data):
    text = " ".join(words)
    hidden = data.draw(st.sets(st.sampled_from(range(len(words))), min_size=1))
    sizes = [len(BYTE.encode(word if place == 0 else f" {word}")) for place, word in enumerate(words)]
    gapped = " ".join(f"[MASK:{sizes[i]}]" if i in hidden else word for i, word in enumerate(words))
    pattern = packed(128, BYTE).infill(gapped)
    whole = BYTE.encode(text)
    row = pattern.x_L[pattern.shown]
    assert len(row) == len(whole)
    is_gap = row == BYTE.mask_id
    assert is_gap.sum() == sum(sizes[i] for i in hidden)
    assert np.array_equal(row[~is_gap], whole[~is_gap])
    assert BYTE.decode(np.where(is_gap, whole, row)) == text
