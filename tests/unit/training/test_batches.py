import numpy as np
import pytest

from rmdm.data.shards import TokenRows
from rmdm.processes import PROCESSES
from rmdm.training.batches import build_step, counted
from rmdm.training.steps import Plan


def build(shards, step, rank=0, size=1, micro=None, pad_in_loss=True, process="mdlm"):
    rows = TokenRows.open(shards, "train")
    plan = Plan.make(3, 16, rank, size, micro)
    return build_step(step, plan, rows, PROCESSES[process], 999, pad_in_loss)


def by_place(shards, step, size, micro=None):
    """Everything each row of the global batch brings along, whoever holds it."""
    found = {}
    for rank in range(size):
        places = Plan.make(3, 16, rank, size, micro).places()
        for batch, rows in zip(build(shards, step, rank, size, micro).micro, places, strict=True):
            L = batch.x_BL.shape[1]
            for b, place in enumerate(rows.tolist()):
                mine = (batch.select_N // L == b) & (batch.weight_N > 0)
                found[place] = [batch.x_BL[b].tolist(), int(batch.noise_key_B[b])]
                found[place] += [t[mine].tolist() for t in (batch.select_N % L, batch.target_N, batch.weight_N)]
    return found


def test_a_step_is_the_same_for_any_number_of_ranks_and_micro_batches(shards):
    whole = by_place(shards, 5, 1)
    assert sorted(whole) == list(range(16))
    assert whole == by_place(shards, 5, 2)
    assert whole == by_place(shards, 5, 4, micro=2)
    assert whole != by_place(shards, 6, 1)


def test_all_micro_batches_of_all_ranks_have_one_shape(shards):
    shapes = {
        tuple(tuple(t.shape) for t in (b.x_BL, b.select_N, b.weight_N))
        for step in range(20)
        for rank in range(2)
        for b in build(shards, step, rank, 2, micro=4).micro
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("process", ["mdlm", "sedd", "ar"])
def test_selected_positions_are_all_different(shards, process):
    for batch in build(shards, 1, micro=4, pad_in_loss=False, process=process).micro:
        assert len(batch.select_N.unique()) == len(batch.select_N)
        chosen = batch.x_BL.flatten()[batch.select_N[batch.weight_N > 0]]
        assert process == "ar" or (chosen == 999).all()


def test_weights_of_the_masked_positions_sum_to_the_rows_tokens(shards):
    # Each row's weight is L/k over its k masks, so the sum is exactly L a row.
    step = build(shards, 2)
    assert float(step.micro[0].weight_N.sum()) == pytest.approx(16 * 32, rel=1e-5)
    assert step.counted == 16 * 32


def test_padding_counts_only_if_asked(shards):
    rows = TokenRows.open(shards, "train")
    indices = np.arange(8)
    assert counted(rows, indices, True).all()
    inside = counted(rows, indices, False)
    x = rows.take(indices)
    assert (x[~inside] == rows.pad_id).all()
    last = inside.sum(axis=1) - 1
    assert (x[np.arange(8), last] == rows.separator_id).all()
    step = build(shards, 0, pad_in_loss=False, process="ar")
    assert step.counted == int((step.micro[0].weight_N > 0).sum()) < 16 * 32
