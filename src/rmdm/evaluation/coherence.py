"""How much of a text's end its beginning foretells: what GenPPL, which is mostly about neighbours, hardly sees.

Of each text the first third a_i and the last third c_i are kept, so that nothing follows from where one stopped and the
other goes on. Under the evaluator

    C = sum_i (ln p(c_i | a_i) - ln p(c_i | a_j)) / sum_i |c_i|

is what the text's own beginning saves over that of another text of the set, in nats a token: an estimate of how much
both ends have in common. Texts whose ends belong together by chance have 0, however good their sentences are. i and j
are each other's other text, so the bootstrap draws pairs.

Shapes: N texts, M of them long enough.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmdm.evaluation.evaluator import Evaluator
from rmdm.evaluation.intervals import Estimate, percentiles, ratio

SHORTEST = 30
"""Tokens from which on a text has a beginning and an end."""


def coherence(evaluator: Evaluator, ids: Sequence[NDArray[np.int64]]) -> Estimate | None:
    """C of some texts in the evaluator's tokens; None of fewer than two that are long enough."""
    most = evaluator.context // 2 - 1
    ends = [thirds(ids_T, most) for ids_T in ids if len(ids_T) >= SHORTEST]
    pairs = len(ends) // 2
    if not pairs:
        return None
    ends = ends[: 2 * pairs]
    own_M = evaluator.continuation(ends)
    other_M = evaluator.continuation([(ends[i - pairs][0], last) for i, (_, last) in enumerate(ends)])
    tokens_M = np.array([len(last) for _, last in ends], dtype=np.float64)
    value, value_R = ratio(in_pairs(other_M - own_M), in_pairs(tokens_M))
    return Estimate(value, percentiles(value_R) if value_R is not None else None)


def in_pairs(value_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each text's value and that of the one half the set further, added up: an even number of texts."""
    return value_M.reshape(2, -1).sum(axis=0)


def thirds(ids_T: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last third of a text, at most so many tokens each."""
    length = min(len(ids_T) // 3, most)
    return ids_T[:length], ids_T[len(ids_T) - length :]
