"""The whole report: one page that stands alone, Markdown with the same figures, and nothing compared that cannot be."""

import base64
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rmdm.cli import VERBS, Parser, add_json
from rmdm.report.page import write_report
from tests.release import byte_tokenizer, save_release
from tests.unit.report.runs import full_runs, gap_rows, gen_rows, make_run, ppl_rows, save_rows, story_runs

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
        assert not VERBS[verb].takes_config or len(rest) == 1, what
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


def table_of(path: Path, title: str) -> list[str]:
    """Lines of a Markdown table."""
    after = path.read_text(encoding="utf-8").split(f"### {title}\n\n")[1]
    return [line for line in after.split("\n\n")[0].splitlines() if line.startswith("|")]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]
