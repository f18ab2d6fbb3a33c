"""Operations and bytes that each piece of work cannot do without.

A weight of a matrix takes 2 operations a row that goes through it, and 4 more in the backward pass. Attention takes
4 L D a position and layer, three times that with the backward pass, and half of it where it is causal. Of the last
block, positions that predict nothing need only keys and values. Looking up embeddings, norms, nonlinearities and noise
count as time and not as work.

An optimiser step reads the weights and writes the gradients, then, once their norm is known, reads weights, gradients,
both moments and the average, and writes all but the gradients: 11 numbers of 4 bytes a parameter. Activations count
as no bytes, since a fused network need not write them.
"""

import math

from rmdm.bench.machine import Floor
from rmdm.bench.sizes import EncoderSize, FlowSize, Size
from rmdm.meanflow.net import CONDITION, FREQUENCIES

UPDATE_BYTES = 44
"""Bytes a parameter that an optimiser step moves."""


def trunk_weights(size: Size | FlowSize) -> int:
    """Weights of the blocks' matrices that every position goes through."""
    return size.layers * (4 + 2 * size.mlp_ratio) * size.width**2


def last_weights(size: Size) -> int:
    """Those of the last block that only positions which predict something need: all but keys and values."""
    return (2 + 2 * size.mlp_ratio) * size.width**2


def condition_weights(size: Size, process: str) -> tuple[int, int]:
    """Weights that make the condition and the modulations, and the rows of a sequence that go through them."""
    blocks, square = size.layers * size.condition * 6 * size.width, size.condition**2
    if process == "rmdm":
        up = size.project * size.dim if size.project != size.dim else 0  # a latent that keeps all its numbers
        return up + size.dim * size.condition + square + blocks, size.groups
    if process == "sedd":
        return 64 * size.condition + square + blocks, 1
    return 0, 0


def parameters(size: Size, process: str) -> int:
    """Parameters of the product's model."""
    D, C = size.width, size.condition
    tables = (1 if size.tie else 2) * 64 * math.ceil((size.vocab + 1) / 64) * D
    vectors = size.layers * 6 * D + D
    vectors += {"rmdm": 3 * C, "sedd": 2 * C}.get(process, 0)  # biases, and the null that stands for no latent
    return tables + trunk_weights(size) + vectors + condition_weights(size, process)[0]


def training_step(size: Size, process: str, batch: int) -> Floor:
    """One optimiser step; the end of it on masked positions only, (L + 1) / 2 a row on average, or on all (AR)."""
    L, D, causal = size.length, size.width, process == "ar"
    attention = 12 * L * D // (2 if causal else 1)
    predicted, last = L if causal else (L + 1) / 2, last_weights(size)
    condition, groups = condition_weights(size, process)
    everywhere = 6 * (trunk_weights(size) - last) + (size.layers - 1) * attention
    a_row = L * everywhere + predicted * (6 * (last + size.vocab * D) + attention) + groups * 6 * condition
    return Floor(batch * a_row, UPDATE_BYTES * parameters(size, process))


def runs_of_a_row(steps: int, length: int) -> float:
    """Steps of `steps` in which a row of `length` masks unmasks something, on average: the others need no network."""
    return steps * (1 - (1 - 1 / steps) ** length)


def request(size: Size, process: str, batch: int, steps: int, weight_bytes: int) -> Floor:
    """A whole request by the ancestral sampler: the trunk where a row unmasks something, its end once a place.

    The weights of trunk and head, of `weight_bytes` bytes each, are read in every pass; modulations are made once.
    """
    L, D = size.length, size.width
    passes, last = runs_of_a_row(steps, L), last_weights(size)
    trunk = passes * L * (2 * (trunk_weights(size) - last) + (size.layers - 1) * 4 * L * D)
    condition, groups = condition_weights(size, process)
    operations = batch * (trunk + L * (2 * (last + size.vocab * D) + 4 * L * D) + groups * 2 * condition)
    return Floor(operations, weight_bytes * (passes * (trunk_weights(size) + size.vocab * D) + condition))


def flow_step(size: FlowSize, batch: int, pairs: int, held: int) -> Floor:
    """One optimiser step of MeanFlow on `batch` rows, `pairs` of them with r != t, with `held` parameters.

    Those need the derivative of the network in one direction too: 2 operations a weight and 8 G W a group row and layer
    of attention. The network's value there is the one the loss needs anyway.
    """
    G, W, layers = size.groups, size.width, size.layers
    per_group = trunk_weights(size) + 3 * size.dim * W
    per_row = CONDITION * (6 * layers + 3 + 1) * W + (4 * FREQUENCIES + 1) * W
    weights = G * per_group + per_row
    operations = batch * (6 * weights + G * layers * 12 * G * W) + pairs * (2 * weights + G * layers * 8 * G * W)
    return Floor(operations, UPDATE_BYTES * held)


def encoding(size: EncoderSize, tokens: float, length: float, weight_bytes: int) -> Floor:
    """A batch of `tokens` real tokens that each see `length` on average; the weights are read once."""
    weights = size.layers * (4 * size.width**2 + 2 * size.width * size.hidden)
    return Floor(tokens * (2 * weights + size.layers * 4 * length * size.width), weight_bytes * weights)
