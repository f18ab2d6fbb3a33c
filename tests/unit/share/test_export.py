"""`rmdm export`: a run to a folder that is there whole or not at all, and writes the same texts."""

import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rmdm
from rmdm.cli import main
from rmdm.errors import CheckpointError, ConfigError
from rmdm.share import export as module
from rmdm.share.export import export
from rmdm.share.manifest import verify
from tests.conftest import small_flags
from tests.release import byte_tokenizer, save_release

SHOWN: list[str] = []


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return save_release(tmp_path_factory.mktemp("own") / "rmdm", "rmdm")


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory) -> Path:
    """A run as training leaves it."""
    out = tmp_path_factory.mktemp("run") / "first"
    flags = small_flags(train__steps="8", data__dir=str(shards), train__device="cpu")
    assert main(["train", "storyworld-mini", *flags, "--out", str(out)]) == 0
    return out


def say(text: str) -> None:
    SHOWN.append(text)


def texts(folder: Path | str, **options) -> list[str]:
    return rmdm.load(folder, "cpu").generate(3, 4, seed=5, **options).texts


@pytest.mark.parametrize("process", ["rmdm", "mdlm", "sedd", "ar"])
def test_a_release_writes_what_the_run_writes(process, tmp_path):
    own = save_release(tmp_path / "own", process)
    export(str(own), tmp_path / "out", say)
    assert texts(tmp_path / "out") == texts(own)
    assert (tmp_path / "out" / "flow").is_dir() == (process == "rmdm")


def test_it_can_still_write_like_a_text(own, tmp_path):
    export(str(own), tmp_path / "out", say)
    assert texts(tmp_path / "out", like="anna was happy .") == texts(own, like="anna was happy .")
    assert any("is a folder of this machine; others can write, but not --like a text" in line for line in SHOWN)


def test_a_run_is_exported_from_its_newest_checkpoint(run, tmp_path):
    made = export(str(run), tmp_path / "a" / "out", say, licence="mit")
    assert made.meta["step"] == 8
    assert made.meta["released"] == "files.json"
    assert texts(tmp_path / "a" / "out") == texts(run)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["out"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    [*_, newest] = sorted((run / "checkpoints").iterdir())
    weights = newest / "model" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"\0")
    try:
        with pytest.raises(CheckpointError, match=f"^{weights} is damaged"):
            export(str(run), tmp_path / "out", say)
    finally:
        weights.write_bytes(before)
    assert not list(tmp_path.iterdir())


def test_bf16_halves_the_file_and_computes_in_float32(own, tmp_path):
    whole, half = tmp_path / "fp32", tmp_path / "bf16"
    export(str(own), whole, say, dtype="fp32")
    made = export(str(own), half, say, dtype="bf16")
    assert made.stored == "bf16"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.7 * sizes[0]  # names and norms weigh much in so small a model
    stored = load_file(half / "model.safetensors")
    assert stored["embed.weight"].dtype == torch.bfloat16
    assert stored["latent.matrix"].dtype == torch.float32
    weights, exact = (rmdm.load(folder, "cpu").backbone.state_dict() for folder in (half, own))
    assert {value.dtype for value in weights.values()} == {value.dtype for value in exact.values()} == {torch.float32}
    for name, value in weights.items():
        if value.ndim < 2 or name == "latent.matrix":
            assert torch.equal(value, exact[name]), name
        else:
            assert torch.equal(value, exact[name].bfloat16().float()), name
    assert len(texts(half)) == 3


def test_tied_embeddings_survive_bf16(tmp_path):
    own = save_release(tmp_path / "own", "mdlm", model__tie_embeddings=True)
    export(str(own), tmp_path / "out", say, dtype="bf16")
    weights = rmdm.load(tmp_path / "out", "cpu").backbone.state_dict()
    assert torch.equal(weights["head.weight"], weights["embed.weight"])


def test_a_release_can_be_exported_again(own, tmp_path):
    export(str(own), tmp_path / "a", say, licence="mit")
    export(str(tmp_path / "a"), tmp_path / "b", say)
    assert verify(tmp_path / "a")["model.safetensors"] == verify(tmp_path / "b")["model.safetensors"]
    assert "license: mit" in (tmp_path / "b" / "README.md").read_text()
    export(str(tmp_path / "b"), tmp_path / "c", say, licence="cc-by-4.0")
    assert "license: cc-by-4.0" in (tmp_path / "c" / "README.md").read_text()
    assert texts(tmp_path / "c") == texts(own)


def test_an_edited_page_is_kept(own, tmp_path):
    export(str(own), tmp_path / "a", say)
    (tmp_path / "a" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    export(str(tmp_path / "a"), tmp_path / "b", say)
    assert (tmp_path / "b" / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"
    assert "README.md" in verify(tmp_path / "b")
    with pytest.raises(ConfigError, match="was edited by hand; state the licence there"):
        export(str(tmp_path / "a"), tmp_path / "c", say, licence="mit")


def test_a_place_that_is_taken_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for out, rule in (("full", "exists and is not empty"), ("full/file", "exists and is no folder")):
        with pytest.raises(ConfigError, match=rule):
            export("nowhere", tmp_path / out, say)
    monkeypatch.chdir(tmp_path / "full")
    with pytest.raises(ConfigError, match="is the folder you are in"):
        export("nowhere", Path(), say)


def test_an_empty_folder_is_filled(own, tmp_path):
    (tmp_path / "out").mkdir()
    export(str(own), tmp_path / "out", say)
    assert texts(tmp_path / "out") == texts(own)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_nothing(own, tmp_path, monkeypatch, error):
    def fail(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(module, "write_manifest", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError) as caught:
        export(str(own), tmp_path / "out", say)
    assert not list(tmp_path.iterdir())
    if isinstance(error, OSError):
        assert "could not be written (No space left on device)" in str(caught.value)


def test_what_cannot_be_loaded_is_not_handed_out(tmp_path):
    own = save_release(tmp_path / "own", "rmdm")
    flow = own / "flow" / "flow.safetensors"
    flow.write_bytes(flow.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"flow\.safetensors is damaged"):
        export(str(own), tmp_path / "out", say)
    assert not (tmp_path / "out").exists()


def test_folders_of_this_machine_are_not_told(tmp_path):
    secret = tmp_path / "home" / "carol" / "secret"
    tokenizer = byte_tokenizer()
    tokenizer.name = str(secret / "tokenizer.json")
    own = save_release(
        tmp_path / "own", "mdlm", tokenizer, data__path=str(secret / "text"), data__dir=str(secret / "shards")
    )
    export(str(own), tmp_path / "out", say)
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert b"carol" not in path.read_bytes(), path
    assert rmdm.load(tmp_path / "out", "cpu").tokenizer.fingerprint == tokenizer.fingerprint


def test_a_release_is_readable_like_any_new_file(own, tmp_path):
    export(str(own), tmp_path / "out", say, dtype="bf16")
    (tmp_path / "new").write_text("")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {stat.S_IMODE((tmp_path / "new").stat().st_mode)}


def test_the_command_line(own, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(own), str(out), "--dtype", "bf16", "--license", "CC-BY-4.0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert told["folder"] == str(out)
    assert told["bytes"] == sum((out / name).stat().st_size for name in told["files"])
    assert main(["export", str(own), str(out)]) == 2
    assert capsys.readouterr().err.strip() == (
        f"rmdm: {out} exists and is not empty; give another folder, or delete it first"
    )
    assert main(["export", str(own), str(tmp_path / "x"), "--licence", " "]) == 2
    assert "--licence names none" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["export", str(own), str(tmp_path / "x"), "--dtype", "int4"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_push_and_pull_of_folders(own, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["push", str(own), "./shared/tiny", "--licence", "mit"]) == 0
    assert main(["pull", "./shared/tiny"]) == 0
    assert texts("tiny") == texts(own)
    capsys.readouterr()
    for words, rule in (
        (["pull", "tiny"], "tiny is here already; give another folder"),
        (["pull", str(own), "x"], "is a run, and no release; use 'rmdm export"),
        (["pull", "tiny", "shared"], "shared exists and is not empty"),
        (["pull", "tiny", "x", "--revision", "main"], "revision='main' is of the hub, and tiny is a path"),
        (["push", "tiny", "./x", "--private"], "--private means nothing for the folder ./x"),
        (
            ["push", "tiny", "x"],
            "'x' is neither owner/name on the hub (letters, digits, - _ .) nor a folder here; use ./x",
        ),
        (["push", "tiny", "shared/tiny"], "shared/tiny exists and is not empty"),
        (["push", "tiny", "bad name/x"], "'bad name/x' is neither owner/name on the hub"),
    ):
        assert main(words) == 2, words
        assert rule in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_pulled_folder_is_verified_and_an_edited_page_told(own, tmp_path, capsys):
    export(str(own), tmp_path / "a", say)
    (tmp_path / "a" / "README.md").write_text("# Mine\n")
    assert main(["pull", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"note: {tmp_path / 'b' / 'README.md'} was edited after the release" in capsys.readouterr().out
    (tmp_path / "a" / "card.json").write_text("{}")
    assert main(["pull", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert f"{tmp_path / 'a' / 'card.json'} has 2 bytes" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
