"""`rmdm eval gen` as people run it: tables that say how they came about, one clear line for what cannot be done."""

import json

import pytest

from rmdm.cli import main
from tests.evaluators import documents, prepare_documents, save_evaluator, save_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("gen")


@pytest.fixture(scope="module")
def evaluator(place):
    return str(save_evaluator(place / "evaluator", sorted({w for text in documents(160) for w in text.split()})))


@pytest.fixture(scope="module")
def runs(place):
    shards = prepare_documents(place / "data", 320, 160)
    return {kind: str(save_run(place / kind, kind, shards)) for kind in ("mdlm", "rmdm")}


def test_the_tables_name_all_that_a_genppl_must_not_stand_without(runs, evaluator, capsys):
    flags = ["--steps", "2,4", "--n", "64", "--temperatures", "0.5,1", "--device", "cpu", "--evaluator", evaluator]
    assert main(["eval", "gen", *runs.values(), *flags]) == 0
    said = capsys.readouterr().out
    table = said[said.index("arm ") :]
    assert table.count("held-out text") == 1 + 1  # a row that both runs share, and a note
    for word in ("GenPPL", "entropy", "distinct", "repeated", "copied", "self-BLEU", "MAUVE", "64 texts a row",
                 "bootstrap 95%", f"{evaluator} (folder)", "float64 draws", "first token not scored"):  # fmt: skip
        assert word in " ".join(said.split()), word
    lines = [line.split() for line in table.splitlines()]
    assert [line[1:3] for line in lines if line[:1] == ["tiny-rmdm"]] == [
        ["2", "0.5"], ["2", "1"], ["4", "0.5"], ["4", "1"], ["2", lines_entropy(table)], ["4", lines_entropy(table)],
    ]  # fmt: skip
    assert main(["eval", "gen", *runs.values(), *flags, "--json"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert captured.err.count("already done") == 2
    assert len(printed["gen"]) == 2 * (1 + 4 + 2)
    assert printed["gen"][0]["mauve"] > 0.8


def lines_entropy(table: str) -> str:
    """The entropy that rows were matched at."""
    return table[table.index("GenPPL at equal entropy") :].splitlines()[3].split()[2]


def test_given_texts_are_scored_without_a_run(place, evaluator, capsys):
    file = place / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in documents(8)))
    assert main(["eval", "gen", "--samples", str(file), "--evaluator", evaluator, "--device", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (row,) = printed["gen"]
    assert (row["n"], row["arm"]) == (8, str(file))
    assert row["gen_ppl_low"] < row["gen_ppl"] < row["gen_ppl_high"]
    assert row["self_bleu"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["RUN", "--evaluator", "/no/such/model"], "evaluator '/no/such/model' does not exist"),
        (["RUN", "--steps", "128", "--sampler", "margin"], "--steps 128 is above tiny-mdlm's length of 96 tokens"),
        (["RUN", "--steps", "4,x"], "--steps 4,x is no list of numbers"),
        (["RUN", "--n", "0"], "--n 0 is below 1"),
        (["RUN", "--temperatures", "1,0"], "--temperatures 1,0 holds a number that is not positive"),
        (["RUN", "--taus", "warm"], "--taus warm is no list of numbers"),
        (["RUN", "--sampler", "ancestrl"], "--sampler 'ancestrl' is unknown; did you mean 'ancestral'?"),
        (["RUN", "--samples", "x.jsonl"], "give either run directories or --samples FILE"),
        (["RUN", "--reference", "x.jsonl"], "--reference is for --samples"),
        (["RUN", "RUN"], "is named twice"),
        (["RUN", "--taus", "0.9,1"], "--taus scales the noise of latents, and no model here has any"),
        (["RUN", "--entropy", "-1", "--temperatures", "0.8,1"], "--entropy -1.0 is not a positive number"),
        (["RUN", "--entropy", "4"], "--entropy is met between two temperatures"),
        (["--samples", "EMPTY", "--steps", "4"], "--steps says how a run writes"),
        (["--samples", "NAMELESS"], "has no column 'text'; call the field with the text 'text'"),
        (["--samples", "TEXTS", "--reference", "EMPTY"], "--reference "),
        ([], "give either run directories or --samples FILE"),
        (["--samples", "EMPTY"], "holds no texts"),
        (["--samples", "no-such-file.jsonl"], "no-such-file.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_clear_line(runs, place, evaluator, capsys, flags, message):
    empty = place / "empty.jsonl"
    empty.write_text("\n")
    (place / "nameless.jsonl").write_text('{"words": "a b c"}\n')
    (place / "texts.jsonl").write_text('{"text": "a b c"}\n')
    files = {"EMPTY": str(empty), "NAMELESS": str(place / "nameless.jsonl"), "TEXTS": str(place / "texts.jsonl")}
    words = [{"RUN": runs["mdlm"], **files}.get(word, word) for word in flags]
    given = [] if "--evaluator" in words else ["--evaluator", evaluator]
    assert main(["eval", "gen", *words, *given, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
