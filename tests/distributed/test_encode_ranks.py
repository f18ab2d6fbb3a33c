"""One rank against two under torchrun (gloo, on the CPU): the same PCA and the same cache, to the byte."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def encode(shards: Path, folder: Path, ranks: int) -> None:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*launcher, "tests.unit.encoders.toy", str(shards), str(folder), "64", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_ranks_write_the_cache_of_one(shards: Path, tmp_path: Path) -> None:
    encode(shards, tmp_path / "one", 1)
    encode(shards, tmp_path / "two", 2)
    one = files_of(tmp_path / "one")
    assert set(one) == {"manifest.json", "whitening.safetensors", "train.e", "valid.e"}
    assert files_of(tmp_path / "two") == one
