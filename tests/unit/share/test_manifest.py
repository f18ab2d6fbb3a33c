"""A release is verified before it is read: what is missing, cut, changed or added is refused by its name."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmdm
from rmdm.errors import CheckpointError
from rmdm.share.export import export
from rmdm.share.manifest import EDITABLE, MANIFEST, PARTS, file_facts, to_text, verify
from tests import warm
from tests.release import save_release

FILES = [name for name in (*PARTS, MANIFEST) if name not in EDITABLE]


def quiet(text: str) -> None:
    """Where messages go."""


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """A whole release of an RMDM: it has every file there is."""
    root = tmp_path_factory.mktemp("release")
    export(str(save_release(root / "own", "rmdm")), root / "out", quiet)
    return root / "out"


@pytest.fixture
def folder(release, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(release, tmp_path / "copy"))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        rmdm.load(folder, "cpu")
    return str(caught.value)


def test_the_manifest_names_every_file_with_its_size_and_hash(release):
    files = verify(release)
    there = {str(path.relative_to(release)) for path in release.rglob("*") if path.is_file()}
    assert there == set(PARTS) | {MANIFEST}
    assert files == {name: file_facts(release / name) for name in PARTS}
    assert rmdm.load(release, "cpu").step == 7


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    assert refusal(folder).startswith(str(folder / name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 0.5, -1])
def test_a_cut_file_is_found(folder, name, kept):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(kept * len(data)) if kept >= 0 else -1])
    message = refusal(folder)
    assert message.startswith(str(folder / name))
    assert "'rmdm pull' or 'rmdm export'" in message


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(folder, name):
    (folder / name).unlink()
    assert refusal(folder).startswith(f"{folder / name} is missing")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_any_change_of_any_byte_is_found(release, name, data):
    before = (release / name).read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    flip = data.draw(st.integers(1, 255))
    try:
        (release / name).write_bytes(before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            verify(release)
        assert str(caught.value).startswith(str(release / name))
    finally:
        (release / name).write_bytes(before)


def test_the_page_may_be_edited_and_even_deleted(folder):
    (folder / "README.md").write_text("# Mine\n")
    assert rmdm.load(folder, "cpu").step == 7
    (folder / "README.md").unlink()
    assert rmdm.load(folder, "cpu").step == 7


def test_a_file_that_was_slipped_in_is_found(tmp_path):
    export(str(save_release(tmp_path / "own", "mdlm")), tmp_path / "out", quiet)
    (tmp_path / "out" / "flow").mkdir()
    (tmp_path / "out" / "flow" / "flow.json").write_text("{}")
    assert refusal(tmp_path / "out").startswith(
        f"{tmp_path / 'out' / 'flow' / 'flow.json'} was added after the release"
    )


@pytest.mark.parametrize("name", ["../own/model.json", "/etc/passwd", "flow/../../x", "C:\\x", "..\\x", "..", "/"])
def test_a_manifest_that_names_something_outside_is_refused(folder, name):
    files = verify(folder)
    (folder / MANIFEST).write_text(to_text({**files, name: {"size": 1, "sha256": "0" * 64}}))
    message = refusal(folder)
    assert message.startswith(f"{folder / MANIFEST} names {name!r}, which lies outside of the folder")


@pytest.mark.parametrize("name", ["model.bin", "code.py", "flow/code.py", ""])
def test_a_manifest_that_names_something_else_is_refused(folder, name):
    files = verify(folder)
    (folder / MANIFEST).write_text(to_text({**files, name: {"size": 1, "sha256": "0" * 64}}))
    assert "which is no part of a model" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', "[" * 100_000, "\xff", '{"format": 1, "files": [1]}']
)
def test_a_manifest_of_another_form_is_refused(folder, text):
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    assert refusal(folder).startswith(f"{folder / MANIFEST} is damaged")


def test_a_manifest_of_a_later_format_asks_for_a_newer_version(folder):
    saved = json.loads((folder / MANIFEST).read_text()) | {"format": 2}
    (folder / MANIFEST).write_text(json.dumps(saved))
    assert refusal(folder).endswith("has format 2, this version of rmdm reads 1; update rmdm")


@pytest.mark.parametrize("facts", [{"size": "1", "sha256": ""}, {"size": 1}, 7, None])
def test_a_manifest_with_odd_facts_is_refused(folder, facts):
    (folder / MANIFEST).write_text(to_text(verify(folder) | {"model.json": facts}))
    assert refusal(folder).startswith(str(folder / MANIFEST))


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "model.json").rename(tmp_path / "elsewhere.json")
    (folder / "model.json").symlink_to(tmp_path / "elsewhere.json")
    assert refusal(folder).startswith(f"{folder / 'model.json'} is a link out of the folder")


def test_a_folder_that_is_a_link_out_is_refused(folder, tmp_path):
    (folder / "tokenizer").rename(tmp_path / "elsewhere")
    (folder / "tokenizer").symlink_to(tmp_path / "elsewhere")
    assert "is a link out of the folder" in refusal(folder)


def test_a_release_may_itself_be_reached_by_a_link(release, tmp_path):
    (tmp_path / "link").symlink_to(release)
    assert rmdm.load(tmp_path / "link", "cpu").step == 7


def test_a_checkpoint_has_no_manifest_and_loads(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    assert verify(own) == {}
    assert rmdm.load(own, "cpu").step == 7


class Bomb:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


def test_nothing_else_in_the_folder_is_opened(folder, tmp_path):
    """Pipes would hang whoever opens them, in Python or below it; what Python opens is told by its audit hook."""
    trace = tmp_path / "trace"
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    for name in ("pytorch_model.bin", "model.pkl", "tokenizer/tokenizer.pickle", "flow/flow.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    for name in ("modeling.py", "rmdm.py", "tokenizer/tokenization.py", "flow/__init__.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Model"}}))
    for name in ("model.pt", "tokenizer_config.json", "model.py", "training_args.bin"):
        os.mkfifo(folder / name)
    done = warm.run(LOAD, str(folder))
    assert done.returncode == 0, done.stderr
    opened = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"model.json", "files.json", "model.safetensors"} <= opened
    assert opened <= set(PARTS) - {"README.md"} | {MANIFEST}
    assert not trace.exists()


def test_no_hugging_face_library_is_ever_allowed_to_run_code():
    source = Path(rmdm.__file__).parent
    calls = 0
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"trust_remote_code\W+True|torch\.load\(", text), path
        calls += (loads := text.count(".from_pretrained("))
        assert text.count("trust_remote_code") >= min(1, loads), path
    assert calls >= 4


LOAD = """
import json, os, sys
folder = os.path.realpath(sys.argv[1])
opened = set()
def hear(event, args):
    if event in ("open", "import", "exec", "os.listdir", "os.scandir") and args and isinstance(args[0], str | bytes):
        path = os.path.realpath(os.fsdecode(args[0]))
        if path.startswith(folder + os.sep):
            opened.add(os.path.relpath(path, folder))
sys.addaudithook(hear)
import rmdm
model = rmdm.load(folder, "cpu")
model.generate(2, 2)
model.generate(1, 2, like="anna was happy .")
print(json.dumps(sorted(opened)))
"""
