"""Fixtures shared by all tests. Threads are limited before torch loads: the suite runs one process a core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # else numba, once imported, gives torch all cores again
os.environ.setdefault("NUMBA_OPT", "0")  # umap compiles for many seconds to place a few points

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on a CPU, number by number
    os.environ.setdefault("RMDM_PRECISION", "fp32")  # the same on any processor; test_precision.py has bf16

import dataclasses
import subprocess
from pathlib import Path

import pytest

from rmdm.config import Config
from rmdm.presets import load_config
from tests import warm

SMALL = {
    "data.stories": "600",
    "data.holdout": "100",
    "process": "mdlm",
    "encoder.name": "null",
    "model.layers": "2",
    "model.width": "32",
    "model.heads": "2",
    "train.steps": "12",
    "train.batch": "16",
    "train.compile": "false",
    "train.log_every": "1",
    "train.valid_every": "0",
    "train.valid_rows": "32",
    "train.sample_every": "0",
    "train.save_every": "4",
    "optim.name": "adamw",
    "optim.warmup": "4",
}


def small_flags(**overrides: str) -> list[str]:
    """Flags that shrink storyworld-mini to seconds; keyword `a__b` overrides `a.b`."""
    values = SMALL | {name.replace("__", "."): value for name, value in overrides.items()}
    return [word for name, value in values.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small storyworld corpus, prepared once."""
    from rmdm.data.prepare import prepare

    folder = tmp_path_factory.mktemp("shards") / "mini"
    prepare(dataclasses.replace(small_config().data, dir=str(folder)), progress=False)
    return folder


def small_config(process: str = "mdlm", **train: object) -> Config:
    """A config for tests that train in this process."""
    base = load_config("storyworld-mini")
    return dataclasses.replace(
        base,
        process=process,
        data=dataclasses.replace(base.data, stories=600, holdout=100),
        encoder=dataclasses.replace(base.encoder, name=None),
        model=dataclasses.replace(base.model, layers=2, width=32, heads=2, dropout=0.1),
        optim=dataclasses.replace(base.optim, name="adamw", warmup=4),
        train=dataclasses.replace(
            base.train,
            **{
                "compile": None,
                "steps": 12, "batch": 16, "log_every": 1, "valid_every": 0, "valid_rows": 32, "sample_every": 0,
                "save_every": 4, **train,
            },
        ),
    )  # fmt: skip


def rmdm(*args: str, ranks: int = 1, fresh: bool = False, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; `fresh` is a new interpreter, under torchrun if `ranks` > 1."""
    done = warm.fresh("-m", "rmdm", *args, ranks=ranks) if fresh else warm.run(warm.CLI, *args, ranks=ranks)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
