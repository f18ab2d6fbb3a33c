import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rmdm.data.shards import TokenRows
from rmdm.errors import ConfigError
from rmdm.evaluation import generation
from rmdm.evaluation.evaluator import Evaluator, Scored, find_evaluator
from rmdm.evaluation.frontier import Point, matched, reach
from rmdm.evaluation.generation import Plan, Scorer, measure_generation, measure_texts, text_figures
from rmdm.evaluation.generation_table import render_generation
from rmdm.hub import load_model
from tests.evaluators import documents, prepare_documents, repeated, save_evaluator, save_run, shuffled

CPU = torch.device("cpu")
SMALL = Plan(steps=(2, 4), n=24)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return prepare_documents(tmp_path_factory.mktemp("data") / "stories")


@pytest.fixture
def runs(tmp_path, shards):
    return {kind: save_run(tmp_path / kind, kind, shards) for kind in ("mdlm", "rmdm", "ar")}


def measured(runs: list[Path], plan: Plan, evaluator: Path) -> tuple[list[dict], list[str]]:
    said: list[str] = []
    return measure_generation(runs, plan, Scorer(str(evaluator), CPU), said.append), said


def test_rows_say_what_was_measured_and_how(runs, trained_evaluator):
    rows, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    assert [row["row"] for row in rows] == ["held-out", "model", "model"]
    assert rows == json.loads((runs["mdlm"] / "eval" / "gen.json").read_text())["rows"]
    real, first, second = rows
    assert (first["steps"], second["steps"]) == (2, 4)
    for row in rows:
        assert row["gen_ppl_low"] < row["gen_ppl"] < row["gen_ppl_high"]
        assert row["entropy_low"] < row["entropy"] < row["entropy_high"]
        assert row["evaluator"] == f"{trained_evaluator} (folder)"
        assert row["n"] == 24
    assert first["precision"] == "fp32 network, float64 draws"
    assert first["sampler"] == "ancestral"
    assert real["gen_ppl"] < 8 < 100 < first["gen_ppl"]  # random weights write no stories
    assert real["mauve"] is None  # 24 texts are too few
    assert real["entropy_length"] == first["entropy_length"]
    assert first["distinct_1"] <= first["distinct_2"] <= first["distinct_3"] <= 1


def test_figures_are_those_of_the_stored_texts(runs, trained_evaluator, shards):
    rows, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    row = rows[1]
    lines = [json.loads(line) for line in (runs["mdlm"] / row["samples"]).read_text().splitlines()]
    model = load_model(runs["mdlm"])
    assert [line["text"] for line in lines] == model.generate(24, 2).texts
    scored = Evaluator(find_evaluator(str(trained_evaluator)), CPU).score([line["text"] for line in lines])
    counts = scored.tokens_N > 0
    assert row["tokens"] == scored.tokens_N.sum()
    assert row["empty"] == (~counts).sum()
    assert row["gen_ppl"] == pytest.approx(math.exp(scored.nats_N.sum() / scored.tokens_N.sum()))
    own = np.exp(scored.nats_N[counts] / scored.tokens_N[counts])
    assert row["gen_ppl_mean"] == pytest.approx(own.mean())


def test_the_latents_temperature_is_a_number_and_a_frontier_of_its_own(runs, trained_evaluator):
    rows, _ = measured([runs["rmdm"]], replace(SMALL, taus=("paper", 1.0)), trained_evaluator)
    models, matches = ([row for row in rows if row["row"] == kind] for kind in ("model", "matched"))
    assert [row["tau"] for row in models] == pytest.approx([1 / math.sqrt(2), 1.0] * 2)
    assert [(row["along"], row["steps"], row["temperature"]) for row in matches] == [("tau", 2, 1.0), ("tau", 4, 1.0)]


def test_a_model_that_recites_is_seen_to_copy(runs, trained_evaluator, shards):
    rows, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    file = runs["mdlm"] / rows[1]["samples"]
    recited = TokenRows.open(shards, "train").take(np.arange(24))
    texts = load_model(runs["mdlm"]).texts(recited)
    lines = [json.dumps({"text": text, "tokens": row}) for text, row in zip(texts, recited.tolist(), strict=True)]
    file.write_text("\n".join(lines) + "\n")
    (runs["mdlm"] / "eval" / "gen.json").unlink()
    real, reciting, own = measured([runs["mdlm"]], SMALL, trained_evaluator)[0]
    assert reciting["copied"] == 1.0
    assert own["copied"] == 0.0
    assert 0 < real["copied"] < 0.9
    assert reciting["gen_ppl"] < 8  # and an evaluator alone would praise it


def test_the_same_is_not_measured_again_and_texts_are_not_drawn_again_for_another_evaluator(
    runs, trained_evaluator, tmp_path
):
    first, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    files = sorted((runs["mdlm"] / "eval" / "gen-samples").iterdir())
    before = [file.stat().st_mtime_ns for file in files]
    again, said = measured([runs["mdlm"]], SMALL, trained_evaluator)
    assert again == first
    assert said[1:] == [f"measure: already done, {runs['mdlm'] / 'eval' / 'gen.json'}"]
    other = save_evaluator(tmp_path / "other", sorted({w for text in documents(100) for w in text.split()}))
    rescored, said = measured([runs["mdlm"]], SMALL, other)
    assert said[1] == "gen: 24 texts of tiny-mdlm, 2 steps, ancestral, temperature 1: drawn before"
    assert [file.stat().st_mtime_ns for file in files] == before
    assert rescored[1]["gen_ppl"] != first[1]["gen_ppl"]
    assert rescored[1]["distinct_2"] == first[1]["distinct_2"]
    (files[0].with_suffix(".jsonl")).write_text("damaged")
    measured([runs["mdlm"]], SMALL, trained_evaluator)
    assert len(files[0].with_suffix(".jsonl").read_text().splitlines()) == 24


def test_another_precision_is_another_measurement(runs, trained_evaluator, monkeypatch):
    first, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    monkeypatch.setenv("RMDM_PRECISION", "bf16")
    second, said = measured([runs["mdlm"]], SMALL, trained_evaluator)
    assert not any("drawn before" in line for line in said)
    assert [rows[1]["precision"].split()[0] for rows in (first, second)] == ["fp32", "bf16"]
    monkeypatch.setenv("RMDM_PRECISION", "fp32")
    again, said = measured([runs["mdlm"]], SMALL, trained_evaluator)
    assert [row["gen_ppl"] for row in again] == [row["gen_ppl"] for row in first]
    assert sum("drawn before" in line for line in said) == 2, "texts of both precisions are kept"


def test_a_models_other_settings_are_another_measurement(runs, trained_evaluator):
    """A finished run takes over settings that need no training; the weights stay what they are."""
    file = runs["mdlm"] / "model.json"
    saved = file.read_text()
    model = json.loads(saved)
    measured([runs["mdlm"]], SMALL, trained_evaluator)
    try:
        model["config"]["sample"]["temperature"] = 0.25
        file.write_text(json.dumps(model))
        rows, _ = measured([runs["mdlm"]], SMALL, trained_evaluator)
    finally:
        file.write_text(saved)
    assert [row["temperature"] for row in rows if row["row"] == "model"] == [0.25, 0.25]


def test_an_autoregressive_model_has_one_row(runs, trained_evaluator):
    rows, _ = measured([runs["ar"]], SMALL, trained_evaluator)
    assert [(row["row"], row.get("steps")) for row in rows] == [("held-out", None), ("model", 96)]


def test_steps_above_the_length_are_refused_where_a_sampler_cannot_use_them(runs, trained_evaluator):
    plan = replace(SMALL, steps=(16, 128), sampler="max_prob")
    with pytest.raises(ConfigError, match="--steps 128 is above tiny-mdlm's length of 96 tokens, and max_prob writes"):
        measured([runs["mdlm"]], plan, trained_evaluator)
    assert not (runs["mdlm"] / "eval").exists()
    rows, _ = measured([runs["mdlm"]], replace(SMALL, steps=(128,), n=2), trained_evaluator)
    assert rows[1]["steps"] == 128


def test_default_steps_are_powers_of_two_up_to_the_length(runs):
    assert [r.steps for r in generation.requests(load_model(runs["mdlm"]), Plan())] == [4, 8, 16, 32, 64]


def test_stories_have_a_measure_of_their_own(tmp_path, shards, trained_evaluator):
    run = save_run(tmp_path / "stories", "mdlm", shards, data__storyworld="mini")
    with pytest.raises(ConfigError, match="'rmdm eval stories' measures exactly; use that, or add --anyway"):
        measured([run], SMALL, trained_evaluator)
    rows, _ = measured([run], replace(SMALL, anyway=True, steps=(2,)), trained_evaluator)
    assert len(rows) == 2


def test_a_model_without_its_corpus_is_scored_as_far_as_possible(tmp_path, shards, trained_evaluator):
    run = save_run(tmp_path / "moved", "mdlm", shards, data__dir=str(tmp_path / "gone"))
    rows, said = measured([run], SMALL, trained_evaluator)
    assert [row["row"] for row in rows] == ["model", "model"]
    assert rows[0]["mauve"] is rows[0]["copied"] is None
    assert any("no held-out text" in line for line in said)
    assert any("no training rows" in line for line in said)
    (tmp_path / "gone").symlink_to(shards)
    rows, _ = measured([run], SMALL, trained_evaluator)
    assert [row["row"] for row in rows] == ["held-out", "model", "model"]
    assert rows[1]["copied"] is not None


def test_temperatures_give_genppl_at_equal_entropy(runs, trained_evaluator):
    plan = replace(SMALL, steps=(4,), temperatures=(0.3, 1.0))
    rows, _ = measured([runs["mdlm"]], plan, trained_evaluator)
    cold, warm = rows[1], rows[2]
    assert cold["entropy"] < warm["entropy"]
    middle = (cold["entropy"] + warm["entropy"]) / 2
    rows, _ = measured([runs["mdlm"]], replace(plan, entropy=middle), trained_evaluator)
    match = rows[-1]
    assert match["row"] == "matched"
    assert (match["along"], match["between_low"], match["between_high"]) == ("temperature", 0.3, 1.0)
    assert match["gen_ppl"] == pytest.approx(math.sqrt(cold["gen_ppl"] * warm["gen_ppl"]))
    assert match["gen_ppl_low"] < match["gen_ppl"] < match["gen_ppl_high"]
    for key in ("coherence", "coherence_low", "coherence_high"):
        assert match[key] == pytest.approx((cold[key] + warm[key]) / 2) if cold[key] is not None else match[key] is None
    table = render_generation(rows)
    assert "temperature 0.3 and 1\n" in table
    out_of_reach, _ = measured([runs["mdlm"]], replace(plan, entropy=9.0), trained_evaluator)
    assert out_of_reach[-1]["gen_ppl"] is None
    assert "only" in render_generation(out_of_reach)


def test_given_texts_real_shuffled_and_repeated(trained_evaluator, tmp_path):
    real = documents(64, 1000)
    for name, texts in (("real", real), ("shuffled", shuffled(real)), ("repeated", repeated(real))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents(64, 2000)))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("real", "shuffled", "repeated")]
    scorer = Scorer(str(trained_evaluator), CPU)
    rows = measure_texts(files, str(tmp_path / "other.jsonl"), Plan(length=64), scorer)
    true, mixed, again = rows
    assert mixed["gen_ppl"] > 20 * true["gen_ppl"]
    assert again["gen_ppl"] < true["gen_ppl"]
    assert again["entropy_high"] < true["entropy_low"]
    assert again["repetition"] > 0.5 > true["repetition"]
    assert true["mauve"] > 0.9
    assert mixed["mauve"] < 0.4
    assert again["mauve"] < 0.2


def test_given_texts_of_several_files_are_measured_at_one_length(trained_evaluator, tmp_path):
    for name, first in (("long", documents(8, 0)), ("short", [text[:60] for text in documents(8, 0)])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in first))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("long", "short")]
    rows = measure_texts(files, None, Plan(), Scorer(str(trained_evaluator), CPU))
    assert rows[0]["entropy_length"] == rows[1]["entropy_length"]
    assert rows[0]["tokens"] > 2 * rows[1]["tokens"]


def scored(ids: list[list[int]], nats: list[float]) -> Scored:
    arrays = [np.array(one, dtype=np.int64) for one in ids]
    counts = np.array([max(0, len(one) - 1) for one in ids])
    return Scored(arrays, np.array(nats), counts, np.zeros((len(ids), 2), dtype=np.float32))


def test_both_conventions_of_genppl_by_hand():
    figures = text_figures(scored([[1, 2, 3], [1, 2], [], [4]], [2 * math.log(4), math.log(32), 0, 0]), 2, [], None)
    assert figures["gen_ppl"] == pytest.approx(math.exp((2 * math.log(4) + math.log(32)) / 3))  # 8
    assert figures["gen_ppl_mean"] == pytest.approx((4 + 32) / 2)
    assert (figures["n"], figures["empty"], figures["tokens"], figures["entropy_n"]) == (4, 2, 3, 2)
    assert figures["entropy"] == pytest.approx(math.log(2))
    assert figures["distinct_1"] == 4 / 6


def test_texts_that_are_all_empty_have_no_genppl():
    figures = text_figures(scored([[], [5]], [0, 0]), 1, [], None)
    assert figures["gen_ppl"] is figures["gen_ppl_mean"] is None
    assert figures["empty"] == 2


def point(at: float, nats: float, entropy: float, n: int = 50) -> Point:
    noise_N = np.random.default_rng(int(100 * at)).normal(0, 0.05, n)
    tokens_N = np.full(n, 10.0)
    return Point(at, 10 * (nats + noise_N - noise_N.mean()), tokens_N, np.full(n, entropy) + noise_N - noise_N.mean())


def test_the_frontier_is_straight_between_neighbours():
    points = [point(1.0, 5.0, 4.0), point(0.8, 4.0, 3.0), point(0.6, 2.0, 2.0)]
    match = matched(points, 3.25)
    assert match is not None
    assert match.between == (0.8, 1.0)
    assert match.gen_ppl.value == pytest.approx(math.exp(4.25))
    assert match.gen_ppl.interval is not None
    assert match.gen_ppl.interval.low < math.exp(4.25) < match.gen_ppl.interval.high
    assert matched(points, 4.5) is None
    assert reach(points) == pytest.approx((2.0, 4.0))
    assert matched(points[:1], 4.0) is None


def test_texts_too_short_for_an_entropy_do_not_count_on_the_frontier():
    a, b = point(0.8, 4.0, 3.0, 4), point(1.0, 5.0, 4.0, 4)
    gaps = replace(b, entropy_N=np.array([4.0, np.nan, 4.0, np.nan]))
    match = matched([a, gaps], 3.5)
    assert match is not None
    assert match.gen_ppl.value == pytest.approx(math.exp(4.5))
    none = replace(b, entropy_N=np.full(4, np.nan))
    assert matched([a, none], 3.5) is None
    assert reach([none]) is None
