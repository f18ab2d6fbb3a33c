"""Stage I in seconds: a tiny random encoder, a tiny flow, and the command line in processes that can be killed."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rmdm.data.prepare import prepare
from tests.conftest import small_config, small_flags
from tests.unit.encoders.networks import save_encoder

ALIGN = {
    "data.stories": "700",
    "data.holdout": "200",
    "latent.groups": "4",
    "latent.dim": "4",
    "latent.project": "null",
    "latent.fit_rows": "65536",
    "latent.dtype": "fp16",
    "meanflow.recipe": "robust",
    "meanflow.optim.schedule": "constant",
    "meanflow.model.layers": "1",
    "meanflow.model.width": "16",
    "meanflow.model.heads": "2",
    "meanflow.optim.lr": "3e-3",
    "meanflow.optim.warmup": "4",
    "meanflow.transport_steps": "4",
    "meanflow.distil_steps": "24",
    "meanflow.distil_rows": "256",
    "meanflow.train.steps": "24",
    "meanflow.train.batch": "16",
    "meanflow.train.log_every": "1",
    "meanflow.train.valid_every": "0",
    "meanflow.train.valid_rows": "32",
    "meanflow.train.save_every": "8",
    "meanflow.train.device": "cpu",
}
SMALLER = "import rmdm.meanflow.align as a; a.FIT_ROWS = 512; import rmdm.encoders.cache as c; c.PART_ROWS = 64\n"
"""Fewer draws to fit moments on, and many small parts: the corpus of the tests has 500 rows."""


def prepare_stories(folder: Path) -> Path:
    """Token shards of 500 stories and 200 held-out ones."""
    data = dataclasses.replace(small_config().data, stories=700, holdout=200, dir=str(folder))
    prepare(data, progress=False)
    return folder


def save_bert(folder: Path, shards: Path, **changes: Any) -> Path:
    """A random BERT that knows the words of the shards."""
    words = sorted(tokenizers.Tokenizer.from_file(str(shards / "tokenizer" / "tokenizer.json")).get_vocab())
    kept = [word for word in words if word.isalpha() or len(word) == 1]
    vocabulary = ["<s>", "<pad>", "</s>", "[UNK]", *kept]
    return save_encoder(folder, "Bert", vocabulary, **({"max_position_embeddings": 128} | changes))


def align_flags(shards: Path, encoder: Path | str, **overrides: str) -> list[str]:
    """Flags that shrink stage I to seconds; keyword `a__b` overrides `a.b`."""
    values = ALIGN | {"encoder.name": str(encoder)}
    own = {name.replace(".", "__"): value for name, value in values.items()}
    return small_flags(**({"data__dir": str(shards), "train__device": "cpu"} | own | overrides))


def command(*args: str, ranks: int = 1, hook: str = "") -> list[str]:
    """`rmdm` with the sizes above in a process of its own, after some lines of Python, under torchrun if asked."""
    code = f"{SMALLER}{hook}\nimport sys\nfrom rmdm.cli import main\nsys.exit(main())\n"
    if ranks == 1:
        return [sys.executable, "-c", code, *args]
    # torchrun starts a program of its own on each rank: the same interpreter with the same lines.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "--no-python", sys.executable, "-c", code, *args]


def run(*args: str, ranks: int = 1, hook: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    done = subprocess.run(command(*args, ranks=ranks, hook=hook), capture_output=True, text=True, timeout=280)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def kill_when(condition: Callable[[], bool], *args: str, hook: str = "", signal: int = 9) -> str:
    """Start it, kill it once the condition holds, and return what it said; to end before that is a failure."""
    process = subprocess.Popen(command(*args, hook=hook), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"never got there: {process.communicate()[0]}")
        time.sleep(0.01)
    process.send_signal(signal)
    said = process.communicate()[0]
    assert process.returncode == (-9 if signal == 9 else 128 + signal), said
    return said


def files_under(folder: Path) -> dict[str, bytes]:
    """Names and bytes of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
