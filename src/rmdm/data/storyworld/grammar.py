"""The notation of a storyworld and its compiled form.

A *world* (`worlds.py`) is a hidden plot, independent variables with integer weights, and an ordered list of sentence
slots. A slot draws one of its shapes, a shape is a template of words split by spaces:

- `kite` is that word; `found|saw` is a free choice, a word named twice is twice as likely;
- `went/goes` follows the tense (past/present), also inside a choice: `went/goes|ran/runs`;
- `{place}` is the value of a plot variable, `{sand}` a word that a plot variable decides (`World.words`);
- `[ ... ]` is there half of the time.

Compiling writes every optional out, so that a `Form` is a fixed number of positions, and each position (`Item`) is a
word distribution given at most two plot variables. That is all the likelihood, the automaton and the checker need.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b

TENSE = "tense"


@dataclass(frozen=True)
class Words:
    """Words that one plot variable decides: for each of its values a choice in template notation."""

    variable: str
    table: Mapping[str, str]
    label: str = ""
    """Name of the constraint in the checker's messages; default the variable's."""


@dataclass(frozen=True)
class Shape:
    """One way to write a sentence, drawn in proportion to `weight` where the slot's `given` variable is in `when`."""

    weight: int
    template: str
    when: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A place in the story that holds one sentence."""

    name: str
    shapes: tuple[Shape, ...]
    given: str | None = None


@dataclass(frozen=True)
class World:
    """A storyworld as it is written down: row length with the end token, plot, word tables, sentences."""

    length: int
    variables: Mapping[str, Mapping[str, int]]
    words: Mapping[str, Words]
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Variable:
    """A plot variable: P(value) = weight / sum of weights, independent of the others."""

    name: str
    values: tuple[str, ...]
    weights: tuple[int, ...]

    @property
    def prior(self) -> tuple[float, ...]:
        """P(value), in the order of `values`."""
        return tuple(weight / sum(self.weights) for weight in self.weights)


@dataclass(frozen=True)
class Item:
    """One position of a sentence: uniform over `cells[k]`, k the index (row-major) of the values of `axes`."""

    label: str = field(compare=False)
    axes: tuple[int, ...]
    dims: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]

    def words(self) -> tuple[str, ...]:
        """Every word that can stand here, for any plot."""
        return tuple(dict.fromkeys(word for cell in self.cells for word in cell))

    @property
    def fixed(self) -> str | None:
        """The word, where it is always the same one."""
        return self.cells[0][0] if not self.axes and len(self.cells[0]) == 1 else None

    def cell(self, values: Sequence[int]) -> tuple[str, ...]:
        """The words, each as often as its weight, for these values of `axes`."""
        index = 0
        for dim, value in zip(self.dims, values, strict=True):
            index = index * dim + value
        return self.cells[index]

    def probability(self, word: str, values: Sequence[int]) -> float:
        """P(word | values of `axes`)."""
        cell = self.cell(values)
        return cell.count(word) / len(cell)

    def masks(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """For each word the plots that allow it, as `(axis, bit set of values)` pairs whose product they are.

        A word whose plots are no such product would need joint constraints in the checker, so it is refused.
        """
        masks = {}
        for word in self.words():
            allowed = [
                values
                for values, cell in zip(itertools.product(*map(range, self.dims)), self.cells, strict=True)
                if word in cell
            ]
            sides = [sorted({values[k] for values in allowed}) for k in range(len(self.axes))]
            if math.prod(map(len, sides)) != len(allowed):
                raise ValueError(f"{word!r} in {self.label!r} stands for plots that are no product of value sets")
            masks[word] = tuple((axis, sum(1 << v for v in side)) for axis, side in zip(self.axes, sides, strict=True))
        return masks


@dataclass(frozen=True, eq=False)
class Form:
    """A sentence of fixed length; `counts[g]` is its weight when the slot's given variable has value g."""

    items: tuple[Item, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sentence:
    """A compiled slot: P(form | g) = form.counts[g] / totals[g], with g = 0 where nothing is given."""

    name: str
    given: int | None
    forms: tuple[Form, ...]
    totals: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled world. `vocabulary` is sorted; `fingerprint` changes with any change of the law it describes."""

    length: int
    variables: tuple[Variable, ...]
    sentences: tuple[Sentence, ...]
    vocabulary: tuple[str, ...]
    fingerprint: str


def compile_world(world: World, version: int) -> Grammar:
    """Write out the options of every template and check that each story fits in `length - 1` words."""
    variables = tuple(Variable(name, tuple(v), tuple(v.values())) for name, v in world.variables.items())
    compiler = _Compiler(world, variables)
    sentences = tuple(compiler.sentence(slot) for slot in world.slots)
    longest = sum(max(len(form.items) for form in sentence.forms) for sentence in sentences)
    if longest >= world.length:
        raise ValueError(f"the longest story has {longest} words, length={world.length} holds {world.length - 1}")
    items = {item for sentence in sentences for form in sentence.forms for item in form.items}
    vocabulary = tuple(sorted({word for item in items for word in item.words()}))
    law = [
        version,
        world.length,
        [(v.name, v.values, v.weights) for v in variables],
        [(s.given, [(f.counts, [(i.axes, i.cells) for i in f.items]) for f in s.forms]) for s in sentences],
    ]
    fingerprint = blake2b(json.dumps(law).encode(), digest_size=8).hexdigest()
    return Grammar(world.length, variables, sentences, vocabulary, fingerprint)


class _Compiler:
    """Templates to items; equal items become one object, so that later tables are shared."""

    def __init__(self, world: World, variables: tuple[Variable, ...]):
        self.world = world
        self.variables = variables
        self.axis = {variable.name: k for k, variable in enumerate(variables)}
        self.interned: dict[Item, Item] = {}

    def sentence(self, slot: Slot) -> Sentence:
        given = None if slot.given is None else self.axis[slot.given]
        values = ("",) if given is None else self.variables[given].values
        forms: list[tuple[tuple[Item, ...], list[Fraction]]] = []
        for shape in slot.shapes:
            unknown = set(shape.when) - set(values)
            if unknown:
                raise ValueError(f"{slot.name}: {sorted(unknown)} are no values of {slot.given}")
            options = list(_options(shape.template.split()))
            share = Fraction(shape.weight, len(options))
            weights = [share if not shape.when or value in shape.when else Fraction(0) for value in values]
            forms += [(tuple(self.item(token) for token in option), weights) for option in options]
        scale = math.lcm(*(weight.denominator for _, weights in forms for weight in weights))
        compiled = tuple(Form(items, tuple(int(weight * scale) for weight in weights)) for items, weights in forms)
        totals = tuple(sum(form.counts[g] for form in compiled) for g in range(len(values)))
        return Sentence(slot.name, given, compiled, totals)

    def item(self, token: str) -> Item:
        name = token[1:-1] if token.startswith("{") else ""
        if not name:
            item = self.bound("", None, {"": token})
        elif name in self.world.words:
            words = self.world.words[name]
            item = self.bound(words.label or words.variable, words.variable, words.table)
        else:
            item = self.bound(name, name, {value: value for value in self.variables[self.axis[name]].values})
        return self.interned.setdefault(item, item)

    def bound(self, label: str, variable: str | None, table: Mapping[str, str]) -> Item:
        values = ("",) if variable is None else self.variables[self.axis[variable]].values
        if set(values) != set(table):
            raise ValueError(f"{label}: words for {sorted(table)}, values are {sorted(values)}")
        tensed = any("/" in choice for choice in table.values())
        cells = []
        for value in values:
            forms = [word.split("/") for word in table[value].split("|")]
            for tense in range(2 if tensed else 1):
                cells.append(tuple(form[min(tense, len(form) - 1)] for form in forms))
        axes = [] if variable is None else [self.axis[variable]]
        if tensed:
            axes.append(self.axis[TENSE])
        if axes != sorted(axes):
            raise ValueError(f"{label}: {TENSE} must be declared after {variable}, cells are row-major in that order")
        return Item(label, tuple(axes), tuple(len(self.variables[axis].values) for axis in axes), tuple(cells))


def _options(tokens: list[str]) -> Iterator[list[str]]:
    """The template with and without each of its `[ ... ]` groups."""
    if "[" not in tokens:
        yield tokens
        return
    start, stop = tokens.index("["), tokens.index("]")
    for rest in _options(tokens[stop + 1 :]):
        yield tokens[:start] + rest
        yield tokens[:start] + tokens[start + 1 : stop] + rest
