"""`Storyworld`: the generator and one place to ask for likelihoods, marginals and checks."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rmdm.data.storyworld.automaton import Automaton
from rmdm.data.storyworld.checker import Check, Checker
from rmdm.data.storyworld.grammar import Form, Grammar, Sentence, compile_world
from rmdm.data.storyworld.worlds import WORLDS
from rmdm.errors import DataError, nearest

VERSION = 1
"""Version of the frozen grammars and of the stream that stories are drawn from."""

SIZES = ("tiny", "mini", "full")

_RANDOM_BITS = 512

_T = TypeVar("_T")

# A position of a form in the generator: fixed text, or a choice among cells[plot[a] * stride + plot[b]].
_Step = str | tuple[tuple[tuple[str, ...], ...], int, int, int]


class Storyworld:
    """A frozen law over short stories: words split by single spaces, punctuation apart.

    A row of `length` positions holds a story's words, then `<eos>`, then `<pad>`.
    """

    def __init__(self, size: str):
        if size not in SIZES:
            raise DataError(f"storyworld size {size!r} does not exist; {nearest(size, SIZES)}")
        self.size = size
        self._grammar: Grammar = compile_world(WORLDS[size], VERSION)
        self._checker = Checker(self._grammar)
        self.length: int = self._grammar.length
        self.vocabulary: tuple[str, ...] = self._grammar.vocabulary
        self.fingerprint: str = self._grammar.fingerprint
        self.plot_variables: tuple[str, ...] = tuple(variable.name for variable in self._grammar.variables)
        self._urns = [_urn(range(len(v.values)), v.weights) for v in self._grammar.variables]
        # Per sentence: its given variable, and for each value of it the urn of generator programs.
        blank = len(self._urns)
        self._programs: list[tuple[int, list[list[list[_Step]]]]] = []
        for sentence in self._grammar.sentences:
            programs = [_program(form, blank) for form in sentence.forms]
            urns = [_urn(programs, [form.counts[g] for form in sentence.forms]) for g in range(len(sentence.totals))]
            self._programs.append((blank if sentence.given is None else sentence.given, urns))
        bits = sum(math.log2(len(urn)) for urn in self._urns)
        bits += sum(max(math.log2(len(urn)) for urn in urns) for _, urns in self._programs)
        bits += sum(max(_choice_bits(form) for form in sentence.forms) for sentence in self._grammar.sentences)
        if bits > _RANDOM_BITS - 64:
            # Draws are remainders of one large integer; the spare 64 bits keep their bias below 2^-64.
            raise ValueError(f"a {size} story may use {bits:.0f} of {_RANDOM_BITS} random bits")

    def story(self, seed: int, index: int) -> str:
        """Story number `index` of the stream `seed`: a function of (size, seed, index) alone, on every platform."""
        plot, random = self._draw_plot(seed, index)
        parts: list[str] = []
        for given, urns in self._programs:
            urn = urns[plot[given]]
            random, drawn = divmod(random, len(urn))
            for step in urn[drawn]:
                if isinstance(step, str):
                    parts.append(step)
                    continue
                cells, a, stride, b = step
                cell = cells[plot[a] * stride + plot[b]]
                if len(cell) == 1:
                    parts.append(cell[0])
                else:
                    random, drawn = divmod(random, len(cell))
                    parts.append(cell[drawn])
        return " ".join(parts)

    def plot(self, seed: int, index: int) -> dict[str, str]:
        """The hidden plot behind `story(seed, index)`."""
        plot, _ = self._draw_plot(seed, index)
        return {v.name: v.values[value] for v, value in zip(self._grammar.variables, plot, strict=False)}

    def log_likelihood(self, text: str) -> float:
        """Exact ln p(text), summed over all derivations; -inf where the text is impossible."""
        return self._checker.log_likelihood(text)

    def marginals(self, words: Sequence[str | None]) -> NDArray[np.float64]:
        """Exact p(x_i | x_U) as an array (length, len(vocabulary) + 2); columns: vocabulary, `<eos>`, `<pad>`.

        `words` is a whole row, None where masked; rows of given positions are one-hot. Raises DataError where the
        given words cannot stand together in any row.
        """
        if len(words) != self.length:
            raise DataError(f"marginals needs a row of length={self.length}, got {len(words)} words; mask with None")
        automaton = self._automaton
        unknown = next((word for word in words if word is not None and word not in automaton.ids), None)
        if unknown is not None:
            raise DataError(f"{unknown!r} is no word of storyworld {self.size}; {nearest(unknown, automaton.ids)}")
        ids = [automaton.masked if word is None else automaton.ids[word] for word in words]
        marginals = automaton.marginals(np.array(ids, dtype=np.intp))
        if marginals is None:
            given = " ".join("_" if word is None else word for word in words)
            raise DataError(f"no {self.size} story has the given words {given!r}; mask the ones that disagree")
        return marginals

    def check(self, text: str) -> Check:
        """Parse `text`: grammatical, consistent, which constraints break, and the plot that can be read from it."""
        return self._checker.check(text)

    def enumerate(self) -> Iterator[tuple[str, float]]:
        """Every text of the tiny world with its probability, by brute force over plots, forms and choices."""
        if self.size != "tiny":
            raise DataError(f"storyworld {self.size} has too many texts to enumerate; use size 'tiny'")
        law: dict[str, Fraction] = {}
        variables = self._grammar.variables
        for plot in itertools.product(*(range(len(v.values)) for v in variables)):
            prior = math.prod(Fraction(v.weights[k], sum(v.weights)) for v, k in zip(variables, plot, strict=True))
            stories = {"": Fraction(prior)}
            for sentence in self._grammar.sentences:
                g = 0 if sentence.given is None else plot[sentence.given]
                endings = _spellings(sentence, g, plot)
                longer: dict[str, Fraction] = {}
                for start, p in stories.items():
                    for end, q in endings.items():
                        text = f"{start} {end}" if start else end
                        longer[text] = longer.get(text, Fraction(0)) + p * q
                stories = longer
            for text, probability in stories.items():
                law[text] = law.get(text, Fraction(0)) + probability
        for text, probability in law.items():
            yield text, float(probability)

    @functools.cached_property
    def _automaton(self) -> Automaton:
        return Automaton(self._grammar)

    def _draw_plot(self, seed: int, index: int) -> tuple[list[int], int]:
        """The values of the plot, a zero behind them, and what is left of the random integer."""
        key = f"storyworld/{VERSION}/{self.size}/{seed}/{index}".encode()
        random = int.from_bytes(blake2b(key, digest_size=_RANDOM_BITS // 8).digest(), "little")
        plot = []
        for urn in self._urns:
            random, drawn = divmod(random, len(urn))
            plot.append(urn[drawn])
        plot.append(0)
        return plot, random


def _spellings(sentence: Sentence, g: int, plot: Sequence[int]) -> dict[str, Fraction]:
    """Every wording of a sentence under one plot, with its probability."""
    spellings: dict[str, Fraction] = {}
    for form in sentence.forms:
        cells = [item.cell([plot[axis] for axis in item.axes]) for item in form.items]
        ways = math.prod(map(len, cells))
        for words in itertools.product(*cells):
            text = " ".join(words)
            share = Fraction(form.counts[g], sentence.totals[g] * ways)
            spellings[text] = spellings.get(text, Fraction(0)) + share
    return {text: p for text, p in spellings.items() if p}


def _urn(values: Iterable[_T], weights: Sequence[int]) -> list[_T]:
    """Each value as often as its weight, so that a uniform draw is a weighted one; weights in lowest terms."""
    divisor = math.gcd(*weights)
    return [value for value, weight in zip(values, weights, strict=True) for _ in range(weight // divisor)]


def _program(form: Form, blank: int) -> list[_Step]:
    """The steps that write a form; runs of fixed words are one step. `blank` is a plot entry that is always 0."""
    steps: list[_Step] = []
    for item in form.items:
        if item.fixed is not None:
            if steps and isinstance(steps[-1], str):
                steps[-1] += f" {item.fixed}"
            else:
                steps.append(item.fixed)
            continue
        a, b = (*item.axes, blank, blank)[:2]
        steps.append((item.cells, a, item.dims[1] if len(item.dims) == 2 else 1, b))
    return steps


def _choice_bits(form: Form) -> float:
    return sum(max(math.log2(len(cell)) for cell in item.cells) for item in form.items)


@functools.cache
def storyworld(size: str) -> Storyworld:
    """The storyworld of a size (`SIZES`), built once."""
    return Storyworld(size)
