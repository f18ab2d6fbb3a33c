"""The trunk on a CPU: modulations kept for many passes, fused passes through Triton's interpreter, threads."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rmdm.samplers import Denoiser, SampleSettings, row_keys, sample
from rmdm.samplers.denoiser import Ask, hidden_together
from rmdm.samplers.trunk import MOST_ROOM, Trunk, _filled, forward
from tests.reference.tiny import tiny_backbone

V, L, BLOCK = 30, 8, 4
KINDS = {"plain": {}, "groups": {"groups": 2}, "a latent a token": {"groups": L}, "time": {"time": True}}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def condition(model, rows: int) -> torch.Tensor | None:
    if model.latent is None:
        return None
    z = torch.randn(rows, model.latent.groups, model.latent.project, generator=torch.Generator().manual_seed(1))
    return model.latent(z).detach()


def asked(model, rows: int) -> Ask:
    """Two places of each row."""
    generator = torch.Generator().manual_seed(0)
    local_N, place_N = torch.arange(rows).repeat_interleave(2), torch.randint(L, (2 * rows,), generator=generator)
    t_R = torch.linspace(0.1, 0.9, rows) if model.time is not None else None
    count_R = np.full(rows, 2)
    return Ask(torch.randint(V + 1, (rows, L), generator=generator), None, local_N, place_N, count_R, t_R)


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).square().mean().sqrt()


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fused_blocks_give_every_row_its_own_condition(kind):
    model, rows = tiny_backbone(V, L, **KINDS[kind]), 2 * BLOCK + 2
    c, ask = condition(model, rows), asked(model, rows)
    exact = Denoiser(model, c).hidden(ask).h_ND
    # The same with its rows the other way round, as when some are done before others.
    order = torch.arange(rows).flip(0)
    t_R = ask.t_R[order] if ask.t_R is not None else None
    place_N = ask.place_N.view(-1, 2).flip(0).flatten()
    turned = Ask(ask.x_RL[order], order, ask.local_N, place_N, ask.count_R, t_R)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = distance(Denoiser(model, c).hidden(ask).h_ND, exact)
        fused = Denoiser(model, c, block=BLOCK, trunk=Trunk(model, fused=True))
        assert distance(fused.hidden(ask).h_ND, exact) < 3 * usual
        assert distance(fused.hidden(turned).h_ND.unflatten(0, (-1, 2)).flip(0).flatten(0, 1), exact) < 3 * usual


@needs_triton
@torch.no_grad()
def test_fused_and_guided_requests_merge():
    model = tiny_backbone(V, L, groups=2)
    trunk, ask = Trunk(model, fused=True), asked(model, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        makers = [
            Denoiser(model, condition(model, 3) + k, guidance, BLOCK, trunk=trunk)
            for k, guidance in enumerate((1.0, 1.5, 2.0))
        ]
        alone = [maker.hidden(ask) for maker in makers]
        together = hidden_together([(maker, ask) for maker in makers])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.h_ND, other.h_ND)
        if one.null_ND is not None:
            torch.testing.assert_close(one.null_ND, other.null_ND)
    assert not torch.allclose(alone[0].h_ND, alone[1].h_ND)


def test_a_model_told_the_time_needs_it():
    model = tiny_backbone(V, L, time=True)
    for trunk in (Trunk(model, fused=False), Trunk(model, fused=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="needs t_R"):
            trunk(torch.zeros(2, L, dtype=torch.int64), None, torch.zeros(1, dtype=torch.int64))


def test_threads_that_share_a_trunk_get_their_own_texts():
    model = tiny_backbone(V, L, groups=2)
    trunk, chosen = Trunk(model, fused=False), SampleSettings("ancestral", steps=4)
    conditions = [condition(model, BLOCK) + k for k in range(4)]

    def write(k: int) -> torch.Tensor:
        x_BL, c = torch.full((BLOCK, L), V), conditions[k % 4]
        return sample(Denoiser(model, c, block=BLOCK, trunk=trunk), x_BL, row_keys(k, range(BLOCK)), chosen)

    alone = [write(k) for k in range(60)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(write, range(60)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_batches_too_large_to_be_kept_are_the_same():
    model, rows = tiny_backbone(V, L, groups=2), MOST_ROOM + 3
    trunk, c, ask = Trunk(model, fused=False), condition(model, rows), asked(model, rows)
    found = Denoiser(model, c, block=BLOCK, trunk=trunk).hidden(ask).h_ND
    torch.testing.assert_close(found, Denoiser(model, c).hidden(ask).h_ND, atol=1e-5, rtol=1e-4)
    assert max(len(held.tensors[0]) for held in trunk.kept.values()) < rows


def test_modulations_of_a_small_batch_hold_no_whole_block():
    model = tiny_backbone(V, L, groups=2)
    six = Denoiser(model, condition(model, 1), block=64).six
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in six)


def test_a_trunk_works_under_inference_mode_and_after():
    model = tiny_backbone(V, L, groups=2)
    trunk, x_RL = Trunk(model, fused=False), torch.zeros(2, L, dtype=torch.int64)
    c, at_N = condition(model, 2), torch.arange(2 * L)
    with torch.inference_mode():
        inside = trunk(x_RL, model.modulations(c), at_N).clone()
    with torch.no_grad():
        six = model.modulations(c)
        torch.testing.assert_close(trunk(x_RL, six, at_N), forward(model, x_RL, six, None).flatten(0, 1))
        torch.testing.assert_close(trunk(x_RL, six, at_N), inside.clone())


def test_modulations_of_a_batch_are_kept_in_one_place_until_it_is_too_small():
    trunk = Trunk(tiny_backbone(V, L, groups=2), fused=True)
    many, few, one = ([torch.randn(n, 2, 6, 16) for _ in range(2)] for n in (11, 3, 1))
    first = trunk._keep(few)
    assert [len(each) for each in first] == [8, 8]
    assert all(torch.equal(kept[:3], each) for kept, each in zip(first, few, strict=True))
    trunk.recordings["reads the first place"] = None
    assert trunk._keep(one)[0] is not first[0]
    assert trunk._keep([each + 1 for each in few])[0] is first[0]
    assert torch.equal(first[0][:3], few[0] + 1)
    assert trunk.recordings
    larger = trunk._keep(many)
    assert len(larger[0]) == 16
    assert torch.equal(larger[1][:11], many[1])
    assert not trunk.recordings
    assert trunk._keep(few)[0] is larger[0]
    assert torch.equal(larger[0][:3], few[0])


def test_recordings_have_room_for_once_twice_or_more_times_as_many_places(monkeypatch):
    monkeypatch.setattr("rmdm.samplers.trunk.FIXED_LAST", 4)
    rooms = [_filled(torch.arange(n), 22) for n in (0, 1, 4, 5, 8, 9, 17, 22)]
    assert [len(each) for each in rooms] == [4, 4, 4, 8, 8, 16, 24, 24]
    assert rooms[3].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
