"""Figures of sets of stories whose truth is known: true ones, corrupted ones, copies, and a collapsed set."""

import dataclasses
import json
import math

import pytest

from rmdm.data.sources import STORY_SEED
from rmdm.data.storyworld import SIZES, storyworld
from rmdm.data.storyworld.worlds import WORLDS
from rmdm.errors import DataError
from rmdm.evaluation.stories import StoryFigures, StoryRow, half_width, measure_stories, render_stories, true_stories

HEROES = {"mini": ("mia", "anna"), "full": ("clara", "emma")}


def corpus(size: str, n: int) -> list[str]:
    return [storyworld(size).story(STORY_SEED, index) for index in range(n)]


def with_another_hero(size: str, n: int) -> list[str]:
    """True stories whose hero has another name from its second mention on."""
    here, there = HEROES[size]
    texts = [text for text in true_stories(size, 60 * n) if text.split(" ").count(here) > 1][:n]
    assert len(texts) == n
    return [f" {there} ".join(text.rsplit(f" {here} ", 1)) for text in texts]


def prior(size: str, variable: str) -> dict[str, float]:
    weights = WORLDS[size].variables[variable]
    return {value: weight / sum(weights.values()) for value, weight in weights.items()}


class TestTrueStories:
    @pytest.mark.parametrize("size", ["mini", "full"])
    def test_figures(self, size):
        texts = true_stories(size, 512, seed=1)
        figures = measure_stories(texts, size, frozenset(corpus(size, 2000)))
        assert figures.n == 512
        assert figures.grammatical == figures.consistent == figures.finite == 1.0
        assert figures.marginals is not None
        assert figures.floor is not None
        assert 0 < figures.marginals <= figures.floor < 0.1
        assert all(m.distance is not None and m.distance <= figures.marginals for m in figures.variables)
        assert (figures.distinct, figures.copied) == (1.0, 0.0)

    @pytest.mark.parametrize(("size", "bits"), [("mini", 25.7), ("full", 55.5)])
    def test_the_nll_is_the_entropy_in_nats(self, size, bits):
        figures = measure_stories(true_stories(size, 512), size, ())
        assert figures.nll_error is not None
        assert figures.nll == pytest.approx(bits * math.log(2), abs=4 * figures.nll_error)
        assert 0.01 < figures.nll_error < 0.2

    @pytest.mark.parametrize("size", SIZES)
    def test_they_are_another_set_for_every_seed_and_none_of_the_corpus(self, size):
        world, n = storyworld(size), 50
        sets = [corpus(size, n), true_stories(size, n, 0), true_stories(size, n, 1)]
        assert sets[1] == true_stories(size, n, 0)
        assert all(len(texts) == n and all(world.check(text).consistent for text in texts) for texts in sets)
        assert all(a != b for k, a in enumerate(sets) for b in sets[k + 1 :])
        if size == "full":
            assert len({text for texts in sets for text in texts}) == 3 * n


class TestFloor:
    """What lets a floor be drawn from the priors alone, and that true stories do stay below it."""

    @pytest.mark.parametrize(("size", "silent"), [("tiny", set()), ("mini", {"weather"}), ("full", set())])
    def test_true_stories_tell_their_own_plot(self, size, silent):
        world = storyworld(size)
        untold: set[str] = set()
        for index in range(2000):
            plot, told = world.plot(3, index), world.check(world.story(3, index)).plot
            assert told.items() <= plot.items()
            untold |= plot.keys() - told.keys()
        assert untold == silent

    def test_told_values_follow_the_prior_exactly(self):
        world = storyworld("tiny")
        told = [(world.check(text).plot, p) for text, p in world.enumerate()]
        for name in world.plot_variables:
            total = math.fsum(p for plot, p in told if name in plot)
            for value, share in prior("tiny", name).items():
                assert math.fsum(p for plot, p in told if plot.get(name) == value) / total == pytest.approx(share)

    def test_telling_the_weather_does_not_depend_on_the_weather(self):
        world, n = storyworld("mini"), 12_000
        told, silent = dict.fromkeys(prior("mini", "weather"), 0), 0
        for index in range(n):
            value = world.check(world.story(4, index)).plot.get("weather")
            if value is None:
                silent += 1
            else:
                told[value] += 1
        assert 0.05 < silent / n < 0.12
        for value, share in prior("mini", "weather").items():
            spread = math.sqrt(share * (1 - share) / (n - silent))
            assert told[value] / (n - silent) == pytest.approx(share, abs=4 * spread)

    def test_about_one_true_set_in_twenty_lies_above(self):
        sets, n = 150, 100
        figures = [measure_stories(true_stories("mini", n, seed), "mini", ()) for seed in range(sets)]
        above = sum(f.marginals > f.floor for f in figures)
        # Binomial(150, 0.05) within 3.5 standard deviations; ties at the quantile make it a little less.
        assert 1 <= above <= 17
        own = sum(m.distance > m.floor for f in figures for m in f.variables)
        assert 0.02 < own / (sets * len(figures[0].variables)) < 0.06

    def test_fewer_values_told_raise_it(self):
        texts = true_stories("full", 64)
        whole = measure_stories(texts, "full", ())
        part = measure_stories([*texts[:16], *["nothing"] * 48], "full", ())
        assert [m.told for m in part.variables] == [16] * 11
        assert part.floor > 1.5 * whole.floor


class TestFaults:
    @pytest.mark.parametrize("size", ["mini", "full"])
    def test_a_swapped_name_is_grammatical_but_not_consistent(self, size):
        texts = with_another_hero(size, 24)
        figures = measure_stories(texts, size, ())
        assert figures.grammatical == 1.0
        assert figures.consistent == figures.finite == 0.0
        assert figures.nll is None
        assert figures.nll_error is None
        # What the other mentions say is still read: one hero, so far from the truth, and nothing wrong with the rest.
        count = len(prior(size, "hero"))
        assert figures.variable == "hero"
        assert figures.marginals == pytest.approx(1 - 1 / count)
        mood = next(m for m in figures.variables if m.variable == "mood")
        assert mood.told == 24
        assert mood.distance <= mood.floor

    def test_the_nll_is_over_the_possible_stories_only(self):
        good, world = true_stories("full", 24), storyworld("full")
        figures = measure_stories([*good, *with_another_hero("full", 8)], "full", ())
        assert figures.consistent == figures.finite == 0.75
        assert figures.nll == pytest.approx(sum(-world.log_likelihood(text) for text in good) / 24)

    def test_a_collapsed_set_is_far_from_the_truth(self):
        figures = measure_stories(true_stories("full", 1) * 256, "full", ())
        assert figures.consistent == 1.0
        assert figures.distinct == 1 / 256
        assert figures.variable == "hero"
        assert figures.marginals == pytest.approx(1 - 1 / 12)
        assert figures.marginals > 0.05 + figures.floor
        assert figures.nll_error == pytest.approx(0.0, abs=1e-12)

    def test_one_collapsed_variable_is_named(self):
        world = storyworld("full")
        texts = [text for text in true_stories("full", 3000) if world.check(text).plot["weather"] == "foggy"]
        figures = measure_stories(texts, "full", ())
        assert figures.variable == "weather"
        assert figures.marginals == pytest.approx(0.8)
        others = [m for m in figures.variables if m.variable != "weather"]
        assert all(m.distance < 0.05 + m.floor for m in others)

    def test_copies_and_duplicates(self):
        training, fresh = corpus("mini", 400), true_stories("mini", 60)
        figures = measure_stories([*fresh, *training[:20], *fresh[:20]], "mini", set(training))
        assert figures.copied == 0.2
        assert figures.distinct == 0.8

    def test_a_text_that_is_no_story_tells_nothing(self):
        figures = measure_stories(["the the the", "", "mia ."], "mini", ())
        assert (figures.grammatical, figures.consistent, figures.finite) == (0.0, 0.0, 0.0)
        assert (figures.nll, figures.marginals, figures.floor, figures.variable) == (None, None, None, None)
        assert all((m.told, m.distance, m.floor) == (0, None, None) for m in figures.variables)

    def test_a_variable_that_is_never_told_is_no_distance(self):
        """mini's weather may be left out: it is then neither the worst variable nor an error."""
        world = storyworld("mini")
        texts = [text for text in true_stories("mini", 600) if "weather" not in world.check(text).plot]
        figures = measure_stories(texts, "mini", ())
        weather = next(m for m in figures.variables if m.variable == "weather")
        assert (weather.told, weather.distance, weather.floor) == (0, None, None)
        assert figures.marginals == max(m.distance for m in figures.variables if m.told)
        assert figures.variable != "weather"

    def test_no_stories_are_refused(self):
        with pytest.raises(DataError, match="0 stories have no shares; measure at least 1"):
            measure_stories([], "mini", ())

    def test_an_unknown_size_is_refused(self):
        with pytest.raises(DataError, match="did you mean 'full'"):
            measure_stories(["mia ."], "ful", ())


@pytest.fixture(scope="module")
def figures() -> StoryFigures:
    return measure_stories(true_stories("full", 512), "full", ())


class TestTable:
    def test_every_figure_of_a_row_is_shown(self, figures):
        shown = dataclasses.replace(
            figures, grammatical=0.987, consistent=0.5, finite=0.504, nll=38.123, nll_error=0.1, marginals=0.234,
            floor=0.081, variable="weather", distinct=0.913, copied=0.027
        )  # fmt: skip
        rows = [StoryRow("MDLM", 16, 2.0, shown), StoryRow("true generator", None, None, figures)]
        lines = [" ".join(line.split()) for line in render_stories(rows).splitlines()]
        assert lines[1] == "arm steps gramm. consistent distinct copied nats finite TV floor of"
        assert lines[2] == "MDLM 16 98.7 50.0 ±4.3 91.3 2.7 38.12 ±0.20 50.4 0.234 0.081 weather"
        assert lines[3].startswith("true generator - 100.0 100.0 ±0.5 100.0 0.0 38.")
        assert lines[4].startswith("512 stories a row")

    def test_it_says_once_how_the_stories_were_written(self, figures):
        plain = [StoryRow(arm, 4, 1.0, figures, "ancestral") for arm in ("A", "A", "B")]
        assert render_stories(plain).count("written by: ancestral") == 1
        mixed = render_stories([*plain, StoryRow("C", 4, 1.0, figures, "ancestral, guidance 1.5", 1)]).splitlines()
        assert "ancestral: A, B" in mixed
        assert "ancestral, guidance 1.5: C, seed 1" in mixed
        assert [line.split()[0] for line in mixed[2:6]] == ["A", "A", "B", "C,"]

    def test_it_fits_in_104_columns_with_every_label_whole(self, figures):
        lone = measure_stories(true_stories("full", 1), "full", ())
        widest = dataclasses.replace(figures, nll=105.25, nll_error=7.0, variable="weather", n=3)
        labels = ["RMDM flow, the paper's exact recipe with its true latent", "x" * 70, "MDLM"]
        rows = [StoryRow(label, 1024, 3.0, f) for label in labels for f in (figures, lone, widest)]
        lines = render_stories(rows).splitlines()
        assert max(map(len, lines)) <= 104
        first = lines[1].index("steps") - 1
        words = " ".join(line[:first].strip() for line in lines[2:])
        assert labels[0] in words
        assert "x" * 70 in words.replace(" ", "")
        assert "1 to 512 stories a row" in "\n".join(lines)

    def test_what_does_not_exist_is_a_dash(self):
        nothing = measure_stories(["the the the"], "mini", ())
        line = render_stories([StoryRow("noise", 1, 0.1, nothing)]).splitlines()[2]
        assert line.split() == ["noise", "1", "0.0", "0.0", "±42.9", "100.0", "0.0", "-", "0.0", "-", "-", "-"]

    def test_no_rows_are_refused(self):
        with pytest.raises(DataError, match="0 rows make no table"):
            render_stories([])

    @pytest.mark.parametrize("texts", [["no story"], true_stories("mini", 40)])
    def test_json_round_trip(self, texts):
        row = StoryRow("RMDM", 8, 1.5, measure_stories(texts, "mini", ()))
        written = json.dumps(row.to_json(), allow_nan=False)
        assert {"arm", "steps", "seconds", "n", "consistent", "nll", "marginals", "copied"} <= json.loads(
            written
        ).keys()
        assert StoryRow.from_json(json.loads(written)) == row


def test_half_width_keeps_a_width_at_the_ends_and_shrinks_with_n():
    assert half_width(0.5, 512) == pytest.approx(100 * 1.96 * math.sqrt(0.25 / 516))
    assert half_width(1.0, 512) == pytest.approx(half_width(0.0, 512))
    assert 0 < half_width(1.0, 2048) < half_width(1.0, 512) < 1
