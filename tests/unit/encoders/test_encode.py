"""The cache holds the whitened embeddings of every row: whatever the ranks, the kills and the way it is stored."""

import dataclasses
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from rmdm.config import Config, DataConfig, TokenizerConfig
from rmdm.data import progress
from rmdm.data.prepare import prepare
from rmdm.data.shards import Manifest, TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders import cache, parts
from rmdm.encoders.cache import ArrayManifest, LatentRows, find_cache, fit_indices
from rmdm.encoders.encode import Encoded, cache_facts, config_facts, encode, made_in
from rmdm.encoders.find import open_encoder
from rmdm.encoders.online import OnlineLatents
from rmdm.encoders.whitening import Whitening
from rmdm.errors import ConfigError, DataError
from tests import warm
from tests.unit.encoders.toy import MAIN, Toy, toy_config

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 rows, so that the 500 rows of the corpus make eight, the last of them short."""
    monkeypatch.setattr(cache, "PART_ROWS", 64)
    monkeypatch.setattr(parts, "PART_ROWS", 64)


def make(config: Config, shards: Path, folder: Path, encoder: Toy | None = None, **options: Any) -> Encoded:
    return encode(config, shards, encoder or Toy(), folder=folder, **{"progress": False, **options})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def pooled(shards: Path, split: Any, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw pooled embeddings of all rows, each row encoded alone, and which groups have text."""
    tokens, toy = TokenRows.open(shards, split), Toy()
    rows = np.arange(len(tokens))
    pieces = toy.pieces(tokens.take(rows), tokens.lengths(rows), groups)
    e = np.stack([toy.embed([piece], groups)[0].numpy() for piece in pieces])
    present = np.stack([np.isin(np.arange(groups), piece.group_N) for piece in pieces])
    return e, present


@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("fit_rows", [130, 65_536])
def test_every_row_holds_its_whitened_embedding(shards: Path, tmp_path: Path, groups: int, fit_rows: int) -> None:
    config = toy_config(groups=groups, fit_rows=fit_rows, dim=6)
    done = make(config, shards, tmp_path)
    e, present = pooled(shards, "train", groups)
    assert present.all() == (groups < 32), "padded rows must leave groups empty for the test to mean something"
    fit = fit_indices(len(e), fit_rows)
    vectors = e[fit][present[fit]].astype(np.float64)
    values, directions = np.linalg.eigh(np.cov(vectors.T))
    for split in ("train", "valid"):
        e, present = pooled(shards, split, groups)
        rows = LatentRows.open(tmp_path, split)
        assert len(rows) == len(e)
        z = rows.take(np.arange(len(e)))[present]
        expected = (e[present] - vectors.mean(0)) @ directions[:, ::-1][:, :6] / np.sqrt(values[::-1][:6])
        signs = np.sign((z * expected).sum(0))
        np.testing.assert_allclose(z, expected * signs, atol=4e-3)
    assert done.manifest.figures["variance kept"] == pytest.approx(values[::-1][:6].sum() / values.sum())
    assert done.manifest.figures["clipped share"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "manifest.json",
        "whitening.safetensors",
        "train.e",
        "valid.e",
    }


def test_groups_without_text_hold_noise_of_their_own(shards: Path, tmp_path: Path) -> None:
    make(toy_config(groups=32, dim=4), shards, tmp_path)
    noise = {}
    for split in ("train", "valid"):
        _, present = pooled(shards, split, 32)
        noise[split] = LatentRows.open(tmp_path, split).take(np.arange(len(present)))[~present]
    draws = noise["train"].ravel()
    assert len(draws) > 2000
    assert len(np.unique(noise["train"], axis=0)) == len(noise["train"])
    assert abs(draws.mean()) < 4 / np.sqrt(len(draws))
    assert abs(draws.var() - 1) < 4 * np.sqrt(2 / len(draws))
    assert abs((draws**4).mean() - 3) < 4 * np.sqrt(96 / len(draws))
    count = min(map(len, noise.values()))
    assert abs(np.corrcoef(noise["train"][:count].ravel(), noise["valid"][:count].ravel())[0, 1]) < 0.2


def test_packed_rows_and_no_held_out_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = "\n".join(" ".join(random.choice([f"w{i}" for i in range(50)], 20)) for _ in range(60))
    (tmp_path / "text.txt").write_text(text)
    data = DataConfig(
        path=str(tmp_path / "text.txt"), tokenizer=TokenizerConfig(kind="word"), length=16, holdout=0,
        dir=str(tmp_path / "shards"),
    )  # fmt: skip
    prepare(data, progress=False)
    done = make(dataclasses.replace(toy_config(groups=2), data=data), tmp_path / "shards", tmp_path / "cache")
    assert done.manifest.spec.rows["valid"] == 0
    assert not (tmp_path / "cache" / "valid.e").exists()
    z = LatentRows.open(tmp_path / "cache", "train").take(np.arange(done.manifest.spec.rows["train"]))
    assert np.allclose(np.cov(z.reshape(-1, 8).T), np.eye(8), atol=0.01)
    assert make(toy_config(groups=2), tmp_path / "shards", tmp_path / "cache").skipped


def test_only_the_fit_rows_are_stored_when_z0_is_to_be_kept(shards: Path, tmp_path: Path) -> None:
    config = toy_config(fit_rows=90)
    make(config, shards, tmp_path / "all")
    few = make(
        dataclasses.replace(config, latent=dataclasses.replace(config.latent, store="z0")), shards, tmp_path / "few"
    )
    whole, part = (LatentRows.open(tmp_path / name, "train") for name in ("all", "few"))
    assert (len(whole), len(part), few.manifest.split_rows["train"]) == (500, 90, 500)
    assert part.numbers.tolist() == fit_indices(500, 90).tolist()
    assert np.array_equal(whole.take(part.numbers), part.take(np.arange(90)))
    assert (tmp_path / "all" / "valid.e").read_bytes() == (tmp_path / "few" / "valid.e").read_bytes()


def test_int8_is_near_fp16_and_half_its_size(shards: Path, tmp_path: Path) -> None:
    make(toy_config(), shards, tmp_path / "fp16")
    done = make(toy_config(dtype="int8"), shards, tmp_path / "int8")
    fine, coarse = (LatentRows.open(tmp_path / name, "train").take(np.arange(500)) for name in ("fp16", "int8"))
    scale = np.array(done.manifest.spec.scale)
    beyond = np.abs(fine) > 127.5 * scale
    assert beyond.mean() < 0.01
    assert (np.abs(fine - coarse) <= 0.51 * scale + 2e-3)[~beyond].all()
    clipped = sum((np.abs(LatentRows.open(tmp_path / "fp16", s).take(np.arange(n))) > 127.5 * scale).sum()
                  for s, n in (("train", 500), ("valid", 100)))  # fmt: skip
    assert done.manifest.figures["clipped share"] == pytest.approx(clipped / (600 * 4 * 8), rel=0.3)
    assert clipped > 0
    assert 2 * (tmp_path / "int8" / "train.e").stat().st_size == (tmp_path / "fp16" / "train.e").stat().st_size


def test_fit_rows_too_large_to_keep_are_encoded_twice(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Toy()
    make(toy_config(), shards, tmp_path / "kept", kept)
    assert kept.rows == 600
    monkeypatch.setattr(parts, "KEEP_BYTES", 0)
    twice = Toy()
    make(toy_config(), shards, tmp_path / "twice", twice)
    assert twice.rows == 900
    assert files_of(tmp_path / "kept") == files_of(tmp_path / "twice")


def run_ranks(world: int, shards: Path, folder: Path, **options: Any) -> list[Encoded]:
    """All ranks at once, each a thread; the first error of any is raised."""
    barrier = threading.Barrier(world, timeout=60)
    out: list[Encoded | BaseException | None] = [None] * world

    def work(rank: int) -> None:
        try:
            ranks = {"rank": rank, "world": world, "barrier": barrier.wait}
            out[rank] = make(toy_config(), shards, folder, **ranks, **options)
        except BaseException as error:
            out[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in out:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return [result for result in out if isinstance(result, Encoded)]


@pytest.mark.parametrize("world", [2, 3, 11])
def test_the_number_of_ranks_changes_nothing(shards: Path, tmp_path: Path, world: int) -> None:
    make(toy_config(), shards, tmp_path / "one")
    many = run_ranks(world, shards, tmp_path / "many")
    assert [done.skipped for done in many] == [False] * world
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")
    assert [done.skipped for done in run_ranks(world, shards, tmp_path / "many")] == [True] * world


def test_done_is_done_without_the_encoder_running(shards: Path, tmp_path: Path) -> None:
    first, before, toy = make(toy_config(), shards, tmp_path), files_of(tmp_path), Toy()
    second = make(toy_config(), shards, tmp_path, toy)
    assert (first.skipped, second.skipped, toy.rows) == (False, True, 0)
    assert second.manifest == first.manifest
    assert files_of(tmp_path) == before


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.unit.encoders import toy
from rmdm.encoders.encode import encode

toy.set_part_rows(64)
shards, folder, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
events, replace = 0, os.replace

def event():
    global events
    events += 1
    if events == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def replace_or_die(*names):
    event()
    replace(*names)
    event()

os.replace = replace_or_die
encode(toy.toy_config(), shards, toy.Toy(), folder=folder, progress=False)
"""


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    """Each run dies at a later moment, before or after a rename: of fit rows, marks, the whitening, the manifest."""
    make(toy_config(), shards, tmp_path / "whole")
    folder, kills = tmp_path / "killed", 0

    def run() -> int:
        return warm.run(PROGRAM, str(shards), str(folder), str(3 + 4 * kills), cwd=ROOT).returncode

    while (code := run()) == -signal.SIGKILL:
        kills += 1
    assert code == 0
    assert kills >= 3
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_killed_from_outside_it_goes_on_where_it_was(shards: Path, tmp_path: Path) -> None:
    make(toy_config(), shards, tmp_path / "whole")
    folder = tmp_path / "killed"
    process = warm.Process(MAIN, str(shards), str(folder), "64", "0.05", cwd=ROOT)
    warm.until(process, lambda: (folder / "train.e.parts" / "000002.json").exists())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "manifest.json").exists()
    toy = Toy()
    make(toy_config(), shards, folder, toy)
    assert 0 < toy.rows < 300, "the fit rows and the finished parts are not encoded again"
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_nan_names_its_rows_and_loses_nothing(shards: Path, tmp_path: Path) -> None:
    make(toy_config(), shards, tmp_path / "whole")
    toy = Toy()
    toy.broken = TokenRows.open(shards, "train").take(np.array([450]))[0]
    with pytest.raises(
        DataError, match=r"embeddings of train rows 450 hold NaN or infinity \(toy\); check the encoder"
    ):
        make(toy_config(), shards, tmp_path / "cache", toy)
    again = Toy()
    make(toy_config(), shards, tmp_path / "cache", again)
    assert again.rows <= 600 - 128
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_rows_taken_online_are_those_of_the_cache(shards: Path, tmp_path: Path) -> None:
    config = toy_config(groups=8)
    make(config, shards, tmp_path)
    whitening = Whitening.load(tmp_path / "whitening.safetensors")
    for split in ("train", "valid"):
        stored, online = LatentRows.open(tmp_path, split), OnlineLatents.open(config, shards, split, Toy(), whitening)
        assert (len(online), online.groups, online.dim) == (len(stored), stored.groups, stored.dim)
        order = np.random.default_rng(0).integers(0, len(stored), 77)
        np.testing.assert_allclose(online.take(order), stored.take(order), rtol=2e-3, atol=2e-3)


def small_bert(folder: Path, words: list[str]) -> str:
    """A BERT of random weights that cuts words otherwise than the corpus's tokenizer does."""
    from transformers import BertConfig, BertModel

    letters = sorted(set("".join(words)))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *words[::2]]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(dict.fromkeys(vocabulary))}))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertModel(settings).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_pretrained_encoder_fills_the_cache(shards: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(shards / "tokenizer")
    text = tokenizer.decode(TokenRows.open(shards, "train").take(np.arange(500)).ravel())
    base = toy_config(groups=8, dim=8)
    name = small_bert(tmp_path / "bert", sorted({word for word in text.lower().split() if word.isalpha()}))
    config = dataclasses.replace(base, encoder=dataclasses.replace(base.encoder, name=name, channels=12))
    encoder = open_encoder(config.encoder, tokenizer, 32, torch.device("cpu"))
    done = encode(config, shards, encoder, folder=tmp_path / "cache", progress=False)
    assert done.manifest.facts["channels"] == 12
    rows, whitening = LatentRows.open(done.dir, "train"), Whitening.load(done.dir / "whitening.safetensors")
    z = rows.take(np.arange(500))
    assert np.allclose(z.reshape(-1, 8).var(0), 1, atol=0.15)
    online = OnlineLatents.open(config, shards, "train", encoder, whitening)
    order = np.random.default_rng(0).integers(0, 500, 40)
    np.testing.assert_allclose(online.take(order), z[order], rtol=4e-3, atol=4e-3)
    again = open_encoder(config.encoder, tokenizer, 32, torch.device("cpu"))
    assert encode(config, shards, again, folder=done.dir, progress=False).skipped


def test_what_is_there_decides_the_precision_where_the_settings_do_not(shards: Path, tmp_path: Path) -> None:
    home = tmp_path / "shards"
    shutil.copytree(shards, home)
    config, half = toy_config(), Toy()
    half.precision = "bf16"
    assert made_in(config, home) is None, "nothing is there"
    encode(config, home, half, progress=False)
    assert made_in(config, home) == torch.bfloat16
    asked = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, precision="fp32"))
    assert made_in(asked, home) is None, "the settings say it"
    encode(config, home, Toy(), progress=False)
    assert made_in(config, home) is None, "both are there"


def test_settings_have_folders_of_their_own(shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    home = tmp_path / "shards"
    kinds = [(toy_config(), Toy()), (toy_config(groups=2), Toy()), (toy_config(), Toy(seed=1, name="other"))]
    folders = [encode(config, home, toy, progress=False).dir for config, toy in kinds]
    assert len(set(folders)) == 3
    assert all(re.fullmatch(r"latents-[0-9a-f]{12}", folder.name) and folder.parent == home for folder in folders)
    assert [encode(config, home, toy, progress=False).skipped for config, toy in kinds] == [True] * 3
    manifest = Manifest.load(home)
    assert find_cache(home, config_facts(toy_config(), manifest)) == folders[0]
    assert find_cache(home, cache_facts(toy_config(), manifest, Toy(seed=1, name="other"))) == folders[2]
    moved = Toy(name="elsewhere/toy")
    assert encode(toy_config(), home, moved, progress=False).dir == folders[0], "the name is no part of the content"
    named = dataclasses.replace(toy_config(), encoder=dataclasses.replace(toy_config().encoder, name=moved.name))
    assert find_cache(home, config_facts(named, manifest)) == folders[0]
    with pytest.raises(DataError, match=r"closest, .* has dim 8 where this run asks for 9"):
        find_cache(home, {**config_facts(named, manifest), "dim": 9})


@pytest.mark.parametrize(
    ("change", "toy", "message"),
    [
        ({"groups": 2}, Toy(), r"was made with groups 4, this run asks for groups 2; use the folder made with"),
        (
            {},
            Toy(seed=1, name="other"),
            r"was made with encoder toy \(toy-0-12\d*\), this run asks for encoder other \(toy-1",
        ),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_named_folder_made_otherwise_is_never_used(
    shards: Path, tmp_path: Path, change: dict[str, Any], toy: Toy, message: str, finished: bool
) -> None:
    stop = Toy()
    if not finished:
        stop.broken = TokenRows.open(shards, "valid").take(np.array([0]))[0]
    try:
        make(toy_config(), shards, tmp_path, stop)
    except DataError:
        assert not finished
    before = files_of(tmp_path)
    with pytest.raises(DataError, match=message):
        make(toy_config(**change), shards, tmp_path, toy)
    assert files_of(tmp_path) == before


def test_other_tokens_are_told(shards: Path, tmp_path: Path) -> None:
    make(toy_config(), shards, tmp_path / "cache")
    data = dataclasses.replace(toy_config().data, stories=600, holdout=120, dir=str(tmp_path / "other"))
    prepare(data, progress=False)
    with pytest.raises(DataError, match=r"was made with train rows 500, this run asks for train rows 480"):
        make(toy_config(), tmp_path / "other", tmp_path / "cache")


@pytest.mark.parametrize(
    ("latent", "error", "message"),
    [
        ({"groups": 5}, ConfigError, r"latent.groups=5 does not divide data.length=32; use a divisor such as 4 or 8"),
        (
            {"dim": 13},
            ConfigError,
            r"latent.dim=13 is outside 1..12, the channels of the embeddings of toy; use latent.dim",
        ),
        ({"fit_rows": 2}, DataError, r"latent.dim=8, but the embeddings of toy are only 8 vectors"),
        ({"fit_rows": 0}, ConfigError, r"latent.fit_rows=0 is below 1"),
    ],
)
def test_settings_that_cannot_work_are_told_before_anything_is_written(
    shards: Path, tmp_path: Path, latent: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(toy_config(**latent), shards, tmp_path)
    assert files_of(tmp_path) == {}


def test_constant_channels_are_told(shards: Path, tmp_path: Path) -> None:
    toy = Toy()
    toy.table_VD[:, 3:] = 0.25
    with pytest.raises(
        DataError,
        match=r"latent.dim=8, but the embeddings of toy vary in only 3 directions \(9 of 12 channels are constant\)",
    ):
        make(toy_config(), shards, tmp_path, toy)


def test_a_disk_that_is_too_small_is_told_first(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    toy = Toy()
    with pytest.raises(DataError, match=r"needs 9\d\.\d KiB more, the disk has 1000 B free; make room"):
        make(toy_config(), shards, tmp_path, toy)
    assert toy.rows == 0


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_who_comes_second_waits_and_uses_what_the_first_made(
    shards: Path, tmp_path: Path, world: int, is_killed: bool
) -> None:
    make(toy_config(), shards, tmp_path / "whole")
    folder = tmp_path / "cache"
    first = warm.Process(MAIN, str(shards), str(folder), "64", "0.02", cwd=ROOT)
    warm.until(first, lambda: (folder / "plan.json").exists())
    said: list[str] = []

    def log(text: str) -> None:
        said.append(text)
        if is_killed and "waiting" in text:
            first.send_signal(signal.SIGKILL)

    done = run_ranks(world, shards, folder, progress=True, log=log)
    first.communicate()
    assert first.returncode == (-signal.SIGKILL if is_killed else 0)
    assert [one.skipped for one in done] == [not is_killed] * world
    assert said[0].startswith(f"{folder} is being made by another process (pid {first.pid} on ")
    assert sum("waiting for it" in line for line in said) == 1
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_it_says_what_it_takes_and_what_it_made(shards: Path, tmp_path: Path) -> None:
    said: list[str] = []
    encode(toy_config(), shards, Toy(), folder=tmp_path, log=said.append)
    assert re.fullmatch(
        rf"encode: 600 rows of 4 x 8 as fp16: 37.5 KiB in {tmp_path} \(and 56.2 KiB for as long as it works\)", said[0]
    )
    assert re.fullmatch(
        rf"encode: {tmp_path}: 500 train, 100 valid rows of 4 x 8 as fp16 \(37.5 KiB\), \d\d\.\d% of the variance "
        r"kept; 600 rows encoded at [\d,]+ rows/s",
        said[1],
    )
    encode(toy_config(), shards, Toy(), folder=tmp_path, log=said.append)
    assert len(said) == 3
    assert said[2].endswith("; made before")


def test_without_a_terminal_it_says_now_and_then_how_far_it_is(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    said: list[str] = []
    encode(toy_config(), shards, Toy(), folder=tmp_path, log=said.append)
    assert re.fullmatch(r"encoding: \d%, \d+ rows, [\d,]+ rows/s, \d+ s left", said[1])
    assert re.fullmatch(r"encoding: 100%, 600 rows, [\d,]+ rows/s, 0 s left", said[-2])


def test_a_cache_that_lost_a_file_is_told(shards: Path, tmp_path: Path) -> None:
    make(toy_config(), shards, tmp_path)
    os.truncate(tmp_path / "valid.e", 10)
    with pytest.raises(DataError, match=r"valid\.e has 10 bytes, its manifest says 6400"):
        make(toy_config(), shards, tmp_path)
    assert ArrayManifest.load(tmp_path).spec.rows == {"train": 500, "valid": 100}
