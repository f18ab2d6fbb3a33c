import math
from collections import Counter

import numpy as np
import pytest

from rmdm.data.shards import TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.evaluation import texts
from rmdm.evaluation.texts import copied_shares, distinct, ngrams, repetition, self_bleu, unigram_entropy


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_entropy_equals_a_hand_count():
    assert unigram_entropy(ids(7, 7, 8, 9), 4) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(ids(7, 7, 7), 3) == 0.0
    assert unigram_entropy(np.arange(50), 50) == pytest.approx(math.log(50))


def test_entropy_looks_at_one_length_only():
    assert unigram_entropy(ids(1, 2, 3, 3, 3, 3), 2) == pytest.approx(math.log(2))
    assert unigram_entropy(ids(1, 2), 3) is None
    assert unigram_entropy(ids(), 1) is None


def test_distinct_counts_over_all_texts_together():
    sets = [ids(1, 2, 1, 2), ids(1, 2, 3)]
    assert distinct(sets, 1) == 3 / 7
    assert distinct(sets, 2) == 3 / 5  # 12 21 12 | 12 23
    assert distinct(sets, 3) == 3 / 3  # 121 212 | 123
    assert distinct([ids(1), ids(2)], 2) is None


def test_repetition_counts_within_a_text():
    assert repetition(ids(1, 2, 1, 2, 1, 2), 2) == 1 - 2 / 5
    assert repetition(ids(1, 2, 3, 4, 5)) == 0.0
    assert repetition(ids(1, 2, 3)) is None


def bleu_by_definition(text: list[int], others: list[list[int]]) -> float:
    """Sentence BLEU-4 with several references, as papers define it, 0 matches counted as 0.1."""
    log = 0.0
    for n in range(1, 5):
        own = Counter(ngrams(np.array(text, dtype=np.int64), n))
        references = [Counter(ngrams(np.array(other, dtype=np.int64), n)) for other in others]
        matches = sum(min(c, max(reference[gram] for reference in references)) for gram, c in own.items())
        log += math.log((matches or 0.1) / max(1, own.total())) / 4
    closest = min((abs(len(other) - len(text)), len(other)) for other in others)[1]
    return math.exp(log) * (1.0 if len(text) >= closest else math.exp(1 - closest / len(text)))


def test_self_bleu_is_bleu_against_all_other_texts():
    random = np.random.default_rng(0)
    sets = [random.integers(0, 4, random.integers(3, 14)) for _ in range(12)]
    expected = [bleu_by_definition(one.tolist(), [o.tolist() for o in sets if o is not one]) for one in sets]
    assert self_bleu(sets) == pytest.approx(expected)


def test_self_bleu_of_equal_and_of_unlike_texts():
    assert self_bleu([np.arange(20)] * 3) == pytest.approx([1.0] * 3)
    assert max(self_bleu([np.arange(20), np.arange(20, 40)])) < 0.02
    assert self_bleu([np.arange(20)]) == []


@pytest.fixture(scope="module")
def corpus(shards):
    tokenizer = Tokenizer.load(shards / "tokenizer")
    return TokenRows.open(shards, "train"), TokenRows.open(shards, "valid"), tokenizer


@pytest.mark.parametrize("n", [4, 10])
def test_copies_are_those_a_search_of_every_row_finds(corpus, n, monkeypatch):
    training, valid, tokenizer = corpus
    monkeypatch.setattr(texts, "TOKENS_AT_ONCE", 7 * training.length)  # many chunks, the last one short
    monkeypatch.setattr(texts, "FILTER_BITS", 6)  # the filter alone lets most n-grams through
    known = {gram for row in training.take(np.arange(len(training))) for gram in ngrams(row, n)}
    rows = list(valid.take(np.arange(20)))
    expected = []
    for row in rows:
        free = [gram for gram in ngrams(row, n) if not tokenizer.is_control[list(gram)].any()]
        expected.append(sum(gram in known for gram in free) / len(free))
    assert 0 < np.mean(expected) < 1
    found = copied_shares([rows[:5], rows[5:]], training, tokenizer.is_control, n)
    assert found[0] + found[1] == pytest.approx(expected)


def test_a_training_row_is_a_copy_and_new_words_are_none(corpus):
    training, _, tokenizer = corpus
    row = training.take(np.array([3]))[0]
    backwards = row[row > 2][::-1]
    found = copied_shares([[row, backwards, row[:4]]], training, tokenizer.is_control)
    assert found == [[1.0, 0.0, None]]


def test_runs_across_documents_do_not_count(corpus):
    training, _, tokenizer = corpus
    words = training.take(np.array([0]))[0][:12]
    joined = np.concatenate([words[:6], [tokenizer.separator_id], words[6:]])
    assert copied_shares([[joined]], training, tokenizer.is_control, 7) == [[None]]
