"""A folder in which every documented command runs in seconds: small corpora, small runs, and smaller settings.

What a page asks for is there under the name the page gives it (`runs/first`, `texts/*.jsonl.xz`, ...). `Shrink` makes a
documented `rmdm` command small: the same verb, presets and flags, with sizes put behind them that win.
"""

import dataclasses
import json
import lzma
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rmdm.cli import main
from rmdm.verbs import VERBS
from tests.conftest import SMALL
from tests.documented import ROOT
from tests.evaluators import documents, prepare_documents, save_evaluator, save_run
from tests.stage_one import ALIGN, prepare_stories, save_bert

SETS = ("wikitext", "lm1b", "lambada", "agnews", "pubmed", "arxiv", "openwebtext")
OWN = (
    "process",
    "encoder.name",
    "latent.draw",
    "meanflow.direction",
    "meanflow.recipe",
    "latent.project",
    "optim.name",
)
"""Settings of the small configs that would make another model of a preset."""
SIZES = {
    **{name: value for name, value in (SMALL | ALIGN).items() if name not in OWN},
    "train.device": "cpu", "train.steps": "4", "train.save_every": "0", "meanflow.train.steps": "8",
    "meanflow.distil_steps": "4", "meanflow.guide_steps": "4", "latent.project": "2", "latent.width": "8",
    "data.workers": "1",
}  # fmt: skip
TEXT = {"data.holdout": "80", "data.length": "32", "data.tokenizer.vocab_size": "400"}
"""Beside these, for presets of other text than storyworld's."""
FROM_THE_HUB = {
    "data.path": "texts", "data.valid_split": "null", "data.tokenizer.kind": "bpe", "data.tokenizer.name": "null",
    "data.tokenizer.separator": "null", "data.tokenizer.add_special": "false", "encoder.channels": "null",
}  # fmt: skip
"""And for those whose corpus and tokenizer come from the hub."""
LATER = "6"
"""Where a run of the workspace, which has 4 steps, goes on to."""


@dataclass(frozen=True)
class Workspace:
    """The folder, and what commands need that pages do not name."""

    folder: Path
    encoder: Path
    evaluator: Path
    shipped: Path
    """What stands for the model that comes with the package."""

    def copy(self, folder: Path) -> "Workspace":
        """The same elsewhere, for one page to change as it likes."""
        shutil.copytree(self.folder, folder)
        return dataclasses.replace(self, folder=folder)


def make(folder: Path) -> Workspace:
    """Build it: texts, and a run of each kind that pages speak of."""
    home = folder / "home"
    texts = documents(160)
    write_texts(home, texts)
    stories = prepare_stories(folder / "stories")
    encoder = save_bert(folder / "bert", stories, max_position_embeddings=512)  # unknown words are several tokens to it
    place = Workspace(home, encoder, folder / "evaluator", folder / "package" / "shipped")
    shards = prepare_documents(home / "data", 160, 80)  # a release knows data/shards only, from where commands run
    for name, process, changes in (
        ("mdlm", "mdlm", {}),
        ("ar", "ar", {}),
        ("indep", "rmdm", {}),
        ("rmdm", "rmdm", {"latent__independent": False, "encoder__name": str(place.encoder)}),
    ):
        save_run(home / "runs" / name, process, shards, **changes)
    assert main(["export", str(home / "runs" / "rmdm"), str(place.shipped), "--dtype", "int8"]) == 0
    save_evaluator(place.evaluator, sorted({word for text in texts for word in text.split()}))
    sizes = [*flags(SIZES), "--data.dir", str(stories), "--encoder.name", str(place.encoder)]
    runs = home / "runs"
    assert main(["encode", "storyworld-mini", *sizes]) == 0
    for verb in ("align", "train"):
        assert main([verb, "storyworld-mini", *sizes, "--out", str(runs / "first")]) == 0
    assert main(["train", "storyworld-mini-mdlm", *sizes, "--out", str(runs / "demo/storyworld-mini-mdlm")]) == 0
    shutil.copytree(runs / "first", runs / "demo/storyworld-mini")
    return place


def write_texts(home: Path, texts: Sequence[str]) -> None:
    """The corpora and text files that pages name."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for name in ("texts/some.jsonl.xz", "mine/some.jsonl.xz", "corpus.jsonl.xz"):
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lzma.compress(lines.encode()))
    for name in ("mine.jsonl", "real.jsonl"):
        (home / name).write_text("".join(lines.splitlines(keepends=True)[:8]), encoding="utf-8")
    for number, text in enumerate(texts[:20]):
        (home / f"texts/{number:02}.txt").write_text(text, encoding="utf-8")
    held_out = Path("tests/data/encyclopedia.jsonl")
    (home / held_out.parent).mkdir(parents=True)
    shutil.copy(ROOT / held_out, home / held_out)
    (home / "texts/eval").mkdir()
    for name in SETS:
        (home / f"texts/eval/{name}.txt").write_text("\n".join(texts[:6]), encoding="utf-8")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def flags(values: dict[str, str]) -> list[str]:
    """Settings as flags."""
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def shrunk(words: Sequence[str], place: Workspace, judge: str) -> list[str]:
    """A documented command, without `rmdm`, made small enough for a test; a verb without a rule stays as it is."""
    verb, rest = words[0], list(words[1:])
    if VERBS[verb].takes_config:
        return [verb, *rest, *sizes_for(verb, rest, place)]
    if verb in ("eval", "bench"):
        kind, rest = rest[0], rest[1:]
        return [verb, kind, *(smaller_eval if verb == "eval" else smaller_bench)(kind, rest, place, judge)]
    if verb == "latents":
        return [verb, *rest, "--rows", "80", "--no-pictures"]
    if verb == "sample":
        given = {"--infill", "--prefix", "--suffix"} & set(rest) and "--given" not in rest
        return [verb, *rest, "--steps", "4", *(["--rounds", "1", "--draws", "2"] if given else [])]
    return [verb, *rest]


def sizes_for(verb: str, rest: Sequence[str], place: Workspace) -> list[str]:
    """Flags that shrink a preset; a run of the workspace is small already and only goes a little further."""
    from rmdm.presets import load_config

    own = place.folder / rest[0]
    if own.is_dir():
        return ["--train.steps", LATER] if "--train.steps" in rest else []
    data = load_config(own if own.is_file() else rest[0]).data
    values = SIZES | {"encoder.name": str(place.encoder)}
    values |= {name: "8" for name in ("train.micro_batch", "meanflow.train.micro_batch") if f"--{name}" in rest}
    if data.storyworld is None:
        values |= TEXT
    if data.dataset is not None:
        values |= FROM_THE_HUB
    if verb == "encode":
        values = {name: value for name, value in values.items() if not name.startswith("train.")}
    return flags(values)


def smaller_eval(kind: str, rest: list[str], place: Workspace, judge: str) -> list[str]:
    """The flags of `rmdm eval KIND`, made small; judges with an address are asked at `judge`."""
    if kind == "ppl":
        return [*rest, "--rows", "6", "--draws", "1", "--device", "cpu"]
    if kind == "gap":
        return [*rest, "--rows", "4", "--orders", "1", "--blocks", "2,4", "--device", "cpu"]
    if kind == "stories":
        return [*rest, "--steps", "2,4", "--n", "16"]
    if kind == "gen":
        steps = [] if "--samples" in rest else ["--steps", "2,4"]
        return [*rest, *steps, "--n", "8", "--evaluator", str(place.evaluator), "--device", "cpu"]
    if kind == "judge":
        asked = [re.sub(r"@http\S+", f"@{judge}", word) for word in rest]
        steps = [] if "--texts" in rest else ["--steps", "2,4"]
        return [*asked, *steps, "--n", "4", "--device", "cpu"]
    return rest


def smaller_bench(kind: str, rest: list[str], place: Workspace, judge: str) -> list[str]:
    """The flags of `rmdm bench KIND`, made small."""
    if kind == "data":
        return [*rest, "--rounds", "1", "--vocab-size", "300"]
    rest = ["runs/mdlm" if word == "RUN..." else word for word in rest]
    few = {"train": ["--steps", "1"], "meanflow": ["--steps", "1"], "encode": ["--batches", "1", "--length", "24"]}
    if kind == "sample":
        few["sample"] = ["--steps", "2", "--repeats", "1"]
    sized = ["--size", "tiny", "--matmul", "32"] if "--size" in rest else []
    warm = ["--warmup", "1"] if kind in ("train", "meanflow", "encode") else []
    return [*rest, *few[kind], *sized, *warm, "--device", "cpu"]
