"""Coherence: what a text's beginning tells of its end, that of another text not."""

import numpy as np
import pytest

from rmdm.evaluation.coherence import SHORTEST, coherence, thirds


class Told:
    """An evaluator to which a token of the end costs 1 nat where the beginning is of the same text, else 3."""

    def __init__(self, context: int = 1000) -> None:
        self.context, self.asked = context, []

    def continuation(self, pairs):
        self.asked.append([(a[0] // 1000, b[0] // 1000, len(a), len(b)) for a, b in pairs])
        return np.array([len(b) * (1.0 if a[0] // 1000 == b[0] // 1000 else 3.0) for a, b in pairs])


def texts(*lengths: int) -> list[np.ndarray]:
    return [1000 * i + np.arange(length) for i, length in enumerate(lengths)]


def test_it_is_what_the_own_beginning_saves_over_another_ones():
    evaluator = Told()
    found = coherence(evaluator, texts(30, 60, 90, 120, 150))
    assert found is not None
    assert found.value == pytest.approx(2.0)
    own, other = evaluator.asked
    assert own == [(0, 0, 10, 10), (1, 1, 20, 20), (2, 2, 30, 30), (3, 3, 40, 40)], "of five, two pairs"
    assert [(a, b) for a, b, *_ in other] == [(2, 0), (3, 1), (0, 2), (1, 3)]


def test_texts_without_a_beginning_and_an_end_do_not_count():
    evaluator = Told()
    found = coherence(evaluator, texts(SHORTEST - 1, 40, 5, 40))
    assert found is not None
    assert {a for a, *_ in evaluator.asked[0]} == {1, 3}
    assert coherence(Told(), texts(40, 5)) is None
    assert coherence(Told(), []) is None


def test_ends_fit_into_the_context_together():
    first, last = thirds(np.arange(3000), 63)
    assert first.tolist() == list(range(63))
    assert last.tolist() == list(range(2937, 3000))
    evaluator = Told(context=128)
    assert coherence(evaluator, texts(900, 900)) is not None
    assert {(a, b) for *_, a, b in evaluator.asked[0]} == {(63, 63)}


@pytest.mark.parametrize("apart", [200, 100], ids=["every text its own", "both of a pair alike"])
def test_the_interval_is_over_independent_pairs(apart):
    """Texts that are each other's control may err together, and then are worth half as many."""

    class Noisy(Told):
        def continuation(self, pairs):
            noise = np.random.default_rng(len(self.asked)).normal(0, 1, apart)
            return super().continuation(pairs) + 10 * np.resize(noise, len(pairs))

    found = coherence(Noisy(), texts(*[30] * 200))
    assert found is not None
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    assert found.interval.high - found.interval.low == pytest.approx(2 * 1.96 * 2**0.5 / apart**0.5, rel=0.2)
