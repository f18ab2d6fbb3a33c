import numpy as np
import pytest
import torch

from rmdm.samplers import Denoiser, denoiser
from rmdm.samplers.packing import packed, unpacked
from rmdm.samplers.trunk import Trunk
from tests.reference.tiny import tiny_backbone

V, L, B = 5, 6, 4


def places(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    local_N = torch.randint(rows, (count,), generator=generator).sort().values
    return local_N, torch.randint(L, (count,), generator=generator)


def asked(x_RL, rows_R, local_N, place_N, t_R=None) -> denoiser.Ask:
    return denoiser.Ask(x_RL, rows_R, local_N, place_N, np.bincount(local_N, minlength=len(x_RL)), t_R)


@pytest.fixture
def latent_model():
    return tiny_backbone(V, L, groups=2)


@pytest.fixture
def x_BL():
    return torch.randint(V + 1, (B, L), generator=torch.Generator().manual_seed(1))


def condition(model, rows=B):
    return model.latent(torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(2))).detach()


def test_logits_are_those_of_the_rows_conditions_at_the_wanted_places(latent_model, x_BL):
    c_BGC, rows_R = condition(latent_model), torch.tensor([3, 1])
    local_N, place_N = places(2, 9)
    got = Denoiser(latent_model, c_BGC).logits(x_BL[rows_R], rows_R, local_N, place_N)
    all_BLV = latent_model.logits(latent_model(x_BL, c_BGC=c_BGC))
    torch.testing.assert_close(got, all_BLV[rows_R[local_N], place_N].detach(), atol=1e-5, rtol=1e-5)


def test_places_come_row_after_row(latent_model, x_BL):
    with pytest.raises(ValueError, match="row after row; sort local_N"):
        Denoiser(latent_model).logits(x_BL, None, torch.tensor([1, 0]), torch.tensor([2, 3]))


def test_guidance_goes_from_the_null_through_the_latent(latent_model, x_BL):
    c_BGC, (local_N, place_N) = condition(latent_model), places(B, 9)
    null, with_z, guided = (
        Denoiser(latent_model, c, g).logits(x_BL, None, local_N, place_N)
        for c, g in ((None, 1.0), (c_BGC, 1.0), (c_BGC, 3.0))
    )
    torch.testing.assert_close(guided, null + 3 * (with_z - null), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(Denoiser(latent_model, c_BGC, 0.0).logits(x_BL, None, local_N, place_N), null)


def test_one_condition_may_serve_all_rows(latent_model, x_BL):
    c_1GC, (local_N, place_N) = condition(latent_model, 1), places(B, 9)
    rows_R = torch.arange(B)
    one = Denoiser(latent_model, c_1GC).logits(x_BL, rows_R, local_N, place_N)
    each = Denoiser(latent_model, c_1GC.expand(B, -1, -1)).logits(x_BL, rows_R, local_N, place_N)
    torch.testing.assert_close(one, each)


def test_modulations_are_made_once_and_the_network_runs_once_a_call(latent_model, x_BL, monkeypatch):
    calls = []
    forward, modulations = latent_model.forward, latent_model.modulations
    monkeypatch.setattr(latent_model, "forward", lambda *a, **k: calls.append("forward") or forward(*a, **k))
    monkeypatch.setattr(latent_model, "modulations", lambda c: calls.append("modulations") or modulations(c))
    maker = Denoiser(latent_model, condition(latent_model))
    made = len(calls)
    for _ in range(3):
        maker.logits(x_BL, None, *places(B, 5))
    assert calls[made:] == ["forward"] * 3


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("block", [None, 4])
def test_a_guided_call_is_one_run_of_twice_the_rows(latent_model, x_BL, rows, subset, block, monkeypatch):
    monkeypatch.setattr(denoiser, "FEW_GROUPS", 1)
    c_BGC, rows_R = condition(latent_model, rows), torch.tensor([3, 1]) if subset else None
    x_RL, runs, run = x_BL[:2] if subset else x_BL, [], Denoiser._run
    monkeypatch.setattr(Denoiser, "_run", lambda self, x, *rest: runs.append(len(x)) or run(self, x, *rest))
    found = []
    for together in (True, False):
        maker = Denoiser(latent_model, c_BGC, 2.5, block=block)
        maker.both = maker.both if together else None
        found.append(maker.hidden(asked(x_RL, rows_R, *places(len(x_RL), 7))))
    assert runs == [2 * len(x_RL), len(x_RL), len(x_RL)]
    for name in ("h_ND", "null_ND"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found[0].h_ND, found[0].null_ND)


def test_guided_rows_with_a_latent_for_every_few_tokens_are_run_twice_on_a_cpu(latent_model):
    assert Denoiser(latent_model, condition(latent_model), 2.0).both is None
    assert Denoiser(tiny_backbone(V, 8, groups=2), condition(latent_model), 2.0).both is not None
    assert Denoiser(tiny_backbone(V, 8, groups=2), condition(latent_model)).both is None


def test_chunks_are_the_logits_in_pieces(latent_model, x_BL, monkeypatch):
    maker, (local_N, place_N) = Denoiser(latent_model, condition(latent_model), 2.0), places(B, 9)
    whole = maker.logits(x_BL, None, local_N, place_N)
    monkeypatch.setitem(denoiser.CHUNK_ELEMENTS, "cpu", 2 * V)
    parts = list(maker.chunks(x_BL, None, local_N, place_N))
    assert [part for part, _ in parts] == [slice(i, min(i + 2, 9)) for i in range(0, 9, 2)]
    torch.testing.assert_close(torch.cat([logits for _, logits in parts]), whole)


def test_the_time_is_told_to_a_model_that_asks_for_it(x_BL):
    model, (local_N, place_N), t_R = tiny_backbone(V, L, time=True), places(B, 9), torch.linspace(0.1, 1.0, B)
    got = Denoiser(model).logits(x_BL, None, local_N, place_N, t_R)
    want = model.logits(model(x_BL, c_BGC=model.time(t_R)))[local_N, place_N].detach()
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="needs t_R"):
        Denoiser(model).logits(x_BL, None, local_N, place_N)


def test_a_condition_for_a_model_without_a_latent_is_refused(latent_model):
    with pytest.raises(ValueError, match="without a latent"):
        Denoiser(tiny_backbone(V, L), condition(latent_model))


def test_nothing_is_recorded_for_gradients(latent_model, x_BL):
    c_BGC = latent_model.latent(torch.randn(B, 2, 3))
    assert c_BGC.requires_grad
    assert not Denoiser(latent_model, c_BGC).logits(x_BL, None, *places(B, 3)).requires_grad


@pytest.mark.parametrize("kind", ["latent", "guided", "time"])
def test_blocks_give_every_product_one_shape_and_rows_the_same_logits_in_any_batch(kind, monkeypatch):
    model = tiny_backbone(V, L, time=True) if kind == "time" else tiny_backbone(V, L, groups=2)
    rows, guidance = 10, 2.0 if kind == "guided" else 1.0
    x_BL = torch.randint(V + 1, (rows, L), generator=torch.Generator().manual_seed(3))
    c_BGC, t_B = (None, torch.linspace(0.1, 1, rows)) if kind == "time" else (condition(model, rows), None)
    plain = Denoiser(model, c_BGC, guidance).logits(x_BL, None, *places(rows, 7), t_B)
    shapes = set()
    forward, product, modulations = model.forward, torch.mm, model.modulations
    monkeypatch.setattr(denoiser, "FIXED_PLACES", 8)  # so that tokens of several products are drawn together
    monkeypatch.setattr(model, "forward", lambda x, *a, **k: shapes.add(tuple(x.shape)) or forward(x, *a, **k))
    monkeypatch.setattr(torch, "mm", lambda h, w, out: shapes.add(tuple(h.shape)) or product(h, w, out=out))
    monkeypatch.setattr(model, "modulations", lambda c: shapes.add(("c", len(c), c.shape[1])) or modulations(c))

    def at(chosen: list[int]) -> torch.Tensor:
        c, t = (each[chosen] if each is not None else None for each in (c_BGC, t_B))
        row, place = torch.arange(len(chosen)).repeat_interleave(L), torch.arange(L).repeat(len(chosen))
        return Denoiser(model, c, guidance, block=4).logits(x_BL[chosen], None, row, place, t).unflatten(0, (-1, L))

    whole = at(list(range(rows)))
    for chosen in ([0], [9], [3, 4, 5], [9, 8, 7, 6, 5]):
        assert torch.equal(at(chosen), whole[chosen])
    assert shapes - {("c", 4, 2), ("c", 1, 1)} == {(4, L), (8, 16)}
    torch.testing.assert_close(whole[places(rows, 7)], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [None, 4])
def test_several_samplers_share_one_run_and_each_gets_its_own_answer(latent_model, x_BL, block):
    c_BGC, rows_R = condition(latent_model), torch.tensor([3, 1])
    makers = [
        Denoiser(latent_model, c_BGC, block=block),
        Denoiser(latent_model, c_BGC.flip(0), 2.0, block=block),
        Denoiser(latent_model, block=block),
        Denoiser(latent_model, c_BGC[:1], block=block),
    ]
    asks = [
        asked(x_BL, None, *places(B, 5)),
        asked(x_BL[rows_R], rows_R, *places(2, 7)),
        asked(x_BL.flip(0), None, *places(B, 3)),
        asked(x_BL, None, *places(B, 4)),
    ]
    together = denoiser.hidden_together(list(zip(makers, asks, strict=True)))
    for maker, ask, answer in zip(makers, asks, together, strict=True):
        own = torch.cat([logits for _, logits in maker.hidden(ask).chunks()])
        shared = torch.cat([logits for _, logits in answer.chunks()])
        torch.testing.assert_close(shared, own, atol=0 if block else 1e-6, rtol=0 if block else 1e-5)


def test_samplers_with_a_time_share_a_run_too(x_BL):
    model = tiny_backbone(V, L, time=True)
    asks = [asked(x_BL, None, *places(B, 5), torch.full((B,), t)) for t in (0.2, 0.9)]
    together = denoiser.hidden_together([(Denoiser(model), ask) for ask in asks])
    for ask, answer in zip(asks, together, strict=True):
        torch.testing.assert_close(answer.h_ND, Denoiser(model).hidden(ask).h_ND, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(together[0].h_ND, together[1].h_ND)


def test_packed_modulations_are_off_by_half_a_step_of_their_vectors_scale():
    six = [torch.randn(B, 2, 6, 40, generator=torch.Generator().manual_seed(k)) * 3.0**k for k in range(3)]
    six[0][1, 0, 2] = 0.0
    back = unpacked(packed(six))
    for each, again in zip(six, back, strict=True):
        step = each.abs().amax(dim=-1, keepdim=True) / 127
        assert ((each - again).abs() <= step / 2 * (1 + 1e-5)).all()
        assert not torch.equal(each, again)
    assert (back[0][1, 0, 2] == 0).all()
    assert all(a is b for a, b in zip(unpacked(six), six, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_fused_pass_reads_them_packed_and_gives_nearly_the_same(latent_model, x_BL, guidance):
    c_BGC, (local_N, place_N), rows_R = condition(latent_model), places(2, 9), torch.tensor([3, 1])
    ask = asked(x_BL[rows_R], rows_R, local_N, place_N)
    makers = [
        Denoiser(latent_model, c_BGC, guidance, block=4, trunk=Trunk(latent_model, fused=fused))
        for fused in (False, True)
    ]
    assert [maker.six[0].dtype for maker in makers] == [torch.float32, torch.int8]
    plain, with_packed = (maker.logits(ask.x_RL, rows_R, local_N, place_N) for maker in makers)
    assert not torch.equal(plain, with_packed)
    assert (with_packed - plain).square().mean().sqrt() < 0.03 * plain.std()
    (together, again) = denoiser.hidden_together([(makers[1], ask), (makers[1], ask)])
    torch.testing.assert_close(together.h_ND, makers[1].hidden(ask).h_ND)
    torch.testing.assert_close(again.h_ND, together.h_ND)


def test_few_groups_are_not_packed():
    assert not Trunk(tiny_backbone(V, 8 * 3, groups=2), fused=True).packs
    assert Trunk(tiny_backbone(V, 8 * 2, groups=2), fused=True).packs
    assert not Trunk(tiny_backbone(V, L), fused=True).packs
