"""What of a completion is told before it is done."""

import numpy as np
import pytest

from rmdm.hub import load_model
from rmdm.serving.schema import CompletionRequest
from rmdm.serving.served import Served
from tests.release import byte_tokenizer, save_release


@pytest.fixture(scope="module", params=["ar", "mdlm"])
def served(request, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("answers") / request.param
    return Served("tiny", load_model(save_release(folder, request.param, byte_tokenizer(), data__layout="packed")), 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("first", "last"), [(0, 3), (2, 12), (5, 6)], ids=["at once", "long", "one character"])
def test_nothing_is_told_that_a_stop_word_takes_away(served, seed, first, last):
    body = CompletionRequest(seed=seed, steps=16)
    (free,) = served.answers(body)
    row_L = served.model.write(free.ready.request).tokens[0]
    stop = free.ended(row_L).text[first:last]
    (one,) = served.answers(body.model_copy(update={"stop": stop}))
    whole = one.ended(row_L).text
    assert stop not in whole

    order = np.arange(len(row_L))
    if not served.model.backbone.causal:
        order = np.random.default_rng(seed).permutation(order)
    known_L = one.ready.pattern.x_L.copy()
    for place in order:
        known_L[place] = row_L[place]
        assert whole.startswith(one.settled(known_L))


def test_what_no_stop_word_can_take_away_is_told(served):
    (one,) = served.answers(CompletionRequest(seed=1, stop="abcdefgh"))
    ids = served.model.tokenizer.backend.encode("the river").ids
    assert len(ids) < len(one.ready.pattern.x_L)
    told = []
    for count in range(1, len(ids) + 1):
        known_L = one.ready.pattern.x_L.copy()
        known_L[:count] = ids[:count]
        text = served.model.tokenizer.decode(np.array(ids[:count]))
        told.append((text, one.settled(known_L)))
    assert told[-1] == ("the river", "th")
    assert all(settled == text[: max(0, len(text) - 7)] for text, settled in told)
