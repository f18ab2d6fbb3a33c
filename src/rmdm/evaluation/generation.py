"""`rmdm eval gen`: samples at several numbers of steps under a named evaluator, with what keeps GenPPL honest.

The paper cites MDLM and SEDD for its protocol and gives no formula; their code differs. `gen_ppl` is MDLM's: exp of all
texts' nats over all their tokens. `gen_ppl_mean` is SEDD's: the mean of every text's own perplexity.

RUN/eval/gen.json holds flat rows; `row` says which kind:

- `model`: samples of one setting. `held-out`: real rows of the corpus, scored in the same way. Keys: `arm`, `process`,
  `steps`, `sampler`, `temperature`, `top_p`, `remask`, `spacing`, `guidance`, `tau`, `seed`, `latent`, `precision`
  (sampler's), `device`, `seconds`, `samples` (the file, relative to the run), `n`, `empty` (texts without a scored
  token), `tokens` (scored), `gen_ppl`, `gen_ppl_mean`, `entropy` (unigram, nats, mean over texts, of the first
  `entropy_length` of the evaluator's tokens; `entropy_n` texts are that long), `coherence` (what the beginning of a
  text tells of its end, nats a token), `distinct_1` `distinct_2` `distinct_3`, `repetition`, `self_bleu`, `copied` (of
  `copied_ngram`-grams),
  `mauve` (against `mauve_n` held-out texts), `evaluator`, `evaluator_parameters`, `evaluator_precision`,
  `evaluator_context`, `evaluator_bos`, `date`. Estimates have `_low` and `_high` beside them; null is what could not be
  measured.
- `matched`: `gen_ppl` at `entropy` by interpolation `along` temperature or tau; `between_low` and `between_high` are
  its two neighbours; null with `reach_low` and `reach_high` where the samples do not get there. `coherence` and its
  bounds are read off on straight lines between those of the same two.
"""

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rmdm.data.prepare import shard_dir
from rmdm.data.shards import TokenRows
from rmdm.errors import ConfigError, RMDMError
from rmdm.evaluation.coherence import coherence
from rmdm.evaluation.evaluator import Evaluator, Place, Scored, find_evaluator
from rmdm.evaluation.frontier import Point, matched, reach
from rmdm.evaluation.intervals import Estimate, mean, nothing, percentiles, ratio
from rmdm.evaluation.mauve import mauve
from rmdm.evaluation.record import Rows, model_identity, recorded
from rmdm.evaluation.samples import (
    Samples,
    check_steps,
    corpus_facts,
    draw,
    first_document,
    held_out,
    read_texts,
)
from rmdm.evaluation.texts import COPY_N, copied_shares, distinct, repetition, self_bleu, unigram_entropy
from rmdm.hub import load_model
from rmdm.model import Model
from rmdm.request import Request
from rmdm.samplers.settings import SamplerName
from rmdm.training.checkpoint import file_signature

SAMPLES = 256
"""Texts a row: the paper's number."""
MOST_STEPS = 1024
SHORT = 10
"""Percent of the real texts that may be shorter than the length at which entropy is measured."""
HELD_OUT = "held-out text"

Show = Callable[[str], None]
Tau = float | Literal["paper"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to draw and how to score it; None leaves a choice to the model or the corpus."""

    steps: tuple[int, ...] = ()
    """Numbers of steps; none: powers of 2 from 4 to the model's length."""
    n: int = SAMPLES
    seed: int = 0
    temperatures: tuple[float, ...] = ()
    """Points of the frontier; none: the model's own temperature."""
    taus: tuple[Tau, ...] = ()
    """The same for the latent's temperature, where there is a latent."""
    sampler: SamplerName | None = None
    top_p: float | None = None
    remask: float | None = None
    spacing: int | None = None
    guidance: float | None = None
    length: int | None = None
    """Tokens at which entropy is measured; None: what nine of ten held-out texts have."""
    entropy: float | None = None
    """Where arms are compared; None: at the entropy of held-out text."""
    bos: bool = False
    anyway: bool = False
    """Whether to score stories of storyworld too."""


class Scorer:
    """An evaluator, found and loaded when it is first needed."""

    def __init__(self, name: str | None, device: torch.device, *, bos: bool = False) -> None:
        self.asked, self.device, self.bos = name, device, bos

    @cached_property
    def place(self) -> Place:
        """Where it lies."""
        return find_evaluator(self.asked)

    @cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator itself."""
        return Evaluator(self.place, self.device, bos=self.bos)

    @cached_property
    def signature(self) -> list[Any]:
        """What tells it from others."""
        return [self.place.name, *map(file_signature, self.place.files)]


def measure_generation(runs: Sequence[Path], plan: Plan, scorer: Scorer, show: Show) -> Rows:
    """Rows of every run. What was measured before is read back as long as the weights and the plan are the same."""
    rows: Rows = []
    models = []
    for run in runs:  # all mistakes first
        model = load_model(run, scorer.device)
        refuse_stories(model, plan)
        for request in requests(model, plan):
            request.check()
            check_steps(model, request)
        models.append(model)
    if plan.taus and all(model.backbone.latent is None for model in models):
        raise ConfigError("--taus scales the noise of latents, and no model here has any; leave it out")
    show(f"gen: the evaluator is {scorer.place.name}")
    for run, model in zip(runs, models, strict=True):
        facts = model_identity(model.folder, scorer.device)
        # What the plan leaves open, the model's own settings say, which a finished run may change.
        asked = {**facts, "sample": asdict(model.config.sample)}
        asked |= {"evaluator": scorer.signature, "corpus": corpus_facts(model)}
        asked |= {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(plan).items()}
        del asked["anyway"]

        def measure(model: Model = model, run: Path = run, facts: dict[str, Any] = facts) -> Rows:
            return measure_run(model, run, facts, plan, scorer, show)

        rows += recorded(run / "eval" / "gen.json", asked, measure, show)
    return rows


def refuse_stories(model: Model, plan: Plan) -> None:
    """Stories have an exact measure, and no evaluator's opinion stands in for it unasked."""
    if model.config.data.world is not None and not plan.anyway:
        raise ConfigError(
            f"{model.config.name} writes storyworld stories, which 'rmdm eval stories' measures exactly; use that, or "
            "add --anyway for an evaluator's opinion"
        )


def requests(model: Model, plan: Plan) -> list[Request]:
    """Every setting to draw at: steps, then tau, then temperature."""
    longest = min(model.backbone.length, MOST_STEPS)
    steps = plan.steps or tuple(2**k for k in range(2, longest.bit_length()) if 2**k <= longest) or (longest,)
    if model.backbone.causal:
        steps = (model.backbone.length,)
    taus: tuple[Tau | None, ...] = (plan.taus or (None,)) if model.backbone.latent is not None else (None,)
    guidance = plan.guidance if model.backbone.latent is not None else None
    return [
        Request(
            n=plan.n, steps=count, seed=plan.seed, temperature=temperature, latent_temperature=tau,
            sampler=plan.sampler if not model.backbone.causal else None, top_p=plan.top_p, remask=plan.remask,
            spacing=plan.spacing, guidance=guidance,
        )
        for count, tau, temperature in itertools.product(steps, taus, plan.temperatures or (None,))
    ]  # fmt: skip


def measure_run(model: Model, run: Path, facts: dict[str, Any], plan: Plan, scorer: Scorer, show: Show) -> Rows:
    """All rows of one run."""
    reference, control = held_out(model, plan.n, show)
    drawn: list[Samples] = []
    for request in requests(model, plan):
        drawn.append(draw(model, request, run, facts))
        show(f"gen: {plan.n} texts of {model.config.name}, {_how(drawn[-1])}")
    sets = ([control] if control else []) + drawn
    copied = copies(model, sets, show)
    known = scorer.evaluator.score(reference.texts) if reference else None
    scored = [scorer.evaluator.score(samples.texts) for samples in sets]
    length = plan.length or typical_length(known or scored[0])
    rows: Rows = []
    for samples, one, shares in zip(sets, scored, copied, strict=True):
        where = {"arm": model.config.name if samples.settings else HELD_OUT, "process": model.config.process}
        own = model_facts(samples, run) if samples.settings else {}
        figures = text_figures(one, length, shares, known, coherence(scorer.evaluator, one.ids))
        kind = "model" if samples.settings else "held-out"
        rows.append({"row": kind, **where, **own, **figures, **scorer.evaluator.facts(), "date": today()})
    target = plan.entropy if plan.entropy is not None else rows[0]["entropy"] if control else None
    return rows + matches(rows[len(sets) - len(drawn) :], scored[len(sets) - len(drawn) :], target)


def measure_texts(files: Sequence[str], reference: str | None, plan: Plan, scorer: Scorer) -> Rows:
    """Rows of given texts, one a file; nothing is known of who wrote them, and nothing is written."""
    sets = [read_texts(file) for file in files]
    real = read_texts(reference, "--reference") if reference else None
    known = scorer.evaluator.score(real.texts) if real else None
    rows: Rows = []
    scores = [scorer.evaluator.score(samples.texts) for samples in sets]
    # One length for all, so that their entropies can be compared.
    length = plan.length or min(map(typical_length, [known] if known is not None else scores))
    for file, scored in zip(files, scores, strict=True):
        coherent = coherence(scorer.evaluator, scored.ids)
        figures = text_figures(scored, length, [None] * len(scored.ids), known, coherent)
        rows.append({"row": "texts", "arm": file, **figures, **scorer.evaluator.facts(), "date": today()})
    return rows


def copies(model: Model, sets: Sequence[Samples], show: Show) -> list[list[float | None]]:
    """What share of each text's n-grams is in the training rows, as far as these are there."""
    try:
        training = TokenRows.open(shard_dir(model.config.data), "train")
    except RMDMError as error:
        show(f"gen: no training rows to look for copies in ({error})")
        return [[None] * len(samples.texts) for samples in sets]
    said = [samples.tokens for samples in sets]
    if model.page.is_padded:
        said = [first_document(tokens, model.tokenizer.separator_id) for tokens in said]
    return copied_shares(said, training, model.tokenizer.is_control)


def typical_length(scored: Scored) -> int:
    """Tokens that nine of ten texts have, so that few are too short to have an entropy."""
    return max(1, int(np.percentile([len(ids_T) for ids_T in scored.ids], SHORT)))


def model_facts(samples: Samples, run: Path) -> dict[str, Any]:
    """How samples were drawn."""
    names = ("steps", "sampler", "temperature", "top_p", "remask", "spacing", "guidance", "tau", "seed", "latent",
             "precision")  # fmt: skip
    file = str(samples.file.relative_to(run)) if samples.file else None
    own = {name: samples.settings.get(name) for name in names}
    return {**own, "device": samples.hardware, "seconds": samples.seconds, "samples": file}


def text_figures(
    scored: Scored,
    length: int,
    copied: Sequence[float | None],
    known: Scored | None,
    coherent: Estimate | None = None,
) -> dict[str, float | int | None]:
    """All figures of some texts; `known` are real ones to compare with."""
    has_N = scored.tokens_N > 0
    nats_N, tokens_N = scored.nats_N[has_N], scored.tokens_N[has_N].astype(np.float64)
    entropies = _present([unigram_entropy(ids_T, length) for ids_T in scored.ids])
    likeness = mauve(known.feature_ND, scored.feature_ND) if known is not None else None
    return {
        "n": len(scored.ids),
        "empty": int((~has_N).sum()),
        "tokens": int(tokens_N.sum()),
        **(gen_ppl(nats_N, tokens_N).flat("gen_ppl") if has_N.any() else nothing("gen_ppl")),
        **_mean("gen_ppl_mean", np.exp(np.minimum(nats_N / tokens_N, 700))),
        **_mean("entropy", entropies),
        "entropy_length": length,
        "entropy_n": len(entropies),
        **(coherent.flat("coherence") if coherent else nothing("coherence")),
        **{f"distinct_{n}": distinct(scored.ids, n) for n in (1, 2, 3)},
        **_mean("repetition", _present([repetition(ids_T) for ids_T in scored.ids])),
        **_alone("self_bleu", np.array(self_bleu(scored.ids))),
        **_mean("copied", _present(copied)),
        "copied_ngram": COPY_N,
        **(likeness.flat("mauve") if likeness else nothing("mauve")),
        "mauve_n": len(known.ids) if likeness and known else None,
    }


def gen_ppl(nats_N: NDArray[np.float64], tokens_N: NDArray[np.float64]) -> Estimate:
    """exp(sum of nats / sum of tokens)."""
    value, value_R = ratio(nats_N, tokens_N)
    interval = percentiles(np.exp(np.minimum(value_R, 700))) if value_R is not None else None
    return Estimate(float(np.exp(min(value, 700.0))), interval)


def _present(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _mean(name: str, value_N: NDArray[np.float64]) -> dict[str, float | None]:
    return mean(value_N).flat(name) if len(value_N) else nothing(name)


def _alone(name: str, value_N: NDArray[np.float64]) -> dict[str, float | None]:
    """A mean whose texts are not independent: each is also what the others are compared with."""
    return Estimate(float(value_N.mean()), None).flat(name) if len(value_N) else nothing(name)


def matches(rows: Rows, scored: Sequence[Scored], entropy: float | None) -> Rows:
    """GenPPL at one entropy, along temperature for every tau and along tau for every temperature."""
    found: Rows = []
    if entropy is None:
        return found
    for along, other in (("temperature", "tau"), ("tau", "temperature")):
        curves: dict[tuple[Any, Any], list[int]] = {}
        for i, row in enumerate(rows):
            curves.setdefault((row["steps"], row[other]), []).append(i)
        for members in curves.values():
            if len(members) < 2 or any(rows[i][along] is None for i in members):
                continue
            points = [_point(float(rows[i][along]), scored[i], rows[i]["entropy_length"]) for i in members]
            found.append(_matched_row([rows[i] for i in members], along, other, points, entropy))
    return found


def _point(at: float, scored: Scored, length: int) -> Point:
    entropies = [unigram_entropy(ids_T, length) for ids_T in scored.ids]
    entropy_N = np.array([np.nan if entropy is None else entropy for entropy in entropies])
    return Point(at, scored.nats_N, scored.tokens_N.astype(np.float64), entropy_N)


def _matched_row(rows: Rows, along: str, other: str, points: Sequence[Point], entropy: float) -> dict[str, Any]:
    """The row of one curve."""
    row = rows[0]
    kept = ("arm", "process", "steps", "sampler", "top_p", "remask", "spacing", "guidance", "seed", "precision",
            "device", "n", "entropy_length", *(key for key in row if key.startswith("evaluator")), "date")  # fmt: skip
    found, span = matched(points, entropy), reach(points)
    low, high = found.between if found else (None, None)
    pair = [one for at in (low, high) for one in rows if at is not None and one[along] == at]
    return {
        "row": "matched",
        **{key: row[key] for key in kept},
        "along": along,
        other: row[other],
        "entropy": entropy,
        **(found.gen_ppl.flat("gen_ppl") if found else nothing("gen_ppl")),
        **{key: _read_off(pair, key, entropy) for key in nothing("coherence")},
        "between_low": low,
        "between_high": high,
        "reach_low": span[0] if span else None,
        "reach_high": span[1] if span else None,
    }


def _read_off(pair: Rows, key: str, entropy: float) -> float | None:
    """A figure at an entropy, on the straight line between two rows; None where there is no such line."""
    if len(pair) != 2 or any(row.get(key) is None for row in pair):
        return None
    a, b = pair
    share = (entropy - a["entropy"]) / (b["entropy"] - a["entropy"])
    return float(a[key] + share * (b[key] - a[key]))


def _how(samples: Samples) -> str:
    """The settings that differ from row to row, and when they were drawn, in words."""
    settings = samples.settings
    tau = f", tau {settings['tau']:.3g}" if settings.get("tau") is not None else ""
    when = "drawn before" if samples.kept else f"drawn in {samples.seconds:.1f} s"
    return f"{settings['steps']} steps, {settings['sampler']}, temperature {settings['temperature']:g}{tau}: {when}"


def today() -> str:
    """The date of a row."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
