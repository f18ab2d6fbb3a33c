"""The promises of storyworld: an exact law, a checker that agrees with it, and stories that never change."""

import math
import random
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmdm.data.storyworld import SIZES, VERSION, Storyworld, storyworld
from rmdm.data.storyworld.grammar import Shape, Slot, Words, World, compile_world
from rmdm.errors import DataError

SEEDS = st.integers(0, 2**63)

# Values a plot variable takes, by size.
PLOTS = {
    "tiny": {"hero": 4, "thing": 3, "mood": 2, "tense": 2},
    "mini": {"hero": 8, "pet": 4, "place": 6, "thing": 8, "weather": 4, "mood": 3, "tense": 2},
    "full": {
        "hero": 12,
        "friend": 8,
        "place": 8,
        "weather": 5,
        "hour": 3,
        "mood": 4,
        "order": 2,
        "animal": 6,
        "thing": 10,
        "colour": 5,
        "tense": 2,
    },
}

# The freeze: fingerprint of the grammar and hash of the first 100 stories of seed 0.
FROZEN = {
    "tiny": ("939b4f9d6be0b0dc", "053228a931e936ff2cdb4cd68f16b6415e4169ddf0dada47b9907218c24bf8da"),
    "mini": ("55b76be8ebfd4d15", "c9796d38aedebe2c583c01b41066b34ebdeb7983a46b04a3e58b2535701c6e3b"),
    "full": ("4fa37fc3b746ec5d", "36f889c88d8a49751e4a416add7db945cc21d56cfc7d647db7563f3b3aeb5c79"),
}


def row(world: Storyworld, text: str) -> list[str]:
    words = [*text.split(" "), "<eos>"]
    return words + ["<pad>"] * (world.length - len(words))


def columns(world: Storyworld) -> dict[str, int]:
    return {word: k for k, word in enumerate((*world.vocabulary, "<eos>", "<pad>"))}


def names(broken: tuple[str, ...]) -> set[str]:
    return {message.split(":")[0] for message in broken}


@pytest.fixture(scope="module")
def tiny_law() -> dict[str, float]:
    return dict(storyworld("tiny").enumerate())


class TestStories:
    @pytest.mark.parametrize("size", SIZES)
    def test_generated_stories_are_frozen(self, size):
        world = storyworld(size)
        stories = "\n".join(world.story(0, index) for index in range(100))
        assert VERSION == 1
        assert (world.fingerprint, sha256(stories.encode()).hexdigest()) == FROZEN[size]

    @settings(max_examples=150, deadline=None)
    @given(size=st.sampled_from(SIZES), seed=SEEDS, index=SEEDS)
    def test_every_story_is_likely_and_consistent(self, size, seed, index):
        world = storyworld(size)
        text = world.story(seed, index)
        check = world.check(text)
        assert math.isfinite(world.log_likelihood(text))
        assert world.log_likelihood(text) < 0
        assert check.grammatical
        assert check.consistent
        assert check.broken == ()
        # What is read back is the plot the story was written from.
        assert check.plot.items() <= world.plot(seed, index).items()
        assert {"hero", "mood", "tense"} <= check.plot.keys()

    def test_a_story_depends_on_size_seed_and_index_alone(self):
        forward = [storyworld("mini").story(5, index) for index in range(50)]
        fresh = Storyworld("mini")
        assert [fresh.story(5, index) for index in reversed(range(50))] == forward[::-1]
        assert len({*forward, *(fresh.story(6, index) for index in range(50))}) == 100

    @pytest.mark.parametrize(
        ("size", "least", "most", "words"), [("mini", 20, 31, (100, 150)), ("full", 48, 69, (250, 400))]
    )
    def test_shape_of_the_corpus(self, size, least, most, words):
        world = storyworld(size)
        stories = [world.story(1, index) for index in range(3000)]
        lengths = {len(text.split(" ")) for text in stories}
        assert world.length == most + 1
        assert least <= min(lengths)
        assert max(lengths) <= most
        assert len(lengths) > 5
        assert words[0] <= len(world.vocabulary) <= words[1]
        assert list(world.vocabulary) == sorted(set(world.vocabulary))
        assert {word for text in stories for word in text.split(" ")} == set(world.vocabulary)

    @pytest.mark.parametrize("size", SIZES)
    def test_every_plot_value_occurs(self, size):
        world = storyworld(size)
        plots = [world.plot(2, index) for index in range(2000)]
        found = {name: len({plot[name] for plot in plots}) for name in world.plot_variables}
        assert found == PLOTS[size]

    def test_sampled_frequencies_follow_the_enumerated_law(self, tiny_law):
        draws = 40_000
        counts = Counter(storyworld("tiny").story(11, index) for index in range(draws))
        assert counts.keys() <= tiny_law.keys()
        common = {text: p * draws for text, p in tiny_law.items() if p * draws >= 5}
        rest = draws - sum(common.values())
        cells = [(counts[text], expected) for text, expected in common.items()]
        cells.append((draws - sum(counts[text] for text in common), rest))
        chi2 = sum((count - expected) ** 2 / expected for count, expected in cells)
        freedom = len(cells) - 1
        assert freedom > 300
        assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom)


class TestLikelihood:
    def test_the_tiny_law_sums_to_one(self, tiny_law):
        assert 500 < len(tiny_law) <= 2000
        assert math.fsum(tiny_law.values()) == pytest.approx(1.0, abs=1e-12)
        likelihoods = [math.exp(storyworld("tiny").log_likelihood(text)) for text in tiny_law]
        assert likelihoods == pytest.approx(list(tiny_law.values()), rel=1e-12)

    def test_derivations_of_one_text_are_summed(self):
        # Weight 2 of 3 x no adverb, and weight 1 of 3 x "found" x "a"; ending "he smiled ." has weight 2 of 4.
        opening = 2 / 3 * 1 / 2 + 1 / 3 * 1 / 2 * 1 / 2
        plot = 1 / 4 * 3 / 6 * 1 / 2 * 2 / 3
        expected = math.log(plot * opening * 2 / 4)
        assert storyworld("tiny").log_likelihood("tom found a ball . he smiled .") == pytest.approx(expected)

    @pytest.mark.parametrize(("size", "bits"), [("mini", 25.7), ("full", 55.5)])
    def test_mean_negative_log_likelihood(self, size, bits):
        world = storyworld(size)
        nll = [-world.log_likelihood(world.story(9, index)) / math.log(2) for index in range(1500)]
        assert np.mean(nll) == pytest.approx(bits, abs=0.25)

    def test_mean_negative_log_likelihood_is_the_entropy(self, tiny_law):
        world = storyworld("tiny")
        entropy = -math.fsum(p * math.log(p) for p in tiny_law.values())
        nll = [-world.log_likelihood(world.story(4, index)) for index in range(8000)]
        assert np.mean(nll) == pytest.approx(entropy, abs=4 * np.std(nll) / math.sqrt(len(nll)))

    @settings(max_examples=200, deadline=None)
    @given(size=st.sampled_from(SIZES), seed=SEEDS, data=st.data())
    def test_consistent_texts_are_exactly_those_of_positive_likelihood(self, size, seed, data):
        """Under edits that keep many texts grammatical: a word replaced, dropped, or a sentence from another story."""
        world = storyworld(size)
        text, other = world.story(seed, 0), world.story(seed, 1)
        words = text.split(" ")
        at = data.draw(st.integers(0, len(words) - 1))
        edit = data.draw(st.sampled_from(("replace", "drop", "splice", "none")))
        if edit == "replace":
            words[at] = data.draw(st.sampled_from(world.vocabulary))
        elif edit == "drop":
            del words[at]
        elif edit == "splice":
            ours, theirs = text.split(" . "), other.split(" . ")
            k = data.draw(st.integers(0, len(ours) - 1))
            ours[k] = theirs[k]
            words = " . ".join(ours).split(" ")
        check = world.check(" ".join(words))
        assert check.consistent == math.isfinite(world.log_likelihood(" ".join(words)))
        assert check.consistent == (check.broken == ())
        assert check.grammatical or not check.consistent
        if edit == "splice":
            assert check.grammatical


# Words of mini by the variable they reveal, as a reader would sort them: one inner list is one value.
MINI_WORDS = {
    "hero": [["mia"], ["anna"], ["lily"], ["nora"], ["tom"], ["ben"], ["jack"], ["leo"]],
    "pet": [["dog", "barked", "barks"], ["cat", "purred", "purrs"], ["duck", "quacked", "quacks"], ["pony", "neighed"]],
    "place": [["beach", "sand"], ["forest", "moss"], ["farm", "hay"], ["park", "grass"], ["river", "mud"]],
    "thing": [["kite"], ["ball"], ["key"], ["coin"], ["hat"], ["book"], ["ring"], ["bell"]],
    "weather": [["sunny", "sun"], ["rainy", "rain"], ["windy", "wind"], ["snowy", "snow"]],
    "mood": [["happily", "happy", "smiled"], ["sadly", "sad", "cried"], ["sleepily", "sleepy", "yawned"]],
}
SWAPS = {
    "pronoun": [("she", "he"), ("her", "his")],
    "tense": [("found", "finds"), ("saw", "sees"), ("walked", "walks"), ("took", "takes"), ("smiled", "smiles")],
}


class TestChecker:
    def test_corrupting_a_bound_word_breaks_its_constraint(self):
        """Every word whose variable another word of the story settles, replaced by the same kind of another value."""
        world = storyworld("mini")
        corrupted = Counter()
        for index in range(400):
            words = world.story(3, index).split(" ")
            for variable, values in MINI_WORDS.items():
                for value in values:
                    here = [k for k, word in enumerate(words) if word in value]
                    for at in here if len(here) > 1 else ():
                        rank = value.index(words[at])
                        for other in values:
                            if other is value or rank >= len(other):
                                continue
                            check = world.check(" ".join([*words[:at], other[rank], *words[at + 1 :]]))
                            assert check.grammatical
                            assert not check.consistent
                            assert names(check.broken) == {variable}
                            corrupted[variable] += 1
            for constraint, pairs in SWAPS.items():
                for pair in (*pairs, *(pair[::-1] for pair in pairs)):
                    for at in [k for k, word in enumerate(words) if word == pair[0]]:
                        check = world.check(" ".join([*words[:at], pair[1], *words[at + 1 :]]))
                        assert check.grammatical
                        assert not check.consistent
                        assert names(check.broken) == {constraint}
                        corrupted[constraint] += 1
        assert corrupted.keys() == MINI_WORDS.keys() | SWAPS.keys()
        assert min(corrupted.values()) > 100

    @settings(max_examples=60, deadline=None)
    @given(seed=SEEDS)
    def test_full_stories_break_where_they_are_corrupted(self, seed):
        world = storyworld("full")
        text, plot = world.story(seed, 0), world.plot(seed, 0)
        for variable, other in (("hero", "oscar"), ("thing", "drum"), ("colour", "silver")):
            if plot[variable] == other:
                continue
            assert text.count(f" {plot[variable]} ") + text.startswith(plot[variable]) > 1
            head, _, tail = text.rpartition(f" {plot[variable]} ")
            check = world.check(f"{head} {other} {tail}")
            assert check.grammatical
            assert not check.consistent
            assert check.broken == (f"{variable}: {plot[variable]} became {other}",)
            assert check.plot[variable] == plot[variable]

    @pytest.mark.parametrize(
        ("size", "text", "broken"),
        [
            ("tiny", "mia found a ball . he smiled .", ("pronoun: he for mia",)),
            ("tiny", "mia found a ball . tom was happy .", ("hero: mia became tom",)),
            ("tiny", "mia found a ball . she smiles .", ("tense: past then present",)),
            ("tiny", "mia sadly found a ball . she kept it .", ("mood: happy ending for sad",)),
            ("tiny", "mia sadly found a ball . the kite broke .", ("thing: ball became kite",)),
            (
                "tiny",
                "mia sadly found a ball . he smiles .",
                ("pronoun: he for mia", "mood: smiles for sad", "tense: past then present"),
            ),
            (
                "mini",
                "leo happily took his dog to the beach one sunny morning . she found a small key in the hay . "
                "the cat barked and leo laughed .",
                ("pronoun: she for leo", "place: hay for beach", "pet: dog became cat"),
            ),
            (
                "mini",
                "ben happily took her dog to the beach one sunny morning . she found a small key in the sand . "
                "mia took the key home and smiled .",
                ("hero: ben became mia",),
            ),
            (
                "full",
                "nina and tom were near the farm one rainy evening . she felt happy all morning . "
                "tom admired the barns for a while . a little dog barked at them . soon she found a red key . "
                "the dog quacked twice . in the end nina kept the red key and sighed .",
                ("hour: evening became morning", "animal: quacked for dog", "mood: sighed for happy"),
            ),
            (
                "full",
                "nina and tom were near the farm one rainy evening . she felt happy . "
                "tom admired the barns for a while . they watched the barns . soon she found a red key . "
                "the dog barked twice . in the end nina kept the red key and smiled .",
                ("order: meeting-first fourth sentence for view-first",),
            ),
        ],
    )
    def test_broken_constraints_are_named_in_reading_order(self, size, text, broken):
        check = storyworld(size).check(text)
        assert check.grammatical
        assert not check.consistent
        assert check.broken == broken

    def test_the_plot_is_read_back(self):
        check = storyworld("tiny").check("anna finds a drum . anna is sad .")
        assert check.consistent
        assert check.plot == {"hero": "anna", "thing": "drum", "mood": "sad", "tense": "present"}
        # Nothing tells the weather, so it is left out.
        text = (
            "mia sadly followed her dog to the park . she saw a lost key in the grass . the dog barked and mia cried ."
        )
        plot = {"hero": "mia", "pet": "dog", "place": "park", "thing": "key", "mood": "sad", "tense": "past"}
        assert storyworld("mini").check(text).plot == plot

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("", "'' at word 1"),
            ("mia found a ball .", "the end of the text at word 6"),
            ("mia found a  ball . she smiled .", "'' at word 4"),
            ("mia found a dragon . she smiled .", "'dragon' at word 4"),
            ("mia found a ball . she smiled . she smiled .", "'she' at word 9"),
            ("Mia found a ball . she smiled .", "'Mia' at word 1"),
        ],
    )
    def test_ungrammatical_texts_say_where(self, text, where):
        check = storyworld("tiny").check(text)
        assert not check.grammatical
        assert not check.consistent
        assert check.broken == (f"grammar: {where} fits no sentence",)
        assert check.plot == {}
        assert storyworld("tiny").log_likelihood(text) == -math.inf


class TestMarginals:
    @settings(max_examples=120, deadline=None)
    @given(seed=SEEDS, data=st.data())
    def test_tiny_marginals_equal_brute_force(self, seed, data, tiny_law):
        """Given words come from two stories, so that some masks are impossible: then and only then it raises."""
        world = storyworld("tiny")
        rows = [row(world, world.story(seed, index)) for index in range(2)]
        source = data.draw(
            st.lists(st.sampled_from((None, None, 0, 0, 0, 1)), min_size=world.length, max_size=world.length)
        )
        words = [None if k is None else rows[k][position] for position, k in enumerate(source)]
        index = columns(world)
        expected = np.zeros((world.length, len(index)))
        total = 0.0
        for text, p in tiny_law.items():
            full = row(world, text)
            if all(word is None or word == there for word, there in zip(words, full, strict=True)):
                total += p
                for position, word in enumerate(full):
                    expected[position, index[word]] += p
        if total == 0:
            with pytest.raises(DataError, match="no tiny story has the given words"):
                world.marginals(words)
        else:
            np.testing.assert_allclose(world.marginals(words), expected / total, rtol=1e-10, atol=1e-14)

    @pytest.mark.parametrize(
        ("size", "stories", "order"), [("mini", 3, "left"), ("mini", 3, "any"), ("full", 1, "any"), ("full", 1, "left")]
    )
    def test_the_chain_rule_gives_the_likelihood(self, size, stories, order):
        """Σ_k ln p(x_{σ(k)} | x_{σ(<k)}) = ln p(x), left to right and in a shuffled order σ."""
        world = storyworld(size)
        index = columns(world)
        for story in range(stories):
            text = world.story(21, story)
            full = row(world, text)
            positions = list(range(world.length))
            if order == "any":
                random.Random(story).shuffle(positions)
            words: list[str | None] = [None] * world.length
            total = 0.0
            for position in positions:
                marginals = world.marginals(words)
                total += math.log(marginals[position, index[full[position]]])
                words[position] = full[position]
            assert total == pytest.approx(world.log_likelihood(text), abs=1e-9)

    @pytest.mark.parametrize(
        "clue",
        [{}, {3: "leo"}, {1: "happily", 7: "beach"}, {17: "in"}, {2: "followed", -1: "<pad>"}, {-1: "<eos>"}],
    )
    def test_mini_marginals_agree_with_sampling(self, clue):
        world = storyworld("mini")
        index = columns(world)
        given_words = [clue.get(k, clue.get(k - world.length)) for k in range(world.length)]
        marginals = world.marginals(given_words)
        counts = np.zeros_like(marginals)
        kept = 0
        for draw in range(30_000):
            full = row(world, world.story(31, draw))
            if all(word is None or word == there for word, there in zip(given_words, full, strict=True)):
                kept += 1
                counts[np.arange(world.length), [index[word] for word in full]] += 1
        assert kept > 100
        assert not counts[marginals == 0].any()
        error = np.abs(counts / kept - marginals)
        # Five standard errors of a binomial share, and a little for rare words where it is no normal.
        assert (error <= 5 * np.sqrt(marginals * (1 - marginals) / kept) + 5 / kept).all()

    @pytest.mark.parametrize("size", SIZES)
    def test_rows_are_distributions_and_given_words_are_one_hot(self, size):
        world = storyworld(size)
        full = row(world, world.story(0, 0))
        words = [word if k % 3 else None for k, word in enumerate(full)]
        marginals = world.marginals(words)
        assert marginals.shape == (world.length, len(world.vocabulary) + 2)
        assert (marginals >= 0).all()
        np.testing.assert_allclose(marginals.sum(axis=1), 1.0, atol=1e-12)
        for position, word in enumerate(words):
            if word is not None:
                assert marginals[position, columns(world)[word]] == 1.0

    def test_the_hero_far_away_decides_the_pronoun(self):
        world = storyworld("mini")
        she, mia = columns(world)["she"], columns(world)["mia"]
        text = (
            "mia sadly followed her dog to the park . she saw a lost key in the grass . the dog barked and mia cried ."
        )
        words = [None if word in ("she", "her") else word for word in row(world, text)]
        assert words[9] is None
        assert words[22] == "mia"
        assert world.marginals(words)[9, she] == pytest.approx(1.0)
        words[0] = words[22] = None
        assert world.marginals(words)[9, she] == pytest.approx(0.5)
        assert world.marginals(words)[22, mia] == pytest.approx(1 / 8)


class TestErrors:
    def test_unknown_size(self):
        with pytest.raises(DataError, match="did you mean 'mini'"):
            storyworld("minii")

    def test_only_tiny_is_enumerable(self):
        with pytest.raises(DataError, match="use size 'tiny'"):
            next(storyworld("mini").enumerate())

    def test_marginals_of_a_row_of_the_wrong_length(self):
        with pytest.raises(DataError, match="length=32, got 31"):
            storyworld("mini").marginals([None] * 31)

    def test_marginals_of_an_unknown_word(self):
        with pytest.raises(DataError, match="'dragon' is no word"):
            storyworld("mini").marginals(["dragon"] + [None] * 31)

    @pytest.mark.parametrize("words", [{0: "mia", 3: "his"}, {0: "<pad>"}, {31: "mia"}, {0: "mia", 2: "mia"}])
    def test_marginals_of_impossible_words(self, words):
        with pytest.raises(DataError, match="mask the ones that disagree"):
            storyworld("mini").marginals([words.get(k) for k in range(32)])


class TestGrammar:
    def world(self, template: str, length: int = 8, words: dict[str, Words] | None = None) -> World:
        variables = {"hero": {"mia": 1, "tom": 1}, "tense": {"past": 1, "present": 1}}
        return World(length, variables, words or {}, (Slot("only", (Shape(1, template),)),))

    def test_options_are_written_out(self):
        grammar = compile_world(self.world("{hero} [ often ] sang/sings|ran/runs [ well ] ."), 1)
        (sentence,) = grammar.sentences
        assert sorted(len(form.items) for form in sentence.forms) == [3, 4, 4, 5]
        assert {form.counts for form in sentence.forms} == {(1,)}
        assert grammar.vocabulary == (".", "mia", "often", "ran", "runs", "sang", "sings", "tom", "well")

    def test_any_edit_of_the_law_changes_the_fingerprint(self):
        prints = [
            compile_world(self.world("{hero} sang ."), 1).fingerprint,
            compile_world(self.world("{hero} sang ."), 2).fingerprint,
            compile_world(self.world("{hero} ran ."), 1).fingerprint,
            compile_world(self.world("{hero} sang|sang|ran ."), 1).fingerprint,
            compile_world(self.world("{hero} sang .", length=9), 1).fingerprint,
        ]
        assert len(set(prints)) == len(prints)
        assert compile_world(self.world("{hero} sang ."), 1).fingerprint == prints[0]

    def test_a_story_longer_than_the_row_is_refused(self):
        with pytest.raises(ValueError, match="longest story has 4 words, length=4 holds 3"):
            compile_world(self.world("{hero} sang well .", length=4), 1)

    def test_a_word_that_ties_two_variables_is_refused(self):
        # "put" is mia's present or tom's past: no product of value sets, which the checker could not take apart.
        words = {"put": Words("hero", {"mia": "laid/put", "tom": "put/lays"})}
        grammar = compile_world(self.world("{hero} {put} it .", words=words), 1)
        with pytest.raises(ValueError, match="'put' in 'hero'"):
            grammar.sentences[0].forms[0].items[1].masks()
