"""Every mistake a person can make with files: one clear line on standard error, exit code 2, nothing lost."""

import json
import lzma
import shutil
from pathlib import Path

import pytest

from rmdm.cli import main
from rmdm.config import TokenizerConfig
from rmdm.training.checkpoint import list_checkpoints
from tests.conftest import small_flags
from tests.release import save_release

TEXT = "".join(
    json.dumps({"text": f"a short line of text number {i} that fills some tokens"}) + "\n" for i in range(400)
)
WORD = TokenizerConfig(kind="word")
WIKI = [
    "--data.tokenizer.vocab_size", "300", "--data.holdout", "10", "--data.length", "16", "--model.layers", "1",
    "--model.width", "16", "--model.heads", "2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fails(capfd, *args: str) -> str:
    """Run, expect exit code 2 and exactly one line on standard error; return it."""
    assert main(list(args)) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("rmdm: ")
    return error[0]


def prepare(path: Path | str, *more: str) -> list[str]:
    return ["prepare", "wiki-small-mdlm", "--data.path", str(path), *WIKI, *more]


def test_missing_file(capfd):
    assert "nowhere.jsonl" in fails(capfd, *prepare("nowhere.jsonl"))


def test_no_source_at_all(capfd):
    assert "data.path" in fails(capfd, "prepare", "wiki-small-mdlm")


def test_empty_corpus(capfd, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "no documents" in fails(capfd, *prepare("empty.jsonl"))


def test_corpus_shorter_than_one_row(capfd, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "tiny"}\n{"text": "text"}\n')
    line = fails(capfd, *prepare("short.jsonl", "--data.holdout", "0", "--data.length", "128"))
    assert "128" in line


def test_too_little_validation_text(capfd, tmp_path):
    """Where validation has a source of its own, data.holdout has no say and is no remedy."""
    (tmp_path / "text.jsonl").write_text(TEXT)
    (tmp_path / "short.jsonl").write_text('{"text": "tiny"}\n')
    line = fails(capfd, *prepare("text.jsonl", "--data.valid_path", "short.jsonl", "--data.length", "64"))
    assert "the validation text (short.jsonl) has " in line
    assert line.endswith("lower data.length or name more of it")


@pytest.mark.parametrize("verb", [["train", "storyworld-mini"], ["prepare", "storyworld-mini"], ["report", "run"]])
def test_a_file_where_a_folder_is_to_be_made(capfd, tmp_path, verb):
    (tmp_path / "my.yaml").touch()
    line = fails(capfd, *verb, "--out", "my.yaml")
    assert line == "rmdm: --out my.yaml is a file; name a folder, which may be new"


def test_a_folder_where_a_card_is_to_be_written(capfd, tmp_path):
    line = fails(capfd, "card", "--out", str(tmp_path))
    assert line == f"rmdm: --out {tmp_path} is a folder; name a file, such as {tmp_path / 'README.md'}"


def test_text_that_can_be_read_only_once(capfd):
    line = fails(capfd, *prepare("/dev/null"))
    assert line == "rmdm: /dev/null is no regular file (a pipe or a device); write its text to a file and give that"


def test_truncated_xz(capfd, tmp_path):
    whole = lzma.compress(TEXT.encode())
    (tmp_path / "cut.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    assert "cut.jsonl.xz" in fails(capfd, *prepare("cut.jsonl.xz"))


def test_bad_field_in_yaml(capfd, tmp_path):
    (tmp_path / "mine.yaml").write_text("name: mine\noptim: {learning_rate: 1}\n")
    assert "unknown field 'optim.learning_rate'" in fails(capfd, "train", "mine.yaml")


def test_training_before_preparing(capfd, tmp_path):
    (tmp_path / "text.jsonl").write_text(TEXT)
    assert "rmdm prepare" in fails(capfd, "train", "wiki-small-mdlm", "--data.path", "text.jsonl", *WIKI)


def test_shards_of_another_tokenizer(capfd, tmp_path):
    (tmp_path / "text.jsonl").write_text(TEXT)
    assert main(prepare("text.jsonl", "--data.dir", "shards")) == 0
    capfd.readouterr()
    line = fails(capfd, *prepare("text.jsonl", "--data.dir", "shards", "--data.tokenizer.vocab_size", "280"))
    assert "shards" in line
    assert "tokenizer" in line


def test_other_data_for_a_trained_run(capfd, tmp_path, shards):
    """Given a trained run, when other data is asked for, then nobody is told to delete what it was trained on."""
    flags = ["storyworld-mini-mdlm", *small_flags(data__dir=str(shards)), "--train.steps", "1", "--out", "run"]
    assert main(["train", *flags]) == 0
    capfd.readouterr()
    for verb in ("train", "prepare", "run"):
        line = fails(capfd, verb, "run", "--data.tokenizer.kind", "bpe", "--data.tokenizer.vocab_size", "600")
        assert "this run asks for tokenizer bpe vocab_size=600" in line
        assert line.endswith("; run was trained on these, so leave that as it is, or give a preset and another --out")
    assert "delete that folder" in fails(capfd, "train", *flags, "--data.length", "16")


def test_training_without_a_flow_names_the_file_that_was_given(capfd, tmp_path, shards):
    (tmp_path / "mine.yaml").write_text("base: storyworld-mini\nname: mine\n")
    data = [*small_flags(data__dir=str(shards), process="rmdm"), "--encoder.name", "all-MiniLM-L6-v2"]
    line = fails(capfd, "train", "mine.yaml", *data)
    assert "runs/mine holds no finished flow; train one with 'rmdm align mine.yaml --out runs/mine'" in line
    line = fails(capfd, "train", "mine.yaml", *data, "--latent.flow", "other")
    assert "other holds no finished flow; train one with 'rmdm align PRESET --out other'" in line


@pytest.mark.parametrize("verb", ["prepare", "align", "train", "run"])
def test_a_run_directory_that_cannot_be_made(capfd, tmp_path, verb):
    (tmp_path / "file").touch()
    line = fails(capfd, verb, "storyworld-mini", "--out", "file/run")
    assert line == "rmdm: --out file/run cannot be made (Not a directory in file); name a folder that can"


def test_the_home_of_nobody(capfd):
    line = fails(capfd, "prepare", "storyworld-mini", "--data.dir", "~nobody-here/shards")
    assert line.startswith("rmdm: a path begins with ~ and the name of nobody here; spell it out")


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_run_directory_that_is_a_link_to_itself(capfd, tmp_path, verb):
    (tmp_path / "loop").symlink_to("loop")
    line = fails(capfd, verb, "storyworld-mini", "--out", "loop")
    assert line == "rmdm: loop is a link that leads back to itself; name another folder"


def test_stories_of_another_corpus_are_refused_before_anything_else(capfd, tmp_path, shards):
    # Shards whose source is gone are used as they are.
    run = ["--data.storyworld", "null", "--data.path", "gone.jsonl", "--train.steps", "1", "--out", "run"]
    assert main(["train", "storyworld-mini-mdlm", *small_flags(data__dir=str(shards)), *run]) == 0
    capfd.readouterr()
    assert main(["eval", "stories", "run"]) == 2
    said = capfd.readouterr()
    assert "was not trained on storyworld, so its stories cannot be checked" in said.err
    assert said.out == ""
    other = save_release(Path("other"), "mdlm", data__storyworld="mini", data__dir=str(shards), data__tokenizer=WORD)
    for last in ("run", "nowhere"):
        assert main(["eval", "stories", str(other), last, "--n", "4", "--steps", "2"]) == 2
        assert capfd.readouterr().out == "", "the first of two is not measured before"


def test_a_manifest_that_names_another_tokenizer_than_the_one_beside_it(capfd, tmp_path):
    (tmp_path / "text.jsonl").write_text(TEXT)
    command = prepare("text.jsonl", "--data.dir", "shards")
    assert main(command) == 0
    capfd.readouterr()
    path = tmp_path / "shards" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(manifest))
    assert "tokenizer" in fails(capfd, "train", *command[1:], "--out", "run")


def test_vocabulary_too_big_for_the_stored_type(capfd, tmp_path):
    (tmp_path / "text.jsonl").write_text(TEXT)
    command = prepare("text.jsonl", "--data.dir", "shards")
    assert main(command) == 0
    capfd.readouterr()
    path = tmp_path / "shards" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokenizer"]["size"] = 70_000
    path.write_text(json.dumps(manifest))
    line = fails(capfd, "train", *command[1:], "--out", "run")
    assert "uint16" in line


def test_damaged_shard_and_manifest(capfd, tmp_path, shards):
    folder = tmp_path / "copy"
    shutil.copytree(shards, folder)
    tokens = next(folder.glob("*.tokens"))
    tokens.write_bytes(tokens.read_bytes()[:-100])
    command = ["train", "storyworld-mini", *small_flags(data__dir=str(folder)), "--out", "run"]
    assert tokens.name in fails(capfd, *command)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json" in fails(capfd, *command)


def test_corrupted_checkpoint(capfd, tmp_path, shards):
    command = ["train", "storyworld-mini", *small_flags(data__dir=str(shards), train__steps="4"), "--out", "run"]
    assert main(command) == 0
    capfd.readouterr()
    folder = list_checkpoints(tmp_path / "run")[-1]
    victim = next((folder / "state").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[100] ^= 0xFF
    victim.write_bytes(content)
    line = fails(capfd, *command, "--train.steps", "8")
    assert victim.name in line
    assert "delete" in line


def test_a_micro_batch_that_does_not_divide_is_named(capfd, shards):
    line = fails(
        capfd,
        "train",
        "storyworld-mini",
        *small_flags(data__dir=str(shards), train__micro_batch="5"),
        "--out",
        "run",
    )
    assert "train.micro_batch=5" in line
