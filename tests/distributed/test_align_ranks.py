"""One rank against two for stage I (gloo, on the CPU): the same losses and gradients, and the same flow and z_0.

Sums over ranks are made in another order than in one process, so the losses agree to 1e-5. The finished flow and z_0
agree to 1e-3: the difference of a rounding error grows with every step of AdamW, and z_0 is stored in fp16 beside it.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rmdm.encoders.cache import LatentRows
from rmdm.meanflow.flow import Flow
from tests.stage_one import align_flags, prepare_stories, run, save_bert


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_bert(folder / "bert", prepare_stories(folder / "shards"))
    run("encode", "storyworld-mini", *align_flags(folder / "shards", folder / "bert"))
    return folder


@pytest.fixture(scope="module")
def alone(place) -> dict[str, Path]:
    """Runs of one rank, by recipe."""
    return {recipe: align(place, f"one-{recipe}", recipe, ranks=1) for recipe in ("paper", "robust")}


def align(place: Path, name: str, recipe: str, *, ranks: int, fresh: bool = False, **more: str) -> Path:
    """Both directions, so that the robust recipe trains its student as well; returns a folder of its own."""
    folder = place / name
    shutil.copytree(place / "shards", folder / "shards", ignore=shutil.ignore_patterns("*z0-*"))
    settings = {"meanflow__recipe": recipe, "meanflow__direction": "both", "meanflow__transport_steps": "2", **more}
    flags = align_flags(folder / "shards", place / "bert", **settings)
    run("align", "storyworld-mini", *flags, "--out", str(folder / "run"), ranks=ranks, fresh=fresh)
    return folder


def figures(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def z0(folder: Path) -> torch.Tensor:
    cache = next((folder / "shards").glob("latents-*"))
    kind = next(cache.glob("manifest-z0-*.json")).stem.removeprefix("manifest-")
    splits = [LatentRows.open(cache, split, kind) for split in ("train", "valid")]
    return torch.cat([torch.from_numpy(rows.take(np.arange(len(rows)))) for rows in splits])


@pytest.mark.parametrize(("recipe", "parallel", "micro"), [
    ("paper", "ddp", "4"), ("paper", "fsdp", "null"), ("robust", "ddp", "4"), ("robust", "fsdp", "null"),
])  # fmt: skip
def test_two_ranks_end_where_one_does(place, alone, recipe, parallel, micro):
    more = {"meanflow__train__parallel": parallel, "meanflow__train__micro_batch": micro}
    under_torchrun = (recipe, parallel) == ("robust", "fsdp")
    two = align(place, f"two-{recipe}-{parallel}", recipe, ranks=2, fresh=under_torchrun, **more)
    one = alone[recipe]
    networks = ["run/flow", "run/flow/student"] if recipe == "robust" else ["run/flow"]
    for network in networks:
        for name, allowed in (("loss", 1e-5), ("grad_norm", 1e-4), ("valid_loss", 1e-4)):
            first, second = figures(one / network, name), figures(two / network, name)
            assert len(first) == (24 if name != "valid_loss" else 1)
            assert second == pytest.approx(first, rel=allowed, abs=allowed), (network, name)
        assert len(set(figures(one / network, "loss"))) > 20
    a, b = Flow.load(one / "run" / "flow"), Flow.load(two / "run" / "flow")
    for left, right in ((a.net, b.net), (a.student, b.student)):
        if left is None:
            assert recipe == "paper"
            continue
        for name, value in left.state_dict().items():
            torch.testing.assert_close(right.state_dict()[name], value, rtol=1e-3, atol=1e-3)
    assert a.maps.keys() == b.maps.keys()
    torch.testing.assert_close(z0(two), z0(one), rtol=1e-3, atol=2e-3)
    moved = (z0(one) - torch.from_numpy(embeddings(one))).abs().mean()
    assert moved > 0.02, "a flow that does nothing would agree with any other"


def embeddings(folder: Path) -> np.ndarray:
    cache = next((folder / "shards").glob("latents-*"))
    splits = [LatentRows.open(cache, split) for split in ("train", "valid")]
    return np.concatenate([rows.take(np.arange(len(rows))) for rows in splits])


def test_a_flow_goes_on_with_another_number_of_ranks(place, alone):
    folder = align(place, "moved", "robust", ranks=2, meanflow__train__steps="8", meanflow__direction="align")
    settings = {"meanflow__recipe": "robust", "meanflow__direction": "both", "meanflow__transport_steps": "2"}
    flags = align_flags(folder / "shards", place / "bert", **settings)
    done = run("align", "storyworld-mini", *flags, "--out", str(folder / "run"))
    assert "from step 8" in done.stdout
    assert figures(folder / "run/flow", "loss") == pytest.approx(
        figures(alone["robust"] / "run/flow", "loss"), abs=1e-5
    )


def test_two_ranks_begin_a_student_of_fewer_steps_afresh(place):
    folder = align(place, "shorter", "robust", ranks=2)
    settings = {"meanflow__recipe": "robust", "meanflow__direction": "both", "meanflow__transport_steps": "2"}
    flags = align_flags(folder / "shards", place / "bert", meanflow__distil_steps="6", **settings)
    done = run("align", "storyworld-mini", *flags, "--out", str(folder / "run"), ranks=2)
    assert done.stdout.count("trained afresh") == 1
    assert Flow.load(folder / "run" / "flow").settings.distilled == [6, 256]
    assert len(figures(folder / "run" / "flow" / "student", "loss")) == 6
