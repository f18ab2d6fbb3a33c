"""The report itself: sections put together, as one HTML page without outside parts and as Markdown."""

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rmdm.report import paper
from rmdm.report.ablation import ablation_section
from rmdm.report.about import arms_section, latents_section, training_section
from rmdm.report.generation import gen_arms, gen_section
from rmdm.report.judges import judge_section
from rmdm.report.likelihood import gap_section, ppl_section
from rmdm.report.missing import Missing, missing
from rmdm.report.plots import Dots, Plot
from rmdm.report.read import Arm, Row, read_arms, revision
from rmdm.report.samples import samples_section
from rmdm.report.speed import speed_section
from rmdm.report.stories import share_half, stories_section
from rmdm.report.table import Section, escape, fixed, number

HTML, MARKDOWN = "index.html", "report.md"


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
    found = [
        arms_section(arms), stories_section(arms), gen_section(arms), samples, speed_section(arms), ppl_section(arms),
        gap_section(arms), ablation_section(arms), judge_section(arms), latents_section(arms), training_section(arms),
    ]  # fmt: skip
    sections = [section for section in found if section is not None]
    for section in sections:
        section.parts += paper.tables(section.name)
    lacking = missing(arms, without)
    if lacking:
        lead = "These commands measure the rest; run 'rmdm report' again afterwards."
        sections.append(Section("missing", "Not measured yet", lead, [Missing(lacking)]))
    facts = provenance(arms)
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out / HTML, out / MARKDOWN, lacking)
    report.html.write_text(to_html(arms, sections, facts), encoding="utf-8")
    report.markdown.write_text(to_markdown(arms, sections, facts), encoding="utf-8")
    return report


def provenance(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """When, where and with what the figures were made."""
    rows = [row for arm in arms for kind in arm.rows.values() for row in kind]
    devices = list(dict.fromkeys(str(row["device"]) for row in rows if row.get("device")))
    dates = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    versions = list(dict.fromkeys(str(arm.meta["rmdm"]) for arm in arms if arm.meta.get("rmdm")))
    revisions = list(dict.fromkeys(str(arm.meta["revision"]) for arm in arms if arm.meta.get("revision")))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = [
        ("runs", ", ".join(str(arm.run) for arm in arms)),
        ("trained with", ", ".join([*(f"rmdm {version}" for version in versions), *revisions])),
        ("measured on", ", ".join(devices)),
        ("measured", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""),
        ("report", f"{now}, {revision()}, {machine()}"),
    ]
    return [(name, value) for name, value in facts if value]


def machine() -> str:
    """This machine in words."""
    import os

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
    lines = []
    stories = [[row for row in one.rows.get("stories", []) if row["arm"] == one.config.name] for one in (arm, base)]
    own, other = at_same_steps(stories[0], stories[1], arm.config.sample.steps)
    if own and other:
        shares = [
            f"{100 * row['consistent']:.1f}% ±{share_half(row['consistent'], row['n']):.1f}" for row in (own, other)
        ]
        lines.append(
            f"In {own['steps']} steps {shares[0]} of {arm.label}'s stories are consistent, against {shares[1]} of "
            f"{base.label}'s."
        )
    gen = [next((rows for _, _, rows in gen_arms([one])), []) for one in (arm, base)]
    own, other = at_same_steps(gen[0], gen[1], arm.config.sample.steps)
    if own and other and own["evaluator"] == other["evaluator"]:
        said = [f"{number(row['gen_ppl'], 3)} with entropy {fixed(row['entropy'], 2)}" for row in (own, other)]
        lines.append(
            f"In {own['steps']} steps GenPPL is {said[0]} ({arm.label}), against {said[1]} ({base.label}); evaluator "
            f"{own['evaluator']}."
        )
    return lines


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


def to_html(arms: Sequence[Arm], sections: Sequence[Section], facts: Sequence[tuple[str, str]]) -> str:
    """One page: style, plots and texts inside."""
    style = (resources.files("rmdm.report") / "page.css").read_text(encoding="utf-8")
    contents = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    lines = "".join(f"<p class=headline>{escape(line)}</p>" for line in headlines(arms))
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    body = "".join(_section(section) for section in sections)
    title = escape(title_of(arms))
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


def to_markdown(arms: Sequence[Arm], sections: Sequence[Section], facts: Sequence[tuple[str, str]]) -> str:
    """The same tables and texts for a README or an issue; the paper's own are left to the page."""
    head = [
        f"# rmdm report: {title_of(arms)}",
        *headlines(arms),
        "\n".join(f"- {name}: {value}" for name, value in facts),
    ]
    for section in sections:
        own = [part for part in section.parts if part not in paper.tables(section.name)]
        head += [f"## {section.title}", *([section.lead] if section.lead else [])]
        head += [text for part in own if (text := part.to_markdown())]
    return "\n\n".join(head) + "\n"
