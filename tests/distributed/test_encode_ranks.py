"""One rank against two (gloo, on the CPU): the same PCA and the same cache, to the byte."""

from pathlib import Path

from tests import warm
from tests.unit.encoders.toy import MAIN

ROOT = Path(__file__).parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_ranks_write_the_cache_of_one_even_after_one_of_them_failed(shards: Path, tmp_path: Path) -> None:
    def places(name: str) -> list[str]:
        return [str(shards), str(tmp_path / name), "64", "0"]

    done = warm.run(MAIN, *places("one"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    one = files_of(tmp_path / "one")
    assert set(one) == {"manifest.json", "whitening.safetensors", "train.e", "valid.e"}
    # Training row 451 is not among those the PCA is fitted on: the ranks have met by then, and one waits for the other.
    failed = warm.fresh("-m", "tests.unit.encoders.toy", *places("two"), "451", ranks=2, cwd=ROOT)
    assert failed.returncode != 0
    assert "embeddings of train rows 451 hold NaN" in failed.stderr
    assert (tmp_path / "two" / "whitening.safetensors").read_bytes() == one["whitening.safetensors"]
    assert not (tmp_path / "two" / "manifest.json").exists()
    done = warm.run(MAIN, *places("two"), ranks=2, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "two") == one
