"""Exact conditional marginals p(x_i | x_U) of a row, for any set U of given positions.

The row is a chain of sentences: sentence s starts at position a and its form, of n words, ends it at a + n. With the
plot variables as axes, the given words inside sentence s contribute

    F_s[n][a, vars_s] = Σ_{forms of n words} P(form | plot) Π_{j: x_{a+j} given} P(x_{a+j} | plot)

and the sum over plots and forms is a forward pass α and a backward pass β over s. They carry the start position and
only the *live* variables, those met both before and after; the others are summed out where they end. A sentence's
posterior is its own factor times what lies outside it, Σ α_s[a] β_{s+1}[a + n] over the variables it does not touch,
and each masked position's words follow from it.

Given words usually settle most variables and starts, so each row first drops what they rule out. A row's probability
is a product of some hundred factors above 1e-3: float64 needs neither logarithms nor scaling.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmdm.data.storyworld.grammar import Form, Grammar, Item

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Axes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Emission:
    """An item as arrays: `evidence[word id]` over its cells (masked: ones), and P(word | cell) for its own words."""

    evidence: Array
    columns: NDArray[np.intp]
    probability: Array


@dataclass(frozen=True, eq=False)
class _Group:
    """The positions of a form that depend on the same variables; `base` [1, axes] holds P(form | given), else ones."""

    axes: Axes
    base: Array
    items: tuple[tuple[int, int], ...]
    """(offset in the form, index of the item)."""


@dataclass(frozen=True, eq=False)
class _Template:
    """A form ready for numpy."""

    size: int
    axes: Axes
    groups: tuple[_Group, ...]


@dataclass(frozen=True, eq=False)
class _Stage:
    """A sentence in the chain: possible starts `first..last`, variables it touches, meets first, and finds alive."""

    first: int
    last: int
    axes: Axes
    born: Axes
    live: Axes
    templates: tuple[_Template, ...]


class Automaton:
    """The law of fixed-length rows: words, `<eos>`, `<pad>`; ids are vocabulary order, then these two, then masked."""

    def __init__(self, grammar: Grammar):
        self.length = grammar.length
        self.ids = {word: k for k, word in enumerate((*grammar.vocabulary, "<eos>", "<pad>"))}
        self.eos, self.pad, self.masked = len(self.ids) - 2, len(self.ids) - 1, len(self.ids)
        self.priors = [np.array(variable.prior) for variable in grammar.variables]
        self.emissions: list[_Emission] = []
        self._numbers: dict[Item, int] = {}
        templates = []
        for sentence in grammar.sentences:
            given = () if sentence.given is None else (sentence.given,)
            totals = np.array(sentence.totals)
            templates.append(tuple(self._template(form, given, form.counts / totals) for form in sentence.forms))
        touched = [{axis for template in forms for axis in template.axes} for forms in templates]
        self.stages: list[_Stage] = []
        first = last = 0
        seen: set[int] = set()
        for s, forms in enumerate(templates):
            live, born = seen & set().union(*touched[s:]), touched[s] - seen
            self.stages.append(_Stage(first, last, _sorted(touched[s]), _sorted(born), _sorted(live), forms))
            seen |= touched[s]
            first += min(form.size for form in forms)
            last += max(form.size for form in forms)
        # The end of the story is one more stage without words.
        self.stages.append(_Stage(first, last, (), (), (), ()))

    def marginals(self, ids: NDArray[np.intp]) -> Array | None:
        """p(x_i | x_U) as (length, words + 2) for a row of ids, `masked` where not given; None where impossible."""
        row = _Row(self, ids)
        return row.marginals() if row.left else None

    def _template(self, form: Form, given: Axes, share: Array) -> _Template:
        groups: dict[Axes, list[tuple[int, int]]] = {given: []}
        dims: dict[Axes, Axes] = {given: share.shape if given else ()}
        for offset, item in enumerate(form.items):
            if item not in self._numbers:
                self._numbers[item] = len(self.emissions)
                self.emissions.append(self._emission(item))
            groups.setdefault(item.axes, []).append((offset, self._numbers[item]))
            dims[item.axes] = item.dims
        bases = {axes: np.ones((1, *dims[axes])) for axes in groups}
        bases[given] = share.reshape(1, *dims[given])
        ordered = tuple(_Group(axes, bases[axes], tuple(items)) for axes, items in sorted(groups.items()))
        return _Template(len(form.items), _sorted({axis for axes in groups for axis in axes}), ordered)

    def _emission(self, item: Item) -> _Emission:
        words = item.words()
        probability = np.array([[cell.count(word) / len(cell) for word in words] for cell in item.cells])
        columns = np.array([self.ids[word] for word in words], dtype=np.intp)
        evidence = np.zeros((len(self.ids) + 1, len(item.cells)))
        evidence[columns] = probability.T
        evidence[self.masked] = 1.0
        return _Emission(evidence.reshape(-1, *item.dims), columns, probability.reshape(*item.dims, -1))


class _Row:
    """One row's given words: what they leave possible, and the two passes over it."""

    def __init__(self, automaton: Automaton, ids: NDArray[np.intp]):
        self.automaton = automaton
        self.ids = ids
        evidence = [emission.evidence[ids] for emission in automaton.emissions]
        # parts[s][t][g]: weight [start, group axes] of the words in group g of template t.
        self.parts = [
            [[_given(group, evidence, stage) for group in template.groups] for template in stage.templates]
            for stage in automaton.stages
        ]
        eos, pad = np.isin(ids, (automaton.eos, automaton.masked)), np.isin(ids, (automaton.pad, automaton.masked))
        final = automaton.stages[-1]
        self.ends = np.array([float(eos[end] and pad[end + 1 :].all()) for end in range(final.first, final.last + 1)])
        self.allowed: list[Bools] = [np.ones(len(prior), dtype=np.bool_) for prior in automaton.priors]
        self.left = self._prune()
        if self.left:
            self._cut()

    def marginals(self) -> Array | None:
        """What `Automaton.marginals` promises, for the starts and values that are left."""
        automaton, count = self.automaton, len(self.automaton.stages) - 1
        weights = [self._weights(s) for s in range(count)]
        factors = [self._factors(s, weights[s]) for s in range(count)]
        alphas = [np.ones((1, *(1 for _ in automaton.stages[0].live)))]
        for s in range(count):
            alphas.append(self._forward(s, alphas[s], factors[s]))
        marginals = np.zeros((automaton.length, len(automaton.ids)))
        end = alphas[-1] * self.ends
        if not end.any():
            return None
        for position, mass in enumerate(end, self.starts[-1].start):
            marginals[position, automaton.eos] += mass
            marginals[position + 1 :, automaton.pad] += mass
        beta = self.ends
        for s in reversed(range(count)):
            self._collect(s, weights[s], alphas[s], beta, marginals)
            beta = self._backward(s, beta, factors[s])
        # Rounding may leave a certain word a few 1e-15 above one.
        marginals = np.minimum(marginals / end.sum(), 1.0)
        given = self.ids != automaton.masked
        marginals[given] = 0.0
        marginals[given, self.ids[given]] = 1.0
        return marginals

    def _prune(self) -> bool:
        """Drop the values and starts that no reading of the given words allows; False where nothing is left.

        Sound, not complete: what is dropped has probability zero, what stays may still turn out to have.
        """
        stages = self.automaton.stages
        while True:
            fits = [
                [self._support(template, parts) for template, parts in zip(stage.templates, parts, strict=True)]
                for stage, parts in zip(stages, self.parts, strict=True)
            ]
            ahead: list[Bools] = [np.ones(1, dtype=np.bool_)]
            for s, stage in enumerate(stages[:-1]):
                reached = np.zeros(stages[s + 1].last - stages[s + 1].first + 1, dtype=np.bool_)
                for template, (fit, _) in zip(stage.templates, fits[s], strict=True):
                    at = stage.first + template.size - stages[s + 1].first
                    reached[at : at + len(fit)] |= fit & ahead[s]
                ahead.append(reached)
            behind = ahead[-1] & (self.ends > 0)
            self.reached = [behind]
            allowed = [values.copy() for values in self.allowed]
            for s in reversed(range(len(stages) - 1)):
                stage, before = stages[s], np.zeros_like(ahead[s])
                values = {axis: np.zeros_like(self.allowed[axis]) for axis in stage.axes}
                for template, (fit, support) in zip(stage.templates, fits[s], strict=True):
                    at = stage.first + template.size - stages[s + 1].first
                    read = fit & ahead[s] & behind[at : at + len(fit)]
                    before |= read
                    if read.any():
                        for axis in stage.axes:
                            values[axis] |= support[axis][read].any(axis=0) if axis in support else True
                for axis in stage.axes:
                    allowed[axis] &= values[axis]
                behind = before
                self.reached.insert(0, behind)
            if not behind.any() or not all(values.any() for values in allowed):
                return False
            changed = any((new != old).any() for new, old in zip(allowed, self.allowed, strict=True))
            self.allowed = allowed
            if not changed:
                return True

    def _support(self, template: _Template, parts: Sequence[Array]) -> tuple[Bools, dict[int, Bools]]:
        """The starts a template fits at, and [start, value] for each of its variables, judged one group at a time."""
        fit = np.ones(len(parts[0]), dtype=np.bool_)
        support: dict[int, Bools] = {}
        for group, part in zip(template.groups, parts, strict=True):
            positive = part > 0
            for k, axis in enumerate(group.axes):
                positive &= self.allowed[axis].reshape(-1, *(1 for _ in group.axes[k + 1 :]))
            for k, axis in enumerate(group.axes):
                values = _any(positive, tuple(j + 1 for j in range(len(group.axes)) if j != k))
                support[axis] = support[axis] & values if axis in support else values
            fit &= _any(positive, tuple(range(1, positive.ndim)))
        for values in support.values():
            fit &= _any(values, (1,))
        return fit, support

    def _cut(self) -> None:
        """Keep the reachable starts of each stage and the allowed values of each variable."""
        self.kept = [np.flatnonzero(values) for values in self.allowed]
        self.priors = [prior[kept] for prior, kept in zip(self.automaton.priors, self.kept, strict=True)]
        self.starts: list[range] = []
        for s, stage in enumerate(self.automaton.stages):
            reached = np.flatnonzero(self.reached[s])
            self.starts.append(range(stage.first + reached[0], stage.first + reached[-1] + 1))
            window = np.arange(reached[0], reached[-1] + 1)
            for template, parts in zip(stage.templates, self.parts[s], strict=True):
                for g, group in enumerate(template.groups):
                    parts[g] = parts[g][np.ix_(window, *(self.kept[axis] for axis in group.axes))]
        skipped = self.starts[-1][0] - self.automaton.stages[-1].first
        self.ends = self.ends[skipped : skipped + len(self.starts[-1])]

    def _dims(self, axes: Axes) -> Iterator[int]:
        return (len(self.kept[axis]) for axis in axes)

    def _spread(self, array: Array, axes: Axes, target: Axes) -> Array:
        """View `array` [start, axes] as [start, target], of size one along what it does not depend on."""
        return array.reshape(len(array), *(len(self.kept[axis]) if axis in axes else 1 for axis in target))

    def _weights(self, s: int) -> list[Array | None]:
        """For each template its weight [start, template.axes], or None where no start can hold it."""
        weights: list[Array | None] = []
        for template, parts in zip(self.automaton.stages[s].templates, self.parts[s], strict=True):
            if not all(part.any() for part in parts):
                weights.append(None)
                continue
            spread = [self._spread(p, g.axes, template.axes) for g, p in zip(template.groups, parts, strict=True)]
            # Small groups first, so that the array grows late.
            weights.append(functools.reduce(operator.mul, sorted(spread, key=np.size)))
        return weights

    def _born(self, s: int) -> Array:
        """Prior of the variables that stage s meets first, [1, stage.axes]."""
        stage = self.automaton.stages[s]
        priors = [self._spread(self.priors[axis][None], (axis,), stage.axes) for axis in stage.born]
        return functools.reduce(operator.mul, priors, np.ones((1, *(1 for _ in stage.axes))))

    def _factors(self, s: int, weights: list[Array | None]) -> dict[int, Array]:
        """F_s by form length, times the prior of the variables met first."""
        stage, factors = self.automaton.stages[s], {}
        for template, weight in zip(stage.templates, weights, strict=True):
            if weight is not None:
                if template.size not in factors:
                    factors[template.size] = np.zeros((len(self.starts[s]), *self._dims(stage.axes)))
                factors[template.size] += self._spread(weight, template.axes, stage.axes)
        born = self._born(s)
        return {size: factor * born for size, factor in factors.items()}

    def _window(self, s: int, size: int) -> tuple[slice, slice]:
        """Starts of stage s, and of stage s + 1, that a form of `size` words connects."""
        here, there = self.starts[s], self.starts[s + 1]
        first, last = max(here[0], there[0] - size), min(here[-1], there[-1] - size)
        count = max(0, last - first + 1)
        return slice(first - here[0], first - here[0] + count), slice(
            first + size - there[0], first + size - there[0] + count
        )

    def _forward(self, s: int, alpha: Array, factors: dict[int, Array]) -> Array:
        stage, live = self.automaton.stages[s], self.automaton.stages[s + 1].live
        result = np.zeros((len(self.starts[s + 1]), *self._dims(live)))
        for size, factor in factors.items():
            here, there = self._window(s, size)
            result[there] += _contract(alpha[here], stage.live, factor[here], stage.axes, live)
        return result

    def _backward(self, s: int, beta: Array, factors: dict[int, Array]) -> Array:
        stage, live = self.automaton.stages[s], self.automaton.stages[s + 1].live
        result = np.zeros((len(self.starts[s]), *self._dims(stage.live)))
        for size, factor in factors.items():
            here, there = self._window(s, size)
            result[here] += _contract(beta[there], live, factor[here], stage.axes, stage.live)
        return result

    def _collect(self, s: int, weights: list[Array | None], alpha: Array, beta: Array, into: Array) -> None:
        """Add to `into` the unnormalised posterior of the words at every position of every form of sentence s."""
        stage, live = self.automaton.stages[s], self.automaton.stages[s + 1].live
        born = self._born(s)
        outside: dict[int, Array] = {}
        for template, weight in zip(stage.templates, weights, strict=True):
            if weight is None:
                continue
            here, there = self._window(s, template.size)
            if here.start >= here.stop:
                continue
            if template.size not in outside:
                product = _contract(alpha[here], stage.live, beta[there], live, stage.axes)
                outside[template.size] = product * born
            joint = weight[here] * _sum_to(outside[template.size], stage.axes, template.axes)
            for group in template.groups:
                cells = _sum_to(joint, template.axes, group.axes).reshape(len(joint), -1)
                for offset, number in group.items:
                    emission = self.automaton.emissions[number]
                    kept = np.ix_(*(self.kept[axis] for axis in group.axes)) if group.axes else ...
                    words = emission.probability[kept].reshape(-1, len(emission.columns))
                    first = self.starts[s][0] + here.start + offset
                    into[first : first + len(cells), emission.columns] += cells @ words


def _given(group: _Group, evidence: list[Array], stage: _Stage) -> Array:
    """Weight [start, group.axes] of the words that a group's positions meet, for every start of the stage."""
    base = np.broadcast_to(group.base, (stage.last - stage.first + 1, *group.base.shape[1:]))
    met = (evidence[number][stage.first + offset : stage.last + offset + 1] for offset, number in group.items)
    return functools.reduce(operator.mul, met, base)


def _any(array: Bools, axes: Axes) -> Bools:
    return np.asarray(array.any(axis=axes))


def _sorted(axes: set[int]) -> Axes:
    return tuple(sorted(axes))


def _sum_to(array: Array, axes: Axes, target: Axes) -> Array:
    """Σ over the variables of array[start, axes] that are not in `target`."""
    away = tuple(k + 1 for k, axis in enumerate(axes) if axis not in target)
    return array.sum(axis=away) if away else array


def _contract(a: Array, a_axes: Axes, b: Array, b_axes: Axes, out: Axes) -> Array:
    """Σ over the variables not in `out` of a[start, a_axes] b[start, b_axes], as [start, out].

    Variables of `out` that neither array has are left with size one. As one batched matrix product: einsum walks these
    many short axes several times slower.
    """
    a, a_axes = _sum_to(a, a_axes, (*b_axes, *out)), tuple(k for k in a_axes if k in b_axes or k in out)
    b, b_axes = _sum_to(b, b_axes, (*a_axes, *out)), tuple(k for k in b_axes if k in a_axes or k in out)
    both = [k for k in a_axes if k in b_axes]
    batch, summed = [k for k in both if k in out], [k for k in both if k not in out]
    rows, columns = [k for k in a_axes if k not in both], [k for k in b_axes if k not in both]
    sizes = dict(zip(a_axes, a.shape[1:], strict=True)) | dict(zip(b_axes, b.shape[1:], strict=True))

    def matrices(array: Array, axes: Axes, left: list[int], right: list[int]) -> Array:
        order = [0, *(axes.index(k) + 1 for k in (*batch, *left, *right))]
        leading = (len(array), *(sizes[k] for k in batch))
        shape = (*leading, int(np.prod([sizes[k] for k in left])), int(np.prod([sizes[k] for k in right])))
        return array.transpose(order).reshape(shape)

    product = matrices(a, a_axes, rows, summed) @ matrices(b, b_axes, summed, columns)
    found = [*batch, *rows, *columns]
    product = product.reshape(len(a), *(sizes[k] for k in found))
    target = [k for k in out if k in found]
    product = product.transpose(0, *(found.index(k) + 1 for k in target))
    return product.reshape(len(a), *(sizes.get(k, 1) for k in out))
