"""`rmdm export`: a run to a folder that is there whole or not at all, and writes the same texts."""

import copy
import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rmdm
from rmdm.cli import main
from rmdm.errors import CheckpointError, ConfigError
from rmdm.int8 import SCALE
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.flow import Flow, fingerprint
from rmdm.meanflow.radial import Radial
from rmdm.share import export as module
from rmdm.share.export import export
from rmdm.share.manifest import verify, write_manifest
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


def log_probabilities(folder: Path) -> torch.Tensor:
    """What a model makes of a row that is partly masked, given a latent of ones."""
    model = rmdm.load(folder, "cpu")
    backbone = model.backbone
    x_BL = torch.arange(backbone.length).remainder(model.tokenizer.size)[None]
    x_BL[:, ::2] = backbone.mask_id
    with torch.no_grad():
        c_BGC = backbone.latent(torch.ones(1, backbone.latent.groups, backbone.latent.project))
        return backbone.logits(backbone(x_BL, c_BGC=c_BGC)).log_softmax(-1)


def test_int8_matrices_take_a_quarter_and_all_else_is_exact(tmp_path):
    own = save_release(tmp_path / "own", "rmdm", model__width=128, latent__width=32)
    made = export(str(own), tmp_path / "out", say, dtype="int8")
    assert made.stored == "int8"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (own, tmp_path / "out")]
    assert sizes[1] < 0.3 * sizes[0]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    narrow = {name for name, value in stored.items() if value.dtype == torch.int8}
    assert {name for name in stored if name.endswith(SCALE)} == {name + SCALE for name in narrow}
    weights, exact = (rmdm.load(folder, "cpu").backbone.state_dict() for folder in (tmp_path / "out", own))
    # Modulations and places are no layer's matrices, and everything hangs on the latent's.
    assert narrow == {name for name in exact if name.endswith(".weight") and not name.startswith("latent.")}
    assert set(weights) == set(exact)
    for name, value in weights.items():
        assert value.dtype == torch.float32
        if name in narrow:
            assert 0 < (value - exact[name]).abs().max() <= 0.51 * exact[name].abs().max() / 127, name
        else:
            assert torch.equal(value, exact[name]), name


def test_an_int8_release_computes_nearly_the_same_and_writes(tmp_path):
    own = save_release(tmp_path / "own", "rmdm", latent__draw="flow")
    export(str(own), tmp_path / "out", say, dtype="int8")
    exact, near = log_probabilities(own), log_probabilities(tmp_path / "out")
    assert not torch.equal(near, exact)
    torch.testing.assert_close(near, exact, rtol=0, atol=0.2)
    assert exact.std() > 1, "probabilities that are all alike are near each other anyway"
    assert all(texts(tmp_path / "out"))


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("int8", torch.int8)])
def test_the_networks_of_the_flow_are_stored_likewise(dtype, kind, tmp_path):
    own = save_release(tmp_path / "own", "rmdm")
    flow = Flow.load(own / "flow")
    numbers = flow.settings.groups * flow.settings.dim
    thirds = torch.arange(1, numbers + 1).double() / 3  # which no other precision holds
    flow.maps = {"enter": Affine(torch.diag(thirds), thirds.clone()), "draw-4": Affine(thirds.clone(), thirds.clone())}
    flow.radial = Radial(thirds.clone(), thirds + 1)
    flow.guide, flow.student = copy.deepcopy(flow.net), copy.deepcopy(flow.net)
    flow.save(own / "flow")
    export(str(own), tmp_path / "out", say, dtype=dtype)
    exact, stored = (load_file(folder / "flow" / "flow.safetensors") for folder in (own, tmp_path / "out"))
    for name, value in exact.items():
        if name.endswith(".half"):
            assert stored[name].dtype == torch.bfloat16
        elif name.startswith(("maps.", "radial.")):
            assert stored[name].dtype == torch.float64
            assert torch.equal(stored[name], value), name
        elif name.endswith(".weight"):
            assert stored[name].dtype == kind, name
    loaded = Flow.load(tmp_path / "out" / "flow")
    assert loaded.settings == flow.settings
    assert "maps.enter.half" in exact
    torch.testing.assert_close(loaded.maps["enter"].matrix, flow.maps["enter"].matrix, rtol=2**-8, atol=0)
    drawn, near = flow.draw(8, seed=0), loaded.draw(8, seed=0)
    assert not torch.equal(near, drawn)
    torch.testing.assert_close(near, drawn, rtol=0, atol=0.1 * float(drawn.std()))


def test_a_changed_flow_gets_no_new_fingerprint(tmp_path):
    own = save_release(tmp_path / "own", "rmdm")
    path = own / "flow" / "flow.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"flow\.safetensors is damaged \(its checksum"):
        export(str(own), tmp_path / "out", say, dtype="int8")
    assert not (tmp_path / "out").exists()


def test_int8_can_be_exported_again(own, tmp_path):
    export(str(own), tmp_path / "a", say, dtype="int8")
    for name, dtype in (("same", None), ("int8", "int8"), ("fp32", "fp32"), ("bf16", "bf16")):
        assert export(str(tmp_path / "a"), tmp_path / name, say, dtype=dtype).stored == (dtype or "int8")
    for name in ("same", "int8"):
        for file in ("model.safetensors", "flow/flow.safetensors", "flow/flow.json"):
            assert verify(tmp_path / name)[file] == verify(tmp_path / "a")[file]
    assert texts(tmp_path / "fp32") == texts(tmp_path / "a")
    weights = {name: rmdm.load(tmp_path / name, "cpu").backbone.state_dict() for name in ("a", "fp32", "bf16")}
    for name, value in weights["a"].items():
        assert torch.equal(weights["fp32"][name], value), name
        rounded = value.bfloat16().float() if value.ndim > 1 and name != "latent.matrix" else value
        assert torch.equal(weights["bf16"][name], rounded), name


def test_tied_embeddings_survive_int8(tmp_path):
    own = save_release(tmp_path / "own", "mdlm", model__tie_embeddings=True)
    export(str(own), tmp_path / "out", say, dtype="int8")
    weights = rmdm.load(tmp_path / "out", "cpu").backbone.state_dict()
    assert torch.equal(weights["head.weight"], weights["embed.weight"])


@pytest.mark.parametrize(
    ("file", "matrix"), [("model.safetensors", "embed.weight"), ("flow/flow.safetensors", "net.enter.weight")]
)
def test_damaged_int8_is_refused_in_a_line(own, tmp_path, file, matrix):
    export(str(own), tmp_path / "out", say, dtype="int8")
    whole = load_file(tmp_path / "out" / file)
    for changes, rule in (
        ({matrix + SCALE: None}, f"{matrix} is int8, and its scales {matrix}.scale are missing"),
        ({matrix: None}, f"{matrix}.scale is there without its int8 matrix"),
        ({matrix + SCALE: torch.ones(1)}, rf"{matrix}.scale is float32 of shape \[1\]"),
        ({matrix + SCALE: whole[matrix + SCALE] * torch.nan}, f"{matrix}.scale holds NaN"),
    ):
        kept = {name: value for name, value in (whole | changes).items() if value is not None}
        save_file(kept, tmp_path / "out" / file)
        flow = tmp_path / "out" / "flow"
        meta = json.loads((flow / "flow.json").read_text()) | {"fingerprint": fingerprint(flow)}
        (flow / "flow.json").write_text(json.dumps(meta))
        write_manifest(tmp_path / "out")  # as whoever makes it up would do
        with pytest.raises(CheckpointError, match=rf"{file} is damaged.*{rule}") as caught:
            module.check_loads(tmp_path / "out")
        assert "\n" not in str(caught.value)
        with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
            export(str(tmp_path / "out"), tmp_path / "again", say, dtype="fp32")


def test_weights_that_int8_cannot_hold_are_refused(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    path = own / "model.safetensors"
    save_file({name: value / 0 if name == "embed.weight" else value for name, value in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"cannot be stored as int8: embed\.weight holds NaN or infinity"):
        export(str(own), tmp_path / "out", say, dtype="int8")
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(ConfigError, match=r"--text-note Of mine: .* was edited by hand; state it there"):
        export(str(tmp_path / "a"), tmp_path / "c", say, text_note="Of mine")


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
    assert "--licence is empty" in capsys.readouterr().err
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
