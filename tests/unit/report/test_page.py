"""The whole report: one page that stands alone, Markdown with the same figures, and nothing compared that cannot be."""

import base64
import dataclasses
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rmdm.cli import Parser, read_overrides
from rmdm.presets import load_config, resolve_config, save_config
from rmdm.report.page import write_report
from rmdm.verbs import VERBS, add_json
from tests.release import byte_tokenizer, save_release
from tests.unit.report.runs import (
    around,
    full_runs,
    gap_rows,
    gen_rows,
    latents_report,
    make_run,
    ppl_rows,
    save_rows,
    story_runs,
)

VOID = {"meta", "img", "br", "wbr"}


class Checked(HTMLParser):
    """Sees that tags are closed in order, and gathers what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.ids: set[str] = set()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        """Note a tag."""
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.refers += [value for name, value in attrs if name in ("href", "src", "xlink:href", "srcset") and value]
        self.ids |= {value for name, value in attrs if name == "id"}

    def handle_endtag(self, tag):
        """Close one."""
        assert self.open.pop() == tag


def parsed(path: Path) -> Checked:
    checked = Checked()
    checked.feed(path.read_text(encoding="utf-8"))
    assert checked.open == []
    return checked


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return write_report(full_runs(folder), folder / "report")


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories")
    return write_report(story_runs(folder), folder / "report")


def test_the_page_stands_alone(full):
    page = parsed(full.html)
    assert page.refers  # the contents
    assert all(ref.startswith("#") and ref[1:] in page.ids for ref in page.refers)
    assert {"script", "link", "iframe", "object"}.isdisjoint(page.tags)
    text = full.html.read_text(encoding="utf-8")
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert 'name="viewport"' in text


def test_every_part_of_the_paper_has_its_place(full):
    page, text = parsed(full.html), full.html.read_text(encoding="utf-8")
    assert "cannot be read" not in text
    wanted = {"arms", "generation", "speed", "perplexity", "gap", "ablation", "judge", "latents", "training"}
    assert wanted <= page.ids
    for table in ("Table 1", "Table 2", "Table 3", "Table 4", "Table 5", "Table 8", "Table 9", "Table 10"):
        assert f"(the paper&#x27;s {table})" in text
    assert page.tags.count("svg") > 12


def test_conditional_and_valid_perplexity_stand_beside_each_other(full):
    (head, _, *lines) = table_of(full.markdown, "Held-out perplexity (the paper's Table 1)")
    assert "conditional, no bound" in head
    assert "with the latent's KL" in head
    rmdm = next(line for line in lines if line.startswith("| wiki-small-rmdm"))
    cells = dict(zip(cells_of(head), cells_of(rmdm), strict=True))
    assert cells["to compare: bound or exact"].startswith("134.3")  # exp(4.9), the best of q_a, and not the conditional
    assert cells["perplexity of each kind: conditional, no bound"].startswith("99.48")


def test_genppl_has_entropy_and_evaluator_beside_it_and_no_winner(full):
    head, _, *lines = table_of(full.markdown, "Generation quality by steps (the paper's Table 2)")
    assert cells_of(head)[2:] == [f"steps: {steps}" for steps in (128, 64, 32, 16, 8, 4)]
    ppl = [line for line in lines if cells_of(line)[1] == "GenPPL"]
    assert len(ppl) == 4  # three arms, one of them with two tau
    assert not any("**" in line for line in ppl)
    assert [cells_of(line)[1] for line in lines][:2] == ["GenPPL", "entropy"]
    assert "Evaluator tiny-gpt2 (135M parameters, bf16); 256 texts a cell" in full.markdown.read_text(encoding="utf-8")
    equal = table_of(full.markdown, "GenPPL at equal entropy")
    assert any(line.startswith("| wiki-small-rmdm") for line in equal)


def test_different_tokenizers_are_compared_by_bytes_only(tmp_path):
    runs = [save_release(tmp_path / "words"), save_release(tmp_path / "bytes", tokenizer=byte_tokenizer())]
    for run, lossy in zip(runs, ("unknown words", None), strict=True):
        save_rows(run, "ppl", ppl_rows("mdlm", lossy=lossy))
    text = write_report(runs, tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert "different tokenizers" in text
    assert "token perplexities cannot be compared and are left out" in text
    assert f"{ppl_rows('mdlm')[0]['ppl']:.1f}" not in text
    assert "nats a token: mean" not in text
    (_, _, line) = table_of(tmp_path / "report" / "report.md", "Bits per byte")
    assert re.search(r"1\.61\d\* ", line)  # the lossy one is marked
    assert "not comparable, unknown words" in text


def test_nats_a_token_of_different_tokenizers_are_shown_apart(tmp_path):
    runs = [save_release(tmp_path / "words"), save_release(tmp_path / "bytes", tokenizer=byte_tokenizer())]
    for run in runs:
        (run / "metrics.jsonl").write_text('{"step": 10, "loss": 3.0}\n{"step": 20, "loss": 2.5}\n')
        save_rows(run, "gap", gap_rows("mdlm"))
    report = write_report(runs, tmp_path / "report")
    text = report.markdown.read_text(encoding="utf-8")
    assert text.count("### The end of training") == 2
    assert text.count("### The gap on held-out text") == 2
    assert report.html.read_text(encoding="utf-8").count("<figcaption>Training loss</figcaption>") == 2


def test_evaluators_are_not_mixed(tmp_path):
    runs = [
        make_run(tmp_path / "mdlm", "mdlm", gen=gen_rows("mdlm")),
        make_run(tmp_path / "rmdm", "rmdm", gen=gen_rows("rmdm", evaluator="gpt2")),
    ]
    text = write_report(runs, tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert text.count("### Generation quality by steps") == 2
    assert "do not compare with another evaluator's" in text
    assert "against wiki-small-mdlm at matched quality" not in text


def test_stories_are_shown_with_truth_and_ceiling(stories):
    text = stories.markdown.read_text(encoding="utf-8")
    head, _, *lines = table_of(stories.markdown, "Grammatical and consistent stories by steps")
    assert cells_of(head)[2:] == [f"steps: {steps}" for steps in (32, 16, 8, 4, 2, 1)]
    drawn = next(line for line in lines if line.startswith("| storyworld-mini | consistent %"))
    assert cells_of(drawn)[2] == "**42.0** (±4.3)"
    ceiling = next(line for line in lines if line.startswith("| storyworld-mini, true latents | consistent %"))
    assert "**" not in ceiling  # no rival of what is drawn
    true = next(line for line in text.splitlines() if line.startswith("| true stories"))
    assert cells_of(true)[2:5] == ["100.0", "100.0 (±0.5)", "100.0"]
    assert "In 8 steps 36.0% ±4.1 of storyworld-mini's stories are consistent, against 6.0%" in text


def test_what_is_missing_is_said_with_a_command_that_works(stories, tmp_path):
    bare = write_report([make_run(tmp_path / "rmdm", "rmdm"), make_run(tmp_path / "ar", "ar")], tmp_path / "report")
    page = bare.html.read_text(encoding="utf-8")
    for what, command in [*stories.missing, *bare.missing]:
        verb, *words = shlex.split(command)[1:]
        parser = Parser(prog=verb, allow_abbrev=False)
        add_json(parser)
        VERBS[verb].flags(parser)
        _, rest = parser.parse_known_args(words)
        if VERBS[verb].takes_config:  # a preset and settings
            resolve_config(rest[0], read_overrides(rest[1:], set()))
        assert VERBS[verb].takes_config or not rest, what
    said = dict(bare.missing)
    assert "rmdm eval gap" in page
    assert str(tmp_path / "ar") not in said["The conditional dependency gap (wiki-small-rmdm)"]  # it has none
    assert "Shares of grammatical and consistent stories" not in said
    assert "GenPPL with entropy against steps" not in dict(stories.missing)


def test_pictures_of_the_latents_are_kept_in_the_page(tmp_path):
    mdlm, rmdm, _ = full_runs(tmp_path)
    (rmdm / "latents" / "umap.png").write_bytes(b"\x89PNG picture")
    page = parsed(write_report([mdlm, rmdm], tmp_path / "report").html)
    outside = [ref for ref in page.refers if not ref.startswith("#")]
    assert outside == ["data:image/png;base64," + base64.b64encode(b"\x89PNG picture").decode()]


def test_figures_of_another_version_leave_the_rest_whole(tmp_path):
    old = [{key: value for key, value in row.items() if key != "evaluator"} for row in gen_rows("mdlm")]
    run = make_run(tmp_path / "run", "mdlm", gen=old, ppl=ppl_rows("mdlm"))
    text = write_report([run], tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert "These figures cannot be read (KeyError: 'evaluator')" in text
    assert "### Held-out perplexity" in text


def test_settings_that_differ_come_first(full):
    text = full.markdown.read_text(encoding="utf-8")
    differ = table_of(full.markdown, "Settings that differ")
    assert any(line.startswith("| process | mdlm | rmdm | rmdm |") for line in differ)
    assert not any(line.startswith("| data.length") for line in differ)
    assert text.index("### Settings that differ") < text.index("### Settings that all arms share")
    assert "| data.length | 128 |" in text


def test_names_of_a_run_cannot_become_markup(tmp_path):
    run = make_run(tmp_path / "a", "mdlm", gen=gen_rows("mdlm", evaluator="<img src=x onerror=alert(1)>"))
    page = parsed(write_report([run], tmp_path / "<b>" / "report").html)
    assert "img" not in page.tags


def test_the_paper_s_prior_has_its_own_bound(full):
    head, _, *lines = table_of(full.markdown, "Held-out perplexity (the paper's Table 1)")
    rmdm = next(line for line in lines if line.startswith("| wiki-small-rmdm"))
    cells = dict(zip(cells_of(head), cells_of(rmdm), strict=True))
    assert cells["perplexity of each kind: drawn, paper's prior"].startswith("156.0")  # exp(5.05)
    assert cells["perplexity of each kind: latent drawn"].startswith("148.4")


@pytest.mark.parametrize("chosen", [False, True])
def test_the_bound_that_other_rows_chose_is_compared_else_the_least_and_named(chosen, tmp_path):
    rows = ppl_rows("rmdm")
    for row in rows:  # the drawn latent's bound below the best of q_a; the paper's prior and no latent lower still
        row["nats"] = {("prior", 1.0): 4.85, ("prior", "paper"): 4.5, ("null", None): 4.4}.get(
            (row["figure"], row["tau"]), row["nats"]
        )
        row["rows"] = 768 if row["figure"] == "family" else 1
    if not chosen:
        rows = [row for row in rows if row["figure"] != "family"]
    report = write_report([make_run(tmp_path / "rmdm", "rmdm", ppl=rows)], tmp_path / "report")
    text = report.markdown.read_text(encoding="utf-8")
    named = "best of q_a, 768 rows" if chosen else "latent drawn, 1 row"
    assert f"wiki-small-rmdm: {named}." in text
    head, _, line = table_of(report.markdown, "Held-out perplexity (the paper's Table 1)")
    cells = dict(zip(cells_of(head), cells_of(line), strict=True))
    figure = "best of q_a" if chosen else "latent drawn"
    assert cells["to compare: bound or exact"] == cells[f"perplexity of each kind: {figure}"]
    assert "shows what the latent costs" in text


def test_a_star_is_that_of_the_row_it_stands_on(tmp_path):
    runs = [save_release(tmp_path / "words"), save_release(tmp_path / "bytes", tokenizer=byte_tokenizer())]
    save_rows(runs[0], "ppl", ppl_rows("mdlm"))
    save_rows(runs[0], "ppl-lambada", ppl_rows("mdlm", "lambada", lossy="unknown words", scale=0.9))
    for name in ("valid", "lambada"):
        save_rows(runs[1], f"ppl-{name}", ppl_rows("mdlm", name, scale=1.2))
    path = write_report(runs, tmp_path / "report").markdown
    _, _, own, other = table_of(path, "Bits per byte")
    assert cells_of(own)[1].startswith("**1.612**")  # no star where nothing was lost, and it may win
    assert re.match(r"1\.45\d\*", cells_of(other)[1])
    assert "**" not in other
    every = table_of(path, "All figures of likelihood")
    assert sorted(("lambada" in line, "*" in line) for line in every[2:4]) == [(False, False), (True, True)]


def test_figures_of_a_single_text_win_nothing(tmp_path):
    alone = [row | {"error": None, "ppl_low": None, "ppl_high": None, "rows": 1} for row in ppl_rows("mdlm", scale=0.5)]
    runs = [make_run(tmp_path / "mdlm", "mdlm", ppl=alone), make_run(tmp_path / "ar", "ar", ppl=ppl_rows("ar"))]
    path = write_report(runs, tmp_path / "report").markdown
    assert not any("**" in line for line in table_of(path, "Held-out perplexity (the paper's Table 1)"))


@pytest.mark.parametrize(
    "other",
    [{"entropy_at": 4.3}, {"length": 90}],
)
def test_no_winner_is_named_across_entropies(tmp_path, other):
    runs = [
        make_run(tmp_path / "mdlm", "mdlm", gen=gen_rows("mdlm")),
        make_run(tmp_path / "rmdm", "rmdm", gen=gen_rows("rmdm", **other)),
    ]
    report = write_report(runs, tmp_path / "report")
    text = report.markdown.read_text(encoding="utf-8")
    tables = [part.split("\n\n")[1] for part in text.split("### ") if part.startswith("GenPPL at equal entropy, ")]
    assert len(tables) == 2
    assert not any("**" in table for table in tables)
    assert "figures of two tables do not compare" in text
    page = report.html.read_text(encoding="utf-8")
    apart = 2 if "length" in other else 1
    assert page.count("<figcaption>Unigram entropy against steps") == apart
    assert page.count("<figcaption>Frontier at 4 steps") == apart


def test_the_headline_compares_at_equal_entropy(full, tmp_path):
    first = full.markdown.read_text(encoding="utf-8").split("\n\n")[1]
    assert "at an entropy of 4.14 nats, wiki-small-rmdm has GenPPL 228" in first
    assert "lower beyond the intervals" in first
    runs = [make_run(tmp_path / kind, kind, gen=gen_rows(kind)) for kind in ("mdlm", "rmdm")]
    near = [row | around("gen_ppl", 150.0) if row["row"] == "matched" else row for row in gen_rows("rmdm")]
    far = [row | around("gen_ppl", 155.0) if row["row"] == "matched" else row for row in gen_rows("mdlm")]
    for run, rows in zip(runs, (far, near), strict=True):
        save_rows(run, "gen", rows)
    text = write_report(runs, tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert "no difference beyond the intervals" in text.split("\n\n")[1]


def test_of_coherence_the_most_is_best(tmp_path):
    runs = []
    for kind, value in (("mdlm", 0.1), ("rmdm", 0.3)):
        rows = [row | around("coherence", value) if row["row"] == "matched" else row for row in gen_rows(kind)]
        runs.append(make_run(tmp_path / kind, kind, gen=rows))
    lines = table_of(write_report(runs, tmp_path / "report").markdown, "GenPPL at equal entropy")
    bold = {cells_of(line)[0]: "**" in line for line in lines if "coherence" in line}
    assert bold == {"wiki-small-mdlm": False, "wiki-small-rmdm": True}


def test_figures_of_training_say_that_they_are_no_bounds(full):
    _, _, *lines = table_of(full.markdown, "The end of training")
    assert [line.count("(no bound)") for line in lines] == [0, 2, 0]
    page = full.html.read_text(encoding="utf-8")
    said = "wiki-small-rmdm: given each row&#x27;s own latent, which is no bound."
    assert page.count(said) == 3  # two plots and the table


def test_the_command_of_the_control_has_the_run_s_own_data(tmp_path):
    run = make_run(tmp_path / "rmdm", "rmdm")
    config = load_config(run)
    data = dataclasses.replace(config.data, path="/texts/some file.txt", dir="/shards")
    train = dataclasses.replace(config.train, steps=77)
    save_config(dataclasses.replace(config, data=data, train=train), run)
    said = dict(write_report([run], tmp_path / "report").missing)
    verb, preset, *words = shlex.split(said["The control with an independent z"])[1:]
    assert (verb, preset) == ("run", "wiki-small-indep")
    made = resolve_config(preset, read_overrides(words[:-2], set()))
    assert (made.data, made.train.steps) == (data, 77)
    assert made.latent.independent
    assert made.encoder.name is None
    assert ",openwebtext" in said["Zero-shot perplexity and bits per byte"]


def test_latent_figures_are_found_where_the_flow_came_from(tmp_path):
    stage, run = tmp_path / "align", make_run(tmp_path / "rmdm", "rmdm")
    config = load_config(run)
    save_config(dataclasses.replace(config, latent=dataclasses.replace(config.latent, flow=str(stage))), run)
    before = write_report([run], tmp_path / "report")
    asked = [command for what, command in before.missing if what.startswith("Latent figures")]
    assert asked == [f"rmdm latents {stage}"]
    (stage / "latents").mkdir(parents=True)
    (stage / "latents" / "report.json").write_text(json.dumps(latents_report()))
    after = write_report([run], tmp_path / "report")
    assert "### wiki-small-rmdm: latents" in after.markdown.read_text(encoding="utf-8")
    assert not any(what.startswith("Latent figures") for what, _ in after.missing)


def test_settings_are_shown_of_the_parts_an_arm_has(full):
    differ = table_of(full.markdown, "Settings that differ")
    assert not any(line.startswith(("| meanflow.", "| encoder.", "| latent.")) for line in differ)
    only = table_of(full.markdown, "Settings that only some arms have")
    assert any(line.startswith("| encoder.name | – | all-MiniLM-L6-v2 | – |") for line in only)
    assert any(line.startswith("| latent.groups | – | 16 | 16 |") for line in only)


def test_an_arm_has_one_name(tmp_path):
    runs = [make_run(tmp_path / kind, kind, gen=gen_rows(kind, taus=(1.0,))) for kind in ("mdlm", "rmdm")]
    text = write_report(runs, tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert "wiki-small-rmdm, τ" not in text


def test_the_code_that_measured_is_named(tmp_path):
    run = make_run(tmp_path / "mdlm", "mdlm", gen=gen_rows("mdlm"))
    path = run / "eval" / "gen.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rmdm": "0.1.0", "revision": "abc123 with changes"}))
    text = write_report([run], tmp_path / "report").markdown.read_text(encoding="utf-8")
    assert "- measured with: rmdm 0.1.0, git abc123 with changes" in text


def table_of(path: Path, title: str) -> list[str]:
    """Lines of a Markdown table."""
    after = path.read_text(encoding="utf-8").split(f"### {title}\n\n")[1]
    return [line for line in after.split("\n\n")[0].splitlines() if line.startswith("|")]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]
