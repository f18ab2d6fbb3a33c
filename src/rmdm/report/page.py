"""The report itself: sections put together, as one HTML page without outside parts and as Markdown."""

import contextlib
import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rmdm.report import paper
from rmdm.report.ablation import ablation_section
from rmdm.report.about import arms_section, latents_section, training_section
from rmdm.report.gap import gap_section
from rmdm.report.generation import gen_section, own_rows
from rmdm.report.judges import judge_section
from rmdm.report.likelihood import ppl_section
from rmdm.report.matched import MATCHED, measures, own_stories
from rmdm.report.missing import Missing, missing
from rmdm.report.plots import Dots, Plot
from rmdm.report.read import Arm, Row, made_by, read_arms, revision
from rmdm.report.samples import samples_section
from rmdm.report.speed import speed_section
from rmdm.report.stories import share_half, stories_section
from rmdm.report.table import Note, Section, are_apart, escape, estimate, fixed, plural, short_paths

HTML, MARKDOWN = "index.html", "report.md"

SECTIONS = (
    stories_section, gen_section, speed_section, ppl_section, gap_section, ablation_section, judge_section,
    latents_section, training_section,
)  # fmt: skip
"""What follows the arms, in order; texts come after the figures of their quality."""
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What rows of another version make of code that reads them."""


@dataclass(frozen=True)
class Head:
    """What stands above the sections."""

    title: str
    lines: Sequence[str]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Report:
    """What was written where."""

    html: Path
    markdown: Path
    missing: list[tuple[str, str]]


def write_report(runs: Sequence[Path], out: Path, *, device: str = "auto") -> Report:
    """Read the runs and write the page and the tables."""
    arms = read_arms(runs)
    samples, without = samples_section(arms, device)
    sections = [arms_section(arms), *(section for build in SECTIONS if (section := built(build, arms)) is not None)]
    if samples is not None:
        sections.insert(1 + sum(section.name in ("stories", "generation") for section in sections), samples)
    for section in sections:
        section.parts += paper.tables(section.name)
    lacking = missing(arms, without)
    if lacking:
        lead = "These commands measure the rest; run 'rmdm report' again afterwards."
        sections.append(Section("missing", "Not measured yet", lead, [Missing(lacking)]))
    head = Head(title_of(arms), headlines(arms), provenance(arms))
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out / HTML, out / MARKDOWN, lacking)
    report.html.write_text(to_html(head, sections), encoding="utf-8")
    report.markdown.write_text(to_markdown(head, sections), encoding="utf-8")
    return report


def built(build: Callable[[Sequence[Arm]], Section | None], arms: Sequence[Arm]) -> Section | None:
    """A section; one whose figures are of another version says so, and leaves the rest of the report whole."""
    try:
        return build(arms)
    except UNREADABLE as error:
        name = build.__name__.removesuffix("_section")
        text = (
            f"These figures cannot be read ({type(error).__name__}: {error}); they may be of another version of rmdm."
        )
        return Section(name, name.capitalize(), "", [Note(f"{text} Measure them again.")])


def provenance(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """When, where and with what the figures were made."""
    rows = [row for arm in arms for kind in arm.rows.values() for row in kind]
    devices = list(dict.fromkeys(str(row["device"]) for row in rows if row.get("device")))
    dates = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    trained = dict.fromkeys(name for arm in arms for name in made_by(arm.meta))
    measured = dict.fromkeys(name for arm in arms for name in arm.measured_with)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = [
        ("runs", ", ".join(short_paths(str(arm.run)) for arm in arms)),
        ("trained with", "; ".join(trained)),
        ("measured with", "; ".join(measured)),
        ("measured on", ", ".join(devices)),
        ("measured", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""),
        ("report", f"{now}, {revision()}, {machine()}"),
    ]
    return [(name, value) for name, value in facts if value]


def machine() -> str:
    """This machine in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU x{os.cpu_count()}"


def headlines(arms: Sequence[Arm]) -> list[str]:
    """The main comparison in a sentence or two: the first RMDM against the first MDLM at RMDM's own number of steps."""
    base = next((arm for arm in arms if arm.config.process == "mdlm"), None)
    arm = next((arm for arm in arms if arm.has_text_latent), None)
    if base is None or arm is None:
        return []
    lines: list[str] = []
    with contextlib.suppress(*UNREADABLE):
        lines += story_headline(arm, base)
    with contextlib.suppress(*UNREADABLE):
        lines += gen_headline(arm, base)
    return lines


def story_headline(arm: Arm, base: Arm) -> list[str]:
    """Consistent stories."""
    own, other = at_same_steps(own_stories(arm), own_stories(base), arm.config.sample.steps)
    if own is None or other is None:
        return []
    shares = [(100 * row["consistent"], share_half(row["consistent"], row["n"])) for row in (own, other)]
    a, b = (f"{value:.1f}% ±{half:.1f}" for value, half in shares)
    spreads = [(value, value - half, value + half) for value, half in shares]
    doubt = "" if are_apart(spreads[0], spreads[1]) else f": {NO_DIFFERENCE}"
    steps = plural(own["steps"], "step")
    return [f"In {steps} {a} of {arm.label}'s stories are consistent, against {b} of {base.label}'s{doubt}."]


NO_DIFFERENCE = "no difference beyond the intervals"


def gen_headline(arm: Arm, base: Arm) -> list[str]:
    """GenPPL at equal entropy with its intervals; where there is none, GenPPL with each arm's own entropy."""
    for mine in [one for one in measures(arm) if one.kind == MATCHED]:
        for theirs in [one for one in measures(base) if one.kind == MATCHED and mine.apart(one) is None]:
            both = {point.steps for point in mine.curve} & {point.steps for point in theirs.curve}
            if not both or mine.target is None:
                continue
            at = min(both, key=lambda steps: abs(steps - arm.config.sample.steps))
            own, other = (next(point for point in one.curve if point.steps == at) for one in (mine, theirs))
            a, b = (estimate(point.value, point.low, point.high) for point in (own, other))
            doubt = NO_DIFFERENCE
            if are_apart((own.value, own.low, own.high), (other.value, other.low, other.high)):
                doubt = f"{'lower' if own.value < other.value else 'higher'} beyond the intervals"
            return [
                f"In {plural(at, 'step')}, at an entropy of {mine.target.entropy:.2f} nats, {arm.label} has GenPPL "
                f"{a.text} ({a.range or 'no interval'}) and {base.label} {b.text} ({b.range or 'no interval'}): "
                f"{doubt}. Evaluator {mine.target.evaluator}."
            ]
    own, other = at_same_steps(own_rows(arm), own_rows(base), arm.config.sample.steps)
    if own is None or other is None or own["evaluator"] != other["evaluator"]:
        return []
    a, b = (
        f"{cell.text} ({cell.range or 'no interval'}) with entropy {fixed(row['entropy'], 2)}"
        for row in (own, other)
        for cell in [estimate(row["gen_ppl"], row.get("gen_ppl_low"), row.get("gen_ppl_high"))]
    )
    who = f"({base.label}); evaluator {own['evaluator']}"
    doubt = "The entropies are not matched, so that this compares nothing yet."
    return [f"In {plural(own['steps'], 'step')} GenPPL is {a} ({arm.label}), against {b} {who}. {doubt}"]


def at_same_steps(own: Sequence[Row], other: Sequence[Row], steps: int) -> tuple[Row | None, Row | None]:
    """Rows of two arms at one number of steps: the wanted one or that nearest to it."""
    both = sorted({row["steps"] for row in own} & {row["steps"] for row in other} - {None})
    if not both:
        return None, None
    at = min(both, key=lambda count: abs(count - steps))
    return next(row for row in own if row["steps"] == at), next(row for row in other if row["steps"] == at)


def title_of(arms: Sequence[Arm]) -> str:
    """The report's name."""
    names = [arm.label for arm in arms]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def to_html(head: Head, sections: Sequence[Section]) -> str:
    """One page: style, plots and texts inside."""
    style = (resources.files("rmdm.report") / "page.css").read_text(encoding="utf-8")
    contents = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    lines = "".join(f"<p class=headline>{escape(line)}</p>" for line in head.lines)
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in head.facts)
    body = "".join(_section(section) for section in sections)
    title = escape(head.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}: rmdm report</title><style>{style}</style></head><body>"
        f"<header><p class=kicker>rmdm report</p><h1>{title}</h1>{lines}<dl>{terms}</dl></header>"
        f"<nav aria-label=Contents><ul>{contents}</ul></nav><main>{body}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    """Neighbouring plots share a row."""
    lead = f"<p class=lead>{escape(section.lead)}</p>" if section.lead else ""
    out, row = "", ""
    for part in section.parts:
        if isinstance(part, Plot | Dots):
            row += part.to_html()
            continue
        out += f"<div class=plots>{row}</div>" if row else ""
        row = ""
        out += part.to_html()
    out += f"<div class=plots>{row}</div>" if row else ""
    return f"<section id={section.name}><h2>{escape(section.title)}</h2>{lead}{out}</section>"


def to_markdown(head: Head, sections: Sequence[Section]) -> str:
    """The same tables and texts for a README or an issue; the paper's own are left to the page."""
    parts = [f"# rmdm report: {head.title}", *head.lines, "\n".join(f"- {name}: {value}" for name, value in head.facts)]
    for section in sections:
        papers = paper.tables(section.name)
        parts += [f"## {section.title}", *([section.lead] if section.lead else [])]
        parts += [text for part in section.parts if part not in papers and (text := part.to_markdown())]
    return "\n\n".join(parts) + "\n"
