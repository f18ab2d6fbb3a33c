"""Reading a story back: its sentences, its hidden plot, which constraints it breaks, and its exact likelihood.

A text is parsed slot by slot through a trie over the positions of the slot's forms, where a plot-bound position takes
any of its words: that is what *grammatical* means. Each bound word then allows a set of values for the variables it
depends on, and the text is *consistent* when every variable is left with a value. Variables are independent with
positive weights and every word allows a product of value sets (`Item.masks`), so consistent texts are exactly those
of positive likelihood.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rmdm.data.storyworld.grammar import TENSE, Form, Grammar, Item, Sentence


@dataclass(frozen=True)
class Check:
    """What a text is found to be.

    `grammatical`: sentences of the world in their order, agreement ignored. `consistent`: all constraints agree, which
    holds exactly where the log-likelihood is finite. `broken`: the constraints violated, in reading order, each as
    `name: what happened`. `plot`: the variables the text settles; in an inconsistent text, by most of its mentions.
    """

    grammatical: bool
    consistent: bool
    broken: tuple[str, ...] = ()
    plot: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Mention:
    """A word (or the kind of a sentence) at `position` that allows the values in the bit set `mask`."""

    position: int
    word: str
    label: str
    mask: int


class _Node:
    """Trie over items: `edges[word]` are the nodes that reading `word` can lead to, `forms` those that end here."""

    __slots__ = ("children", "edges", "forms")

    def __init__(self) -> None:
        self.children: dict[Item, _Node] = {}
        self.edges: dict[str, tuple[_Node, ...]] = {}
        self.forms: list[Form] = []


def _trie(sentence: Sentence) -> _Node:
    root = _Node()
    for form in sentence.forms:
        node = root
        for item in form.items:
            child = node.children.get(item)
            if child is None:
                child = node.children[item] = _Node()
                for word in item.words():
                    node.edges[word] = (*node.edges.get(word, ()), child)
            node = child
        node.forms.append(form)
    return root


class Checker:
    """Parser, checker and exact likelihood of one grammar."""

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self._roots = [_trie(sentence) for sentence in grammar.sentences]
        self._everything = tuple((1 << len(variable.values)) - 1 for variable in grammar.variables)
        masks: dict[Item, dict[str, tuple[tuple[int, int], ...]]] = {}
        # Per form: the positions that bind something, with their word -> ((axis, mask), ...) tables.
        self._bound: dict[Form, tuple[tuple[int, dict[str, tuple[tuple[int, int], ...]]], ...]] = {}
        # Per form: the values of the slot's given variable that can draw it, all ones where nothing is given.
        self._guard: dict[Form, int] = {}
        for sentence in grammar.sentences:
            for form in sentence.forms:
                for item in form.items:
                    if item.axes and item not in masks:
                        masks[item] = item.masks()
                self._bound[form] = tuple((k, masks[item]) for k, item in enumerate(form.items) if item.axes)
                self._guard[form] = sum(1 << g for g, count in enumerate(form.counts) if count)

    def check(self, text: str) -> Check:
        """Parse `text` and report; among several readings, the one with the fewest conflicting mentions."""
        words = text.split(" ")
        readings, reached = self._readings(words)
        if not readings:
            found = repr(words[reached]) if reached < len(words) else "the end of the text"
            return Check(False, False, (f"grammar: {found} at word {reached + 1} fits no sentence",))
        possible = [masks for masks in (self._masks(words, reading) for reading in readings) if all(masks)]
        if possible:
            # A variable is settled when every consistent reading settles it alike.
            masks = (
                possible[0]
                if len(possible) == 1
                else [functools.reduce(operator.or_, m) for m in zip(*possible, strict=True)]
            )
            return Check(True, True, (), self._plot(masks))
        conflicts = [self._conflicts(words, reading) for reading in readings]
        broken, plot = min(conflicts, key=lambda conflict: len(conflict[0]))
        ordered = dict.fromkeys(message for _, message in sorted(broken))
        return Check(True, False, tuple(ordered), plot)

    def log_likelihood(self, text: str) -> float:
        """ln p(text) = ln Σ_derivations Σ_plots P(plot) Π_slots P(form | plot) Π_positions P(word | plot)."""
        words = text.split(" ")
        terms = [term for reading in self._readings(words)[0] for term in self._terms(words, reading)]
        # Products of at most `length` factors, each at least 1e-3: far from the underflow of a float64.
        total = math.fsum(terms)
        return math.log(total) if total > 0 else -math.inf

    def _readings(self, words: list[str]) -> tuple[list[tuple[Form, ...]], int]:
        """Every sequence of forms, one a slot, that spells `words`; and the furthest word that some parse reached."""
        reached = 0
        partial: list[tuple[int, tuple[Form, ...]]] = [(0, ())]
        for root in self._roots:
            longer = []
            for start, forms in partial:
                position, nodes = start, (root,)
                while nodes:
                    for node in nodes:
                        for form in node.forms:
                            longer.append((position, (*forms, form)))
                    if position == len(words):
                        break
                    word = words[position]
                    if len(nodes) == 1:
                        nodes = nodes[0].edges.get(word, ())
                    else:
                        nodes = tuple(child for node in nodes for child in node.edges.get(word, ()))
                    if nodes:
                        position += 1
                reached = max(reached, position)
            partial = longer
        return [forms for end, forms in partial if end == len(words)], reached

    def _masks(self, words: list[str], reading: tuple[Form, ...]) -> list[int]:
        """For each variable the values that every mention allows."""
        masks = list(self._everything)
        start = 0
        for sentence, form in zip(self.grammar.sentences, reading, strict=True):
            if sentence.given is not None:
                masks[sentence.given] &= self._guard[form]
            for offset, table in self._bound[form]:
                for axis, mask in table[words[start + offset]]:
                    masks[axis] &= mask
            start += len(form.items)
        return masks

    def _plot(self, masks: Sequence[int]) -> dict[str, str]:
        settled = zip(self.grammar.variables, masks, strict=True)
        return {v.name: v.values[mask.bit_length() - 1] for v, mask in settled if mask and not mask & (mask - 1)}

    def _mentions(self, words: list[str], reading: tuple[Form, ...]) -> list[list[_Mention]]:
        """For each variable its mentions, in reading order."""
        mentions: list[list[_Mention]] = [[] for _ in self.grammar.variables]
        start = 0
        for sentence, form in zip(self.grammar.sentences, reading, strict=True):
            for offset, table in self._bound[form]:
                position = start + offset
                for axis, mask in table[words[position]]:
                    mentions[axis].append(_Mention(position, words[position], form.items[offset].label, mask))
            start += len(form.items)
            if sentence.given is not None and self._guard[form] != self._everything[sentence.given]:
                variable = self.grammar.variables[sentence.given]
                kind = f"{'/'.join(_values(variable.values, self._guard[form]))} {sentence.name}"
                mentions[sentence.given].append(_Mention(start - 1, kind, variable.name, self._guard[form]))
        return mentions

    def _conflicts(self, words: list[str], reading: tuple[Form, ...]) -> tuple[list[tuple[int, str]], dict[str, str]]:
        """The fewest mentions to blame, as (position, message), and the plot that the others tell."""
        blamed: list[tuple[int, str]] = []
        masks = []
        for variable, everything, mentions in zip(
            self.grammar.variables, self._everything, self._mentions(words, reading), strict=True
        ):
            # The value that most mentions allow; earlier mentions win ties, since a reader believes what came first.
            votes = [
                (sum(m.mask >> v & 1 for m in mentions), [m.mask >> v & 1 for m in mentions], v)
                for v in range(len(variable.values))
            ]
            best = max((count, pattern) for count, pattern, _ in votes)
            masks.append(sum(1 << v for count, pattern, v in votes if (count, pattern) == best))
            if best[0] == len(mentions):
                continue
            believed = variable.values[masks[-1].bit_length() - 1]
            named = [m for m in mentions if m.mask & masks[-1] and m.word in variable.values]
            name = named[0].word if named else "/".join(_values(variable.values, masks[-1] & everything))
            since = min((m.position for m in mentions if m.mask & masks[-1]), default=0)
            for mention in mentions:
                if mention.mask & masks[-1]:
                    continue
                if variable.name == TENSE:
                    (other,) = _values(variable.values, mention.mask)
                    first, then = (other, believed) if mention.position < since else (believed, other)
                    message = f"{variable.name}: {first} then {then}"
                elif mention.word in variable.values:
                    first, then = (mention.word, name) if mention.position < since else (name, mention.word)
                    message = f"{variable.name}: {first} became {then}"
                else:
                    message = f"{mention.label}: {mention.word} for {name}"
                blamed.append((mention.position, message))
        return blamed, self._plot(masks)

    def _terms(self, words: list[str], reading: tuple[Form, ...]) -> Iterator[float]:
        """P(plot, derivation, words) for each assignment of the mentioned variables that the words allow."""
        masks = self._masks(words, reading)
        if not all(masks):
            return
        constant = 1.0
        factors: list[tuple[tuple[int, ...], Item | None, str, tuple[float, ...]]] = []
        axes: set[int] = set()
        start = 0
        for sentence, form in zip(self.grammar.sentences, reading, strict=True):
            shares = tuple(count / total for count, total in zip(form.counts, sentence.totals, strict=True))
            if sentence.given is None:
                constant *= shares[0]
            else:
                factors.append(((sentence.given,), None, "", shares))
                axes.add(sentence.given)
            for offset, item in enumerate(form.items):
                if item.axes:
                    factors.append((item.axes, item, words[start + offset], ()))
                    axes.update(item.axes)
                else:
                    constant *= item.probability(words[start + offset], ())
            start += len(form.items)
        # Variables without a mention sum to one and stay out of the product.
        order = sorted(axes)
        allowed = [[v for v in range(masks[axis].bit_length()) if masks[axis] >> v & 1] for axis in order]
        priors = [self.grammar.variables[axis].prior for axis in order]
        for values in itertools.product(*allowed):
            plot = dict(zip(order, values, strict=True))
            term = constant * math.prod(prior[v] for prior, v in zip(priors, values, strict=True))
            for where, item, word, shares in factors:
                at = [plot[axis] for axis in where]
                term *= shares[at[0]] if item is None else item.probability(word, at)
            yield term


def _values(values: tuple[str, ...], mask: int) -> list[str]:
    return [value for v, value in enumerate(values) if mask >> v & 1]
