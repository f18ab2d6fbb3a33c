"""The reference arm computes what the product computes: the same law of samples, the same loss."""

import numpy as np
import pytest
import torch

from rmdm.bench.reference import PlainBatch, PlainNetwork, PlainTrainer, plain_loss, plain_sample
from rmdm.config import OptimConfig
from rmdm.processes import PROCESSES, Draw, Objective
from rmdm.training.batches import with_latents
from tests.reference.test_samplers import ancestral_law, condition, probs
from tests.reference.tiny import p_value, tiny_backbone

V, L, DRAWS, REJECTED = 3, 4, 4_000, 1e-3


def drawn(network, steps, seed, zt_BGd=None):
    generator = torch.Generator().manual_seed(seed)
    zt = zt_BGd.expand(DRAWS, -1, -1) if zt_BGd is not None else None
    return [tuple(row) for row in plain_sample(network, DRAWS, steps, zt_BGd=zt, generator=generator).tolist()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_its_samples_follow_the_enumerated_law(steps, seed):
    model = tiny_backbone(V, L, seed=10)
    assert p_value(drawn(PlainNetwork(model), steps, seed), ancestral_law(probs(model), steps)) > REJECTED


@pytest.mark.parametrize("seed", range(3))
def test_its_samples_follow_the_law_given_a_latent(seed):
    model = tiny_backbone(V, L, seed=18, groups=2)
    zt = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    law = ancestral_law(probs(model, condition(model, 0)), 3)
    rows = drawn(PlainNetwork(model), 3, seed, zt)
    assert p_value(rows, law) > REJECTED
    assert p_value(rows, ancestral_law(probs(model, condition(model, 1)), 3)) < REJECTED


def batch_of(process, model, rows=6, pad=False):
    random = np.random.default_rng(0)
    x_BL = random.integers(model.vocab_size, size=(rows, model.length))
    counted_BL = np.ones_like(x_BL, dtype=bool)
    if pad:
        counted_BL[:, -2:] = False
    batch = PROCESSES[process].batch(x_BL, counted_BL, model.mask_id, Draw(0, 3, np.arange(rows), rows))
    latents = FixedLatents(random.standard_normal((rows, 2, 4)).astype(np.float32)) if process == "rmdm" else None
    return with_latents(batch, latents, np.arange(rows)), int(counted_BL.sum())


class FixedLatents:
    def __init__(self, z_nGK):
        self.z_nGK = z_nGK

    def take(self, indices):
        return self.z_nGK[indices]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("process", ["mdlm", "rmdm", "sedd", "ar"])
def test_its_loss_and_gradient_are_those_of_the_product(process, pad):
    model = tiny_backbone(
        7, 12, seed=3, causal=process == "ar", groups=2 if process == "rmdm" else None, time=process == "sedd"
    )
    batch, tokens = batch_of(process, model, pad=pad)
    network = PlainNetwork(model)
    ours = Objective(model)(batch, torch.tensor(1 / tokens))
    plain = plain_loss(network, PlainBatch.of(batch), tokens)
    ours.backward()
    plain.backward()
    assert plain.item() == pytest.approx(ours.item(), rel=1e-5)
    torch.testing.assert_close(network.embed.weight.grad, model.embed.weight.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(network.blocks[0].qkv.weight.grad, model.blocks[0].qkv.weight.grad, rtol=1e-3, atol=1e-5)


def test_its_trainer_learns_and_averages():
    model = tiny_backbone(7, 12, seed=3)
    batch, tokens = batch_of("mdlm", model)
    config = OptimConfig(lr=1e-2, warmup=1, ema=0.5)
    trainer = PlainTrainer(PlainNetwork(model), config, steps=20)
    before = [average.clone() for average in trainer.averages]
    losses = [float(trainer.update(step, PlainBatch.of(batch), tokens)) for step in range(20)]
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.averages, strict=True))
    assert not torch.equal(trainer.averages[0], next(trainer.network.parameters()))
