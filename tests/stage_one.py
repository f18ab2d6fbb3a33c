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
from tests import warm
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
    "latent.draw": "prior",
    "meanflow.direction": "align",
    "meanflow.draw_steps": "4",
    "meanflow.train.compile": "false",
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


def run(
    *args: str, ranks: int = 1, hook: str = "", fresh: bool = False, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`rmdm` with the sizes above in a process of its own, after some lines of Python.

    With `fresh` that is a new interpreter, under torchrun if there are more ranks.
    """
    code = f"{SMALLER}{hook}\n{warm.CLI}"
    if fresh:
        # torchrun takes no lines of Python, but any program.
        program = ["--no-python", sys.executable] if ranks > 1 else []
        done = warm.fresh(*program, "-c", code, *args, ranks=ranks)
    else:
        done = warm.run(code, *args, ranks=ranks)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def kill_when(condition: Callable[[], bool], *args: str, hook: str = "", signal: int = 9) -> str:
    """Start it, kill it once the condition holds, and return what it said; to end before that is a failure."""
    process = warm.Process(f"{SMALLER}{hook}\n{warm.CLI}", *args)
    deadline = time.monotonic() + 120
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.send_signal(9)
            pytest.fail(f"never got there: {process.communicate()}")
        time.sleep(0.01)
    process.send_signal(signal)
    said = "".join(process.communicate())
    assert process.returncode == (-9 if signal == 9 else 128 + signal), said
    return said


def files_under(folder: Path) -> dict[str, bytes]:
    """Names and bytes of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
