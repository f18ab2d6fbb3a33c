"""A recorded pass is the pass: bit by bit, for every kind of model, condition and precision; a fused one nearly."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from rmdm.precision import autocast
from rmdm.samplers import Denoiser, SampleSettings, row_keys, sample
from rmdm.samplers.packing import packed
from rmdm.samplers.trunk import Trunk, forward
from tests.reference.tiny import tiny_backbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
V, L, GROUPS = 50, 16, 4
KINDS = {"plain": {}, "latent": {"groups": GROUPS}, "time": {"time": True}}


def model_of(kind: str):
    return tiny_backbone(V, L, **KINDS[kind]).cuda().eval()


def everywhere(x_RL: torch.Tensor) -> torch.Tensor:
    return torch.arange(x_RL.numel(), device="cuda")


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
    trunk = Trunk(model, fused=False)
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
    assert len(trunk.recordings) == 1  # the null is one more row of a guided step


def test_new_weights_in_the_same_place_are_seen_and_moved_ones_recorded_again():
    model = model_of("plain")
    trunk, x_RL = Trunk(model), torch.full((8, L), V, device="cuda")
    at_N = everywhere(x_RL)
    before = trunk(x_RL, None, at_N)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = trunk(x_RL, None, at_N)
    assert not torch.equal(before, after)
    with torch.no_grad():
        assert torch.equal(after, model(x_RL).flatten(0, 1))
    assert len(trunk.recordings) == 1
    model.to("cpu").to("cuda")
    assert torch.equal(trunk(x_RL, None, at_N), after)


@pytest.mark.parametrize("kind", [*KINDS, "a latent a token"])
@torch.no_grad()
def test_a_fused_pass_is_as_near_to_float32_as_the_plain_one(kind):
    model = model_of(kind) if kind in KINDS else tiny_backbone(V, L, groups=L).cuda().eval()
    t_R = torch.rand(8, device="cuda") if kind == "time" else None
    zt = torch.randn(8, model.latent.groups, model.latent.project).cuda() if model.latent is not None else None
    six = model.modulations(model.latent(zt)) if zt is not None else None
    fused, plain = Trunk(model), Trunk(model, fused=False)
    assert fused.fused
    assert fused.packs == (kind in ("latent", "a latent a token"))
    for x_RL in (torch.randint(V + 1, (8, L)).cuda(), torch.full((8, L), V, device="cuda")):
        exact, at_N = forward(model, x_RL, six, t_R).flatten(0, 1), everywhere(x_RL)
        with autocast(torch.device("cuda")):
            found = [trunk(x_RL, six, at_N, None, t_R).float() for trunk in (fused, plain)]
            if six is not None:
                found.append(fused(x_RL, packed(six), at_N, None, t_R).float())
        error, usual, *rounded = ((each - exact).square().mean().sqrt() for each in found)
        assert error < 2 * usual
        assert all(each < 4 * usual for each in rounded)
    assert len(fused.recordings) == (2 if six is not None else 1)


@pytest.mark.parametrize("kind", [*KINDS, "a latent a token", "causal"])
def test_a_text_does_not_depend_on_its_batch(kind):
    others = {"a latent a token": {"groups": L}, "causal": {"causal": True}}
    model = model_of(kind) if kind in KINDS else tiny_backbone(V, L, **others[kind]).cuda().eval()
    rows, trunk = 20, Trunk(model)
    chosen = SampleSettings(
        {"time": "analytic", "causal": "ar"}.get(kind, "ancestral"), steps=L if kind == "causal" else 6
    )
    x_BL, c = torch.full((rows, L), V, device="cuda"), None
    if model.latent is not None:
        c = model.latent(torch.randn(rows, model.latent.groups, model.latent.project, device="cuda")).detach()

    def write(first: int, after: int) -> torch.Tensor:
        some = c[first:after] if c is not None else None
        with torch.no_grad(), autocast(torch.device("cuda")):
            denoiser = Denoiser(model, some, block=8, trunk=trunk)
            return sample(denoiser, x_BL[first:after], row_keys(0, range(first, after)), chosen)

    together = write(0, rows)
    assert len(together.unique(dim=0)) > rows // 2
    assert torch.equal(torch.cat([write(k, k + 1) for k in range(rows)]), together)
    assert torch.equal(torch.cat([write(0, 7), write(7, rows)]), together)


def test_fused_samplers_follow_the_law_of_plain_ones():
    """Chi-square of whole requests, in bf16 with fused passes and draws, against those of the plain pass in bf16."""
    model = tiny_backbone(3, 4).cuda().eval()
    rows, counts = 40_000, []
    for trunk in (Trunk(model), Trunk(model, fused=False)):
        x_BL = torch.full((rows, 4), 3, device="cuda")
        with autocast(torch.device("cuda")):
            denoiser = Denoiser(model, block=2048, trunk=trunk)
            texts = sample(denoiser, x_BL, row_keys(len(counts), range(rows)), SampleSettings("ancestral", steps=3))
        counts.append(
            torch.bincount((texts * torch.tensor([27, 9, 3, 1]).cuda()).sum(dim=1), minlength=81).cpu().numpy()
        )
    seen = (counts[0] + counts[1]) > 20
    assert chi2_contingency(np.array(counts)[:, seen]).pvalue > 0.001
