"""One rank against two under torchrun (gloo, on the CPU): the same PCA and the same cache, to the byte."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def encode(shards: Path, folder: Path, ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*launcher, "tests.unit.encoders.toy", str(shards), str(folder), "64", "0", *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_ranks_write_the_cache_of_one_even_after_one_of_them_failed(shards: Path, tmp_path: Path) -> None:
    done = encode(shards, tmp_path / "one", 1)
    assert done.returncode == 0, done.stderr
    one = files_of(tmp_path / "one")
    assert set(one) == {"manifest.json", "whitening.safetensors", "train.e", "valid.e"}
    # Training row 451 is not among those the PCA is fitted on: the ranks have met by then, and one waits for the other.
    failed = encode(shards, tmp_path / "two", 2, "451")
    assert failed.returncode != 0
    assert "embeddings of train rows 451 hold NaN" in failed.stderr
    assert (tmp_path / "two" / "whitening.safetensors").read_bytes() == one["whitening.safetensors"]
    assert not (tmp_path / "two" / "manifest.json").exists()
    done = encode(shards, tmp_path / "two", 2)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "two") == one
