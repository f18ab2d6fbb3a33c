"""The autoregressive likelihood against a computation by hand: with all gates shut the network is a bigram table."""

import numpy as np
import pytest
import torch

from rmdm.processes import AR, Draw, Objective
from tests.reference.tiny import tiny_backbone

V, L = 5, 6


def test_likelihood_of_a_bigram_network_equals_the_hand_computation():
    model = tiny_backbone(V, L, causal=True)
    with torch.no_grad():
        for block in model.blocks:
            block.modulation[2] = -1
            block.modulation[5] = -1
    embed, head = model.embed.weight.detach().double().numpy(), model.head.weight.detach().double().numpy()
    scale = model.norm_scale.detach().double().numpy()
    row = np.array([3, 0, 4, 4, 1, 2])

    by_hand, previous = 0.0, V  # the start symbol is the extra id
    for token in row:
        e = embed[previous]
        h = (e - e.mean()) / np.sqrt(e.var() + 1e-5) * scale
        logits = head[:V] @ h
        by_hand -= logits[token] - np.log(np.exp(logits).sum())
        previous = token

    x = row[None]
    batch = AR().batch(x, np.ones_like(x, dtype=bool), V, Draw(0, 0, np.arange(1), 1))
    found = float((Objective(model).nll(batch) * batch.weight_N).sum())
    assert found == pytest.approx(by_hand, rel=1e-5)


def test_every_position_is_predicted_from_those_before_it_only():
    model = tiny_backbone(V, L, causal=True)
    x = np.array([[3, 0, 4, 4, 1, 2]])
    y = x.copy()
    y[0, -1] = 0
    nll = [
        Objective(model).nll(AR().batch(r, np.ones_like(r, dtype=bool), V, Draw(0, 0, np.arange(1), 1))) for r in (x, y)
    ]
    torch.testing.assert_close(nll[0][:-1], nll[1][:-1])
    assert nll[0][-1] != nll[1][-1]


def test_uncounted_positions_weigh_nothing():
    x = np.array([[3, 0, 4, 4, 1, 2]])
    counted = np.array([[True, True, True, False, False, False]])
    batch = AR().batch(x, counted, V, Draw(0, 0, np.arange(1), 1))
    assert batch.weight_N.tolist() == [1, 1, 1, 0, 0, 0]
