"""Sharding on two ranks (gloo, on the CPU): what is computed in which precision, and what stays gathered."""

import json
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import rmdm, small_flags
from tests.stage_one import align_flags, prepare_stories, run, save_bert

SEEN = """
import json, sys
import numpy as np, torch
from rmdm.backbone.dit import Block, DiT
from rmdm.config import ModelConfig
from rmdm.processes import Objective
from rmdm.training.distributed import Parallel, world
with world("cpu") as here:
    torch.manual_seed(0)
    trunk = DiT(ModelConfig(layers=3, width=64, heads=4), 30, 512)
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x_BL = torch.from_numpy(np.random.default_rng(0).integers(0, 30, (1, 512)))
    plain, seen, attend = trunk(x_BL), {}, Block.attend
    def watched(self, m_BLD, cos, sin, *rest):
        seen["angles"] = torch.equal(cos, trunk.rotary.cos)
        return attend(self, m_BLD, cos, sin, *rest)
    Block.attend = watched
    Parallel(Objective(trunk).eval(), here, sys.argv[1], torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = trunk(x_BL)
    seen["error"] = float((found.float() - plain).norm() / plain.norm())
    if here.is_main:
        print(json.dumps(seen))
"""


def figures(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def train(shards: Path, out: Path, parallel: str, ranks: int = 2, **overrides: str) -> str:
    """Train a small model; returns what was said."""
    conditioned = {"latent__independent": "true", "latent__draw": "prior", "model__dropout": "0.1"}
    flags = small_flags(
        data__dir=str(shards), train__device="cpu", train__parallel=parallel, **conditioned, **overrides
    )
    return rmdm("train", "storyworld-mini", *flags, "--out", str(out), ranks=ranks).stdout


@pytest.mark.parametrize("process", ["mdlm", "sedd", "rmdm"])
def test_sharded_training_in_bf16_has_the_losses_of_ddp(shards, tmp_path, process):
    flags = {"process": process, "train__precision": "bf16", "train__valid_every": "6"}
    for parallel in ("ddp", "fsdp"):
        train(shards, tmp_path / parallel, parallel, **flags)
    for name, allowed in (("loss", 3e-4), ("grad_norm", 1e-3), ("valid_nats", 3e-4)):
        ddp, fsdp = (figures(tmp_path / parallel, name) for parallel in ("ddp", "fsdp"))
        assert fsdp == pytest.approx(ddp, abs=allowed), name
        assert len(set(ddp)) == len(ddp)


@pytest.mark.parametrize("recipe", ["paper", "robust"])
def test_a_flow_sharded_in_bf16_has_the_losses_of_ddp(tmp_path, recipe):
    save_bert(tmp_path / "bert", prepare_stories(tmp_path / "shards"))
    flags = {"meanflow__recipe": recipe, "meanflow__train__precision": "bf16"}
    found = []
    for parallel in ("ddp", "fsdp"):
        more = align_flags(tmp_path / "shards", tmp_path / "bert", **flags, meanflow__train__parallel=parallel)
        if not found:
            run("encode", "storyworld-mini", *more)
        run("align", "storyworld-mini", *more, "--out", str(tmp_path / parallel), ranks=2)
        found.append({name: figures(tmp_path / parallel / "flow", name) for name in ("loss", "grad_norm")})
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-3)
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], abs=1e-2)


def test_what_a_sharded_block_is_given_is_not_rounded_on_the_way():
    seen = {}
    for parallel in ("ddp", "fsdp"):
        done = warm.run(SEEN, parallel, ranks=2, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stdout + done.stderr
        seen[parallel] = json.loads(done.stdout)
    assert all(one["angles"] for one in seen.values())
    assert seen["fsdp"]["error"] < 1.03 * seen["ddp"]["error"]


def test_more_samples_than_one_batch_holds_can_be_written_in_the_middle(shards, tmp_path):
    flags = {"process": "rmdm", "train__steps": "4", "train__sample_every": "2", "train__sample_n": "66"}
    said = train(shards, tmp_path / "two", "fsdp", **flags)
    assert said.count("step 2: ") == 66
    train(shards, tmp_path / "one", "ddp", ranks=1, **flags)
    assert figures(tmp_path / "two", "loss") == pytest.approx(figures(tmp_path / "one", "loss"), abs=1e-5)
