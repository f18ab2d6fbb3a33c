"""Texts side by side: the same seed, the same number of steps, one column an arm.

Texts of `rmdm eval gen` are taken where they are; else a few are drawn here, if that takes seconds, and kept in
RUN/eval/report-samples.json.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmdm.data.shards import write_json
from rmdm.errors import RMDMError
from rmdm.evaluation.record import read_record
from rmdm.report.read import Arm, Row, parameters, read_object
from rmdm.report.table import Section, escape

TEXTS, SEED = 3, 0
STEPS = (4, 16)
LONGEST = 700
"""Characters of a text that are shown."""
BUDGET = {"cpu": 3e12, "cuda": 3e14}
"""Floating-point operations that drawing may take: some seconds."""


@dataclass(frozen=True)
class Texts:
    """Texts of one arm at one number of steps."""

    arm: Arm
    texts: Sequence[str]
    verdicts: Sequence[tuple[bool, str]]
    """Whether each is as it should be, and what is wrong; empty where nothing can be said."""
    how: str


@dataclass(frozen=True)
class SideBySide:
    """A column an arm."""

    title: str
    columns: Sequence[Texts]

    def to_html(self) -> str:
        """Cards in a grid, one below the other on a phone."""
        cards = []
        for k in range(max(len(column.texts) for column in self.columns)):
            for column in self.columns:
                if k < len(column.texts):
                    cards.append(_card(column, k))
        style = f' style="--columns:{len(self.columns)}"'
        return f"<div class=table><h3>{escape(self.title)}</h3><div class=samples{style}>{''.join(cards)}</div></div>"

    def to_markdown(self) -> str:
        """Quotes, arm by arm."""
        parts = [f"### {self.title}"]
        for column in self.columns:
            parts.append(f"**{column.arm.label}** ({column.how})")
            parts += [f"> {' '.join(_cut(text).split())}" for text in column.texts]
        return "\n\n".join(parts)


def _card(column: Texts, k: int) -> str:
    verdict = ""
    if column.verdicts:
        is_good, reason = column.verdicts[k]
        verdict = f"<p class={'good' if is_good else 'bad'}>{escape(reason)}</p>"
    label = f'<h4><span class="swatch a{column.arm.index % 8}"></span>{escape(column.arm.label)}</h4>'
    text = f"<p class=text>{escape(_cut(column.texts[k]))}</p>"
    return f"<div class=card>{label}{text}{verdict}<p class=note>text {k + 1}, {escape(column.how)}</p></div>"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " …"


def samples_section(arms: Sequence[Arm], device: str) -> tuple[Section | None, list[Arm]]:
    """The section, and the arms that texts could not be shown of."""
    known = {arm.index: kept_texts(arm) for arm in arms}
    steps = wanted_steps(arms, known)
    without: list[Arm] = []
    drawn: dict[int, dict[int, list[str]]] = {}
    for arm in arms:
        lacking = [count for count in own_steps(arm, steps) if count not in known[arm.index]]
        found = drawn_texts(arm, lacking, device) if lacking else {}
        drawn[arm.index] = known[arm.index] | found
        if not drawn[arm.index]:
            without.append(arm)
    parts = []
    for count in steps:
        columns = [
            texts_of(arm, own, drawn[arm.index][own])
            for arm in arms
            if (own := own_steps(arm, [count])[0]) in drawn[arm.index]
        ]
        if columns:
            parts.append(SideBySide(f"{count} steps", columns))
    if not parts:
        return None, without
    lead = f"Texts 1 to {TEXTS} of seed {SEED}, as they came: none was chosen. Every arm at its own settings."
    return Section("samples", "Samples side by side", lead, [*parts]), without


def own_steps(arm: Arm, steps: Sequence[int]) -> list[int]:
    """Steps as the arm takes them: an autoregressive one a token."""
    return [arm.config.data.length] if arm.is_causal else list(steps)


def wanted_steps(arms: Sequence[Arm], known: dict[int, dict[int, list[str]]]) -> list[int]:
    """Few and many of the steps that all arms have texts of; else two that are quickly drawn."""
    sets = [set(known[arm.index]) for arm in arms if not arm.is_causal and known[arm.index]]
    common = sorted(set.intersection(*sets)) if sets else []
    if len(common) > 2:
        common = [common[len(common) // 3], common[-1]]
    if common:
        return common
    most = min(arm.config.data.length for arm in arms)
    return sorted({min(count, most) for count in STEPS})


def kept_texts(arm: Arm) -> dict[int, list[str]]:
    """Texts by steps that `rmdm eval gen` drew at the arm's own settings and these weights."""
    out: dict[int, list[str]] = {}
    for facts in sorted((arm.run / "eval" / "gen-samples").glob("*.json")):
        saved = read_object(facts)
        asked: dict[str, Any] = saved.get("asked") or {}
        if is_own(arm, asked, (saved.get("settings") or {}).get("tau")):
            texts = first_texts(facts.with_suffix(".jsonl"))
            if texts:
                out[int(asked["steps"])] = texts
    return out


def is_own(arm: Arm, asked: Mapping[str, Any], tau: float | None) -> bool:
    """Whether samples were drawn as the arm does where nothing else is asked for."""
    sample = arm.config.sample
    sampler = {"sedd": "analytic", "ar": "ar"}.get(arm.config.process, "ancestral")
    own = {"temperature": sample.temperature, "seed": SEED, "top_p": 1.0, "remask": 0.0, "guidance": own_guidance(arm)}
    is_plain = all(asked.get(name, value) == value for name, value in own.items())
    is_plain = is_plain and asked.get("spacing") == (sample.spacing if asked.get("sampler") == "spaced" else None)
    is_plain = is_plain and asked.get("sampler") in (sampler, sample.sampler)
    is_plain = is_plain and (arm.tau is None or tau is None or abs(tau - arm.tau) < 1e-6)
    return is_plain and (arm.weights is None or asked.get("weights") == arm.weights)


def own_guidance(arm: Arm) -> float:
    """As the arm writes where nothing else is asked for: only who learnt to do without the latent can be led by it."""
    latent = arm.config.latent
    is_led = arm.config.process == "rmdm" and latent.dropout > 0 and not latent.independent
    return arm.config.sample.guidance if is_led else 1.0


def first_texts(path: Path) -> list[str]:
    """The first texts of a file of samples."""
    texts = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="utf-8") as lines:
        for _, line in zip(range(TEXTS), lines, strict=False):
            texts.append(str(json.loads(line)["text"]))
    return texts


def drawn_texts(arm: Arm, steps: Sequence[int], device: str) -> dict[int, list[str]]:
    """Texts drawn now, or by an earlier report; none where that would take long or there is no model."""
    from rmdm.hub import find_device, load_model
    from rmdm.request import Request

    size = parameters(arm)
    where = find_device(device)
    if arm.model is None or size is None:
        return {}
    work = 2 * size * arm.config.data.length * TEXTS * sum(steps) * (2 if own_guidance(arm) != 1 else 1)
    path = arm.run / "eval" / "report-samples.json"
    drawn_with = {"weights": arm.weights, "sample": asdict(arm.config.sample)}
    asked = {**drawn_with, "steps": list(steps), "n": TEXTS, "seed": SEED}
    rows: list[Row] | None = read_record(path, asked)
    if rows is None and work > BUDGET[where.type]:
        return {}
    if rows is None:
        try:
            model = load_model(arm.run, where)
        except RMDMError:  # figures can be reported without it
            return {}
        rows = [
            {
                "arm": arm.config.name,
                "steps": count,
                "texts": model.write(Request(n=TEXTS, steps=count, seed=SEED)).texts,
            }
            for count in steps
        ]
        with contextlib.suppress(OSError):  # a run that cannot be written can be reported all the same
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"asked": asked, "rows": rows})
    return {row["steps"]: row["texts"] for row in rows}


def texts_of(arm: Arm, steps: int, texts: Sequence[str]) -> Texts:
    """Texts with what can be said of them."""
    how = "one token a step" if arm.is_causal else f"{steps} steps, seed {SEED}"
    verdicts: list[tuple[bool, str]] = []
    size = arm.config.data.world
    if size is not None:
        from rmdm.data.storyworld import storyworld

        world = storyworld(size)
        for text in texts:
            check = world.check(text)
            reason = check.broken[0].removeprefix("grammar: ") if check.broken else "no sentences of this world"
            word = "not consistent" if check.grammatical else "not grammatical"
            verdicts.append((check.consistent, "consistent" if check.consistent else f"{word}: {reason}"))
    return Texts(arm, texts, verdicts, how)
