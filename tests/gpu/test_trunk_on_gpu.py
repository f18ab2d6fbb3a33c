"""A recorded pass is the pass: bit by bit, for every kind of model, condition and precision."""

import pytest
import torch

from rmdm.samplers import Denoiser, SampleSettings, row_keys, sample
from rmdm.samplers.generate import autocast
from rmdm.samplers.trunk import Trunk
from tests.reference.tiny import tiny_backbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
V, L, GROUPS = 50, 16, 4
KINDS = {"plain": {}, "latent": {"groups": GROUPS}, "time": {"time": True}}


def model_of(kind: str):
    return tiny_backbone(V, L, **KINDS[kind]).cuda().eval()


def condition(model, rows: int) -> torch.Tensor | None:
    if model.latent is None:
        return None
    z = torch.randn(rows, GROUPS, model.latent.project, generator=torch.Generator().manual_seed(1)).cuda()
    return model.latent(z).detach()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_plain_pass(kind, half):
    model = model_of(kind)
    names = ["analytic"] if kind == "time" else ["ancestral", "entropy", "balanced"]
    trunk = Trunk(model)
    for name in names:
        for rows, guidance in ((3, 1.0), (20, 1.0), (9, 1.5)):
            guidance = guidance if kind == "latent" else 1.0
            c, x_BL = condition(model, rows), torch.full((rows, L), V, device="cuda")
            x_BL[:, ::5] = 2
            chosen, texts = SampleSettings(name, steps=5, guidance=guidance), []
            for recorded in (trunk, None):
                with torch.no_grad(), autocast(torch.device("cuda")) if half else torch.autocast("cuda", enabled=False):
                    denoiser = Denoiser(model, c, guidance, block=8, trunk=recorded)
                    texts.append(sample(denoiser, x_BL, row_keys(0, range(rows)), chosen))
            assert torch.equal(*texts)
    shapes = {"plain": 1, "time": 1, "latent": 2}[kind]  # with guidance, the null's single row too
    assert len(trunk.recordings) == shapes


def test_new_weights_in_the_same_place_are_seen_and_moved_ones_recorded_again():
    model = model_of("plain")
    trunk, x_RL = Trunk(model), torch.full((8, L), V, device="cuda")
    before = trunk(x_RL, None).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = trunk(x_RL, None).clone()
    assert not torch.equal(before, after)
    with torch.no_grad():
        assert torch.equal(after, model(x_RL))
    assert len(trunk.recordings) == 1
    model.to("cpu").to("cuda")
    assert torch.equal(trunk(x_RL, None), after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_pass_computes_the_same_to_rounding(kind):
    model = model_of(kind)
    x_RL = torch.randint(V + 1, (8, L), generator=torch.Generator().manual_seed(0)).cuda()
    c, t_R = condition(model, 8), torch.rand(8, device="cuda") if kind == "time" else None
    with torch.no_grad(), autocast(torch.device("cuda")):
        six = model.modulations(c) if c is not None else None
        plain = Trunk(model)(x_RL, six, t_R).clone()
        compiled = Trunk(model, compiled=True)
        torch.testing.assert_close(compiled(x_RL, six, t_R), plain, atol=0.05, rtol=0.05)
        other = torch.full_like(x_RL, V)
        torch.testing.assert_close(compiled(other, six, t_R), Trunk(model)(other, six, t_R), atol=0.05, rtol=0.05)
    assert len(compiled.recordings) == 1
