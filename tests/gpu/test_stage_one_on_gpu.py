"""Stage I on a GPU is what it is on a CPU: encoder, flow and report, compiled and in bf16."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rmdm.config import Config, EncoderConfig, FlowModelConfig, LatentConfig, LoopConfig, MeanFlowConfig, OptimConfig
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.find import open_encoder
from rmdm.encoders.pretrained import PretrainedEncoder
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.align import finish, train_student
from rmdm.meanflow.compare import compare_draws
from rmdm.meanflow.flow import DRAW_ROWS, Flow, FlowSettings
from rmdm.meanflow.report import measure
from rmdm.meanflow.tasks import FlowTask, GuideTask
from rmdm.training.distributed import World
from rmdm.training.loop import train
from tests.unit.encoders.test_pretrained import KINDS, rows_of, save_encoder, word_tokenizer

GROUPS, DIM = 2, 4
HERE = "cuda"
"""The device under test; "cpu" checks the tests themselves."""
pytestmark = [
    pytest.mark.skipif(HERE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's own rules for forward-mode derivatives are scripted when they are first used.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def texts(count: int) -> list[str]:
    """Texts of one to eleven words."""
    words, random = ["the", "cats", "sat", "on", "a", "mat", ".", "it", "was", "red"], np.random.default_rng(0)
    return [" ".join(random.choice(words, size)) for size in random.integers(1, 12, count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_embeddings_are_those_of_the_cpu(
    tmp_path: Path, kind: str, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = EncoderConfig(name=str(save_encoder(tmp_path, kind, num_hidden_layers=3)), precision=precision)
    plain = open_encoder(dataclasses.replace(config, precision="fp32"), word_tokenizer(), 12, torch.device("cpu"))
    there = open_encoder(config, word_tokenizer(), 12, torch.device(HERE))
    assert isinstance(there, PretrainedEncoder)
    pieces = plain.pieces(*rows_of(word_tokenizer(), [*texts(60), ""]), 2)
    same_length: list[Pieces] = [piece for piece in pieces if len(piece.ids_T) == len(pieces[0].ids_T)]
    with caplog.at_level(logging.WARNING, "rmdm"):
        # Shapes that come again, shapes that are new, rows of one length, rows without text.
        for batch in (pieces[:32], pieces[32:], same_length, pieces[:32], pieces[:5], pieces[-1:], pieces[:1]):
            e, expected = there.embed(batch, 2), plain.embed(batch, 2)
            assert (e.device.type, e.dtype) == (HERE, torch.float32)
            difference = (e.cpu() - expected).norm() / expected.norm().clamp_min(1e-6)
            assert difference < (0.05 if precision == "bf16" else 2e-3)
    assert not [record for record in caplog.records if record.name.startswith("rmdm")], "it was not compiled"


def test_the_report_says_what_it_says_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(4096, GROUPS, DIM, generator=generator) ** 3 / 4
    z, mixing = torch.randn(4096, GROUPS, DIM, generator=generator), torch.randn(DIM, DIM, generator=generator)
    here, there = (
        measure(z.to(device), (z @ mixing).to(device), train_NGD=e[:2048].to(device), projection_dD=torch.eye(2, DIM))
        for device in ("cpu", HERE)
    )
    for name in ("moments", "w1_slices", "w1_axes", "norm", "correlation"):
        a, b = (dataclasses.asdict(getattr(figures, name)) for figures in (here, there))
        assert b == pytest.approx(a, rel=2e-3, abs=2e-3), name
    assert here.recovery is not None
    assert there.recovery is not None
    assert there.recovery.z0 == pytest.approx(here.recovery.z0, abs=1e-3)
    assert there.classifier is not None
    draws = [compare_draws(z.to(device), e.to(device), e[::2].numpy(), slices=64) for device in ("cpu", HERE)]
    assert draws[1].w1_axes.mean == pytest.approx(draws[0].w1_axes.mean, rel=1e-3)
    assert draws[1].nearest.draws == pytest.approx(draws[0].nearest.draws, rel=1e-3)
    assert draws[1].classifier.value > 0.6, "cubes of normal numbers must be told from normal numbers"


class MemoryRows:
    """Embeddings in memory: correlated, with heavy tails, and not about 0, so that a flow learns much in few steps."""

    def __init__(self, n: int, seed: int) -> None:
        self.groups, self.dim = GROUPS, DIM
        x = np.random.default_rng(seed).standard_normal((n, GROUPS, DIM))
        self.e_nGD = (np.sinh(x) * 0.6 + 0.3 * x[:, ::-1] + 3).astype(np.float32)

    def __len__(self) -> int:
        return len(self.e_nGD)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The rows at `indices`."""
        return self.e_nGD[indices]


def flow_config(recipe: Any, steps: int, precision: Any, lr: float = 3e-3) -> Config:
    return Config(
        name="tiny",
        latent=LatentConfig(groups=GROUPS, dim=DIM),
        meanflow=MeanFlowConfig(
            recipe=recipe,
            model=FlowModelConfig(layers=2, width=32, heads=2),
            optim=OptimConfig(lr=lr, warmup=5, ema=0.9),
            direction="both",
            guide_steps=steps // 4,
            distil_steps=steps,
            distil_rows=512,
            train=LoopConfig(
                steps=steps, batch=64, precision=precision, log_every=1, valid_every=steps, valid_rows=64, save_every=0,
                compile=None if HERE == "cuda" else False,
            ),
        ),
    )  # fmt: skip


def losses(task: FlowTask, out: Path, device: str) -> list[float]:
    train(task, out, World(0, 1, torch.device(device)), resume="never", show=lambda text: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("recipe", ["paper", "robust"])
def test_compiled_steps_have_the_losses_of_the_cpu(tmp_path: Path, recipe: str) -> None:
    rows, valid = MemoryRows(600, 0), MemoryRows(100, 1)
    enter = Affine(torch.full((GROUPS * DIM,), 0.7), torch.full((GROUPS * DIM,), 0.1))
    found, arms = [], [("cpu", "fp32", 3e-3), (HERE, "fp32", 3e-3), (HERE, "bf16", 3e-3), ("cpu", "fp32", 0.0)]
    for device, precision, lr in arms:
        task = FlowTask(flow_config(recipe, 30, precision, lr), rows, valid, {}, enter, "align")
        found.append(losses(task, tmp_path / str(len(found)), device))
    plain, full, half, still = found
    assert full == pytest.approx(plain, rel=2e-2, abs=2e-3)
    assert half == pytest.approx(plain, rel=0.1, abs=2e-2)
    if recipe == "robust":  # the paper's weighted loss is near 1 by construction
        assert np.mean(plain[-10:]) < 0.8 * np.mean(still[-10:])


def test_latents_and_draws_are_those_of_the_cpu(tmp_path: Path) -> None:
    rows = MemoryRows(600, 0)
    enter = Affine(torch.full((GROUPS * DIM,), 0.7), torch.full((GROUPS * DIM,), 0.1))
    config = flow_config("robust", 40, "auto")
    task = FlowTask(config, rows, None, {}, enter, "align")
    losses(task, tmp_path / "flow", HERE)
    losses(GuideTask(task), tmp_path / "flow" / "guide", HERE)
    world = World(0, 1, torch.device(HERE))
    assert train_student(config, tmp_path / "flow", GROUPS, DIM, world, "never", lambda text: None, "align") is None
    finish(config, rows, tmp_path / "flow", enter, "x", world.device, lambda text: None)
    here, there = (Flow.load(tmp_path / "flow", device) for device in ("cpu", HERE))
    assert here.guide is not None
    assert here.student is not None
    e = torch.from_numpy(rows.e_nGD)
    z_here, z_there = (flow.to_latent(e).cpu() for flow in (here, there))
    assert (z_here - enter.apply(e)).abs().mean() > 0.3, "the flow moves nothing"
    torch.testing.assert_close(z_there, z_here, rtol=0.02, atol=0.02)
    for steps in (1, 4, 16):
        torch.testing.assert_close(there.draw(64, 0, steps).cpu(), here.draw(64, 0, steps), rtol=0.03, atol=0.03)


@pytest.mark.skipif(HERE == "cpu", reason="a CPU has the plain network")
@pytest.mark.parametrize("guide", [False, True])
def test_writing_draws_by_the_fused_and_recorded_network_what_the_plain_one_draws(guide: bool) -> None:
    from rmdm.meanflow.fused import FusedNet
    from rmdm.meanflow.net import FlowNet

    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = FlowNet(FlowModelConfig(layers=3, width=64, heads=2), 4, 16).eval()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        nets.append(net.to(HERE))
    settings = FlowSettings(
        "robust", 4, 16, 3, 64, 2, 4.0, 16, 16, "x", 0, guide=[10, 1.5] if guide else None,
    )  # fmt: skip
    flow = Flow(settings, nets[0], guide=nets[1] if guide else None)
    noise = flow.noise(DRAW_ROWS, 0)
    fused, other = flow.to_embedding(noise), flow.to_embedding(torch.cat((noise, noise[:1])))[:DRAW_ROWS]
    assert "leads" in flow.recorded
    assert guide or isinstance(flow.recorded["leads"].run, FusedNet)
    moved = (other - noise).norm()
    assert moved > 0.3 * noise.norm()
    assert (fused - other).norm() < 0.02 * moved
    assert torch.equal(flow.to_embedding(noise), fused)
    # Rows drawn beside others are the same rows.
    mixed = noise.flip(0).clone()
    mixed[:7] = noise[:7]
    assert torch.equal(flow.to_embedding(mixed)[:7], fused[:7])
