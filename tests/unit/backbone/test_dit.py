import pytest
import torch

from rmdm.backbone import dit
from rmdm.backbone.dit import Causes, DiT, KVCache, rotate
from rmdm.backbone.dropout import dropout
from rmdm.config import ModelConfig
from tests.reference.tiny import tiny_backbone

V, L = 11, 8
CONFIG = ModelConfig(layers=2, width=32, heads=4)


def randomised(causal: bool, config: ModelConfig = CONFIG) -> DiT:
    torch.manual_seed(0)
    model = DiT(config, V, L, causal=causal)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def test_untrained_network_is_the_uniform_distribution():
    model = DiT(CONFIG, V, L)
    logits = model.logits(model(torch.randint(V, (2, L))))
    assert logits.shape == (2, L, V)
    assert logits.abs().max() == 0


def test_embedding_has_a_row_for_the_mask_and_is_padded_to_64():
    model = DiT(CONFIG, 64, L)
    assert model.embed.num_embeddings == 128
    assert model.mask_id == 64


def test_rotary_scores_depend_on_distance_only():
    model = randomised(causal=False)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        turned = [rotate(x, *model.rotary(place, 1)) for x, place in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(6, 3), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_causal_model_ignores_what_comes_later_and_the_other_does_not():
    x = torch.randint(V, (1, L))
    y = x.clone()
    y[0, -1] = (y[0, -1] + 1) % V
    causal, both = randomised(causal=True), randomised(causal=False)
    torch.testing.assert_close(causal(x)[:, :-1], causal(y)[:, :-1])
    assert (both(x)[:, :-1] - both(y)[:, :-1]).abs().max() > 1e-3


@pytest.mark.parametrize("learned", [False, True])
def test_cached_decoding_equals_the_full_forward_pass(learned):
    model = randomised(True, ModelConfig(layers=2, width=32, heads=4, learned_positions=learned))
    x = torch.randint(V, (3, L))
    cache = KVCache(CONFIG, 3, L, torch.device("cpu"), torch.float32)
    steps = [model(x[:, i : i + 1], cache=cache) for i in range(L)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(x), atol=1e-5, rtol=1e-5)


def test_tied_head_is_the_embedding():
    model = DiT(ModelConfig(layers=1, width=32, heads=4, tie_embeddings=True), V, L)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("learned", [False, True])
def test_only_learned_positions_tell_places_of_a_fully_masked_row_apart(learned):
    model = randomised(False, ModelConfig(layers=2, width=32, heads=4, learned_positions=learned))
    h = model(torch.full((1, L), model.mask_id))[0]
    spread = float((h - h[0]).abs().max().detach())
    assert (spread > 1e-2) == learned
    assert spread < 1e-5 or learned


def test_dropout_is_a_function_of_key_stream_and_element():
    x = torch.ones(4, 16, 64)
    key = torch.tensor([3, 4, 3, 2**62 + 11])
    first = dropout(x, 0.25, key, 0)
    assert torch.equal(first, dropout(x, 0.25, key, 0))
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, dropout(x, 0.25, key, 1))
    assert torch.equal(dropout(x[1:], 0.25, key[1:], 0), first[1:])
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]


def test_dropout_drops_the_share_it_should():
    x = torch.ones(64, 32, 64)
    dropped = (dropout(x, 0.1, torch.arange(64) * 7919, 3) == 0).float()
    # 131,072 draws: four standard errors are 0.0033.
    assert float(dropped.mean()) == pytest.approx(0.1, abs=0.0034)
    assert float(dropped.mean(dim=(0, 1)).std()) == pytest.approx((0.09 / 2048) ** 0.5, rel=0.4)


def test_no_key_or_no_rate_means_no_dropout():
    x = torch.randn(2, 3, 4)
    assert torch.equal(dropout(x, 0.5, None, 0), x)
    assert torch.equal(dropout(x, 0.0, torch.tensor([1, 2]), 0), x)


def names(node) -> str:
    """What a tensor was computed by, step after step."""
    seen, left = {}, [node]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen[node] = node.name()
            left += [before for before, _ in node.next_functions]
    return " ".join(seen.values())


@pytest.mark.parametrize("groups", [None, 6])
@pytest.mark.parametrize("at", [None, [3, 17, 0, 8]], ids=["all", "some"])
def test_fused_the_network_has_the_values_and_gradients_it_has(groups, at, monkeypatch):
    pytest.importorskip("triton")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_backbone(20, 6, groups=groups).train().to(here)
    x_BL = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0)).to(here)
    c = model.latent(torch.randn(3, groups, 3, generator=torch.Generator().manual_seed(1)).to(here)) if groups else None
    trained, found = [p for name, p in model.named_parameters() if "blocks" in name or "embed" in name], []
    for fused in (False, True):
        monkeypatch.setattr(dit, "fuses", lambda _, fused=fused: fused)
        h_BLD = model(x_BL, c_BGC=c, at_N=torch.tensor(at, device=here) if at else None)
        assert ("ResidualNorm" in names(h_BLD.grad_fn)) == fused
        found.append([h_BLD, *torch.autograd.grad(h_BLD.sin().sum(), trained, retain_graph=True)])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-4 * float(plain.detach().abs().max()))


@pytest.mark.parametrize("kind", [{}, {"groups": 2}, {"groups": L}, {"time": True}, {"causal": True}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_wanted_places_have_the_values_and_gradients_they_have_among_all(kind, recompute):
    model = tiny_backbone(V, L, **kind).train()
    model.recompute = recompute
    for block in model.blocks:
        block.dropout = 0.3
    key_B, x_BL = torch.arange(3) * 7919, torch.randint(V + 1, (3, L), generator=torch.Generator().manual_seed(0))
    causes = Causes(key_B, torch.randn(3, kind.get("groups", 1), 4), torch.rand(3))
    at_N = torch.tensor([17, 2, 8, 9, 23])
    seen = []
    model.blocks[-1].up.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:-1].numel()))
    whole = model(x_BL, key_B, causes=causes).flatten(0, 1)[at_N]
    some = model(x_BL, key_B, causes=causes, at_N=at_N)
    torch.testing.assert_close(some, whole, atol=1e-5, rtol=1e-5)
    weight, parameters = torch.randn(whole.shape), [p for name, p in model.named_parameters() if "head" not in name]
    mine, theirs = (torch.autograd.grad((h * weight).sum(), parameters, allow_unused=True) for h in (some, whole))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert set(seen) == {3 * L, 5}


def test_all_places_in_another_order_come_in_that_order():
    model, x_BL = randomised(causal=False), torch.randint(V, (2, L))
    order = torch.randperm(2 * L)
    torch.testing.assert_close(model(x_BL, at_N=order), model(x_BL).flatten(0, 1)[order])
    assert model(x_BL, at_N=order[:0]).shape == (0, 32)
