"""What only a GPU can show: the compiled step, the device-side guard against bad losses, bf16."""

import copy
import dataclasses
import json

import pytest
import torch

from rmdm.backbone import cross_entropy
from rmdm.backbone.cross_entropy import linear_cross_entropy
from rmdm.backbone.gelu import gelu
from rmdm.errors import TrainingError
from rmdm.hub import load_model
from rmdm.precision import autocast
from rmdm.samplers.generate import own_settings
from rmdm.training import loop
from rmdm.training.distributed import World
from rmdm.training.language import Corpus, LanguageTask
from rmdm.training.loop import train
from tests.conftest import small_config
from tests.reference.tiny import tiny_backbone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(config, out, shards, device):
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(shards)))
    task = LanguageTask(config, Corpus.open(shards))
    train(task, out, World(0, 1, torch.device(device)), resume="auto", show=lambda text: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def with_optimizer(config, name):
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=name))


def weights(trainer):
    """An embedding and a matrix, and what the optimiser keeps of them."""
    backbone, state = trainer.objective.backbone, trainer.optimizer.state
    chosen = [backbone.embed.weight, backbone.blocks[0].up.weight]
    return [p.detach() for p in chosen] + [value for p in chosen for value in state[p].values()]


@pytest.mark.parametrize(
    ("process", "optimizer"), [("mdlm", "adamw"), ("ar", "adamw"), ("sedd", "adamw"), ("mdlm", "muon")]
)
def test_compiled_fp32_steps_have_the_losses_of_the_cpu(process, optimizer, shards, tmp_path):
    config = with_optimizer(small_config(process, precision="fp32"), optimizer)
    on_cpu = run(config, tmp_path / "cpu", shards, "cpu")
    on_gpu = run(config, tmp_path / "gpu", shards, "cuda")
    assert on_gpu == pytest.approx(on_cpu, abs=2e-3)
    assert on_cpu[0] - on_cpu[-1] > 0.05


@pytest.mark.parametrize("score_entropy", [False, True])
@pytest.mark.parametrize("vocab", [50, 9000])
def test_compiled_the_fused_cross_entropy_has_the_values_and_gradients_of_the_plain_one(
    vocab, score_entropy, monkeypatch
):
    generator = torch.Generator().manual_seed(0)
    h, head = (torch.randn(n, 64, generator=generator).cuda().requires_grad_() for n in (300, vocab + 62))
    target, weight = torch.randint(vocab, (300,), generator=generator).cuda(), torch.rand(300).cuda()
    found = []
    for fused in (False, True):
        monkeypatch.setattr(cross_entropy, "fuses", lambda _, fused=fused: fused)
        torch.compiler.reset()
        function = torch.compile(linear_cross_entropy, fullgraph=True)
        with torch.autocast("cuda", enabled=False):
            loss = function(h, head / 8, target, weight, vocab, score_entropy)
            found.append((loss.detach(), *torch.autograd.grad(3 * loss, (h, head))))
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def test_compiled_the_gelu_is_torchs_own():
    x = torch.linspace(-9, 9, 4096, device="cuda").requires_grad_()
    y = torch.compile(gelu, fullgraph=True)(x)
    expected = torch.nn.functional.gelu(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_a_network_with_a_latent_a_token_has_the_values_and_gradients_it_has(recompute):
    model = tiny_backbone(20, 6, groups=6).train().cuda()
    model.recompute = recompute
    generator = torch.Generator().manual_seed(0)
    x_BL, z_BGK = (
        torch.randint(20, (3, 6), generator=generator).cuda(),
        torch.randn(3, 6, 3, generator=generator).cuda(),
    )
    at_N = torch.tensor([3, 17, 0, 8], device="cuda")
    trained = [p for name, p in model.named_parameters() if "blocks" in name or "embed" in name]
    torch.compiler.reset()
    found = []
    for network in (model, torch.compile(model, fullgraph=True)):
        h_ND = network(x_BL, c_BGC=model.latent(z_BGK), at_N=at_N)
        found.append([h_ND, *torch.autograd.grad(h_ND.sin().sum(), trained)])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4 * float(plain.detach().abs().max()))


def test_bf16_stays_close_to_fp32(shards, tmp_path):
    full = run(small_config(precision="fp32"), tmp_path / "fp32", shards, "cuda")
    half = run(small_config(precision="bf16"), tmp_path / "bf16", shards, "cuda")
    assert half == pytest.approx(full, abs=2e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bad_loss_blocks_this_and_later_updates_until_the_host_learns_of_it(optimizer, shards, tmp_path, monkeypatch):
    real, seen = loop.Trainer.update, {}

    def poisoned(self, item, stop):
        if item.step == 6:
            seen["trainer"] = self
            seen["before"] = copy.deepcopy(weights(self))
            with torch.no_grad():
                self.objective.backbone.norm_scale.fill_(float("nan"))
        return real(self, item, stop)

    monkeypatch.setattr(loop.Trainer, "update", poisoned)
    with pytest.raises(TrainingError, match="step 7: loss nan"):
        run(with_optimizer(small_config(), optimizer), tmp_path, shards, "cuda")
    for before, after in zip(seen["before"], weights(seen["trainer"]), strict=True):
        assert torch.equal(before, after)


def test_samples_on_the_gpu_are_those_of_the_cpu(shards, tmp_path):
    run(small_config(steps=60, save_every=0), tmp_path, shards, "cuda")
    rows = []
    for device in ("cpu", "cuda"):
        model = load_model(tmp_path, device)
        writer = model.writer(half=False)
        rows.append(writer.write(*writer.blank(16, 0), own_settings(model.backbone, model.config.sample, 8)).cpu())
    # A draw that falls within rounding of a boundary may differ, and then the rest of that row.
    same = (rows[0] == rows[1]).all(dim=1).float().mean()
    assert float(same) >= 0.8


@pytest.mark.parametrize("process", ["mdlm", "sedd", "ar"])
def test_a_text_does_not_depend_on_its_batch_in_bf16(process, shards, tmp_path):
    run(small_config(process, steps=60, save_every=0), tmp_path, shards, "cuda")
    model, n = load_model(tmp_path, "cuda"), 128
    writer, how = model.writer(), own_settings(model.backbone, model.config.sample, 8)
    x_BL, keys_B = writer.blank(n, 0)
    with autocast(x_BL.device):
        together, apart, alone = (writer.write(x_BL, keys_B, how, batch=batch) for batch in (64, 7, 1))
    assert len(together.unique(dim=0)) > n // 2
    assert torch.equal(together, apart)
    assert torch.equal(together, alone)
