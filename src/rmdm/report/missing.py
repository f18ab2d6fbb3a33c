"""What a report could say and does not, with the command that would change it."""

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rmdm.config import ADAPTER, stage_one_run
from rmdm.presets import load_config, preset_names
from rmdm.report.read import Arm, flatten
from rmdm.report.table import escape
from rmdm.verbs import VERBS


@dataclass(frozen=True)
class Missing:
    """Lines of (what, command)."""

    lines: Sequence[tuple[str, str]]

    def to_html(self) -> str:
        """A list with commands to copy."""
        items = "".join(f"<li>{escape(what)}<pre>{escape(command)}</pre></li>" for what, command in self.lines)
        return f"<ul class=missing>{items}</ul>"

    def to_markdown(self) -> str:
        """The same."""
        return "\n".join(f"- {what}\n\n      {command}" for what, command in self.lines)


def missing(arms: Sequence[Arm], without_texts: Sequence[Arm]) -> list[tuple[str, str]]:
    """Every gap of the report, in the report's order."""
    stories, texts = [arm for arm in arms if arm.is_story], [arm for arm in arms if not arm.is_story]
    masked = [arm for arm in arms if not arm.is_causal]
    lines: list[tuple[str, str]] = []

    def ask(what: str, verb: str, group: Iterable[Arm], has: Callable[[Arm], object], flags: str = "") -> None:
        """Name the arms of a group that have not been measured."""
        lacking = [arm for arm in group if not has(arm)]
        if lacking:
            some = f" ({', '.join(arm.label for arm in lacking)})" if len(lacking) < len(arms) else ""
            lines.append((what + some, f"rmdm {verb} {' '.join(_word(arm.run) for arm in lacking)}{flags}"))

    def other_sets(arm: Arm) -> bool:
        return any(row.get("set") != "valid" for row in arm.rows.get("ppl", []))

    ask("Shares of grammatical and consistent stories", "eval stories", stories, lambda arm: arm.rows.get("stories"))
    ask("GenPPL with entropy against steps", "eval gen", texts, lambda arm: arm.rows.get("gen"))
    scored = [arm for arm in texts if arm.rows.get("gen") and not arm.is_causal]
    temperatures = " --temperatures 0.8,0.9,1,1.1"
    ask("GenPPL at equal entropy", "eval gen", scored, lambda arm: arm.of("gen", row="matched"), temperatures)
    for arm in without_texts:
        ask("Texts side by side, for which a model is needed", "train", [arm], lambda arm: arm.model)
    others = [arm for arm in without_texts if arm.model]
    why = "Texts side by side: the model is large for this machine, or cannot be loaded"
    ask(why, "eval gen", others, lambda _: False, " --anyway" if any(arm.is_story for arm in others) else "")
    if "bench" in VERBS:
        ask("Throughput, and the speed-up at matched quality", "bench sample", arms, lambda arm: arm.rows.get("bench"))
    ask("Perplexity of held-out text, with valid bounds", "eval ppl", arms, lambda arm: arm.of("ppl", set="valid"))
    sets = " --data wikitext,lm1b,lambada,agnews,pubmed,arxiv,openwebtext"
    ask("Zero-shot perplexity and bits per byte", "eval ppl", texts, other_sets, sets)
    ask("The conditional dependency gap", "eval gap", masked, lambda arm: arm.rows.get("gap"))
    if not any(arm.config.process == "rmdm" and arm.config.latent.independent for arm in arms):
        lines += independent_arm(arms)
    judged = " --steps 16,64,256 --judge deepseek-v4-flash --judge gemini-3.1-flash-lite"
    ask("Scores by judges", "eval judge", texts, lambda arm: arm.rows.get("judge"), judged)
    lacking = [arm for arm in arms if arm.has_text_latent and arm.latents is None]
    for run in dict.fromkeys(stage_one_run(arm.config, arm.run) for arm in lacking):
        own = [arm.label for arm in lacking if stage_one_run(arm.config, arm.run) == run]
        some = f" ({', '.join(own)})" if len(own) < len(arms) else ""
        lines.append(
            (f"Latent figures: how Gaussian they are, how close draws come{some}", f"rmdm latents {_word(run)}")
        )
    return lines


CARRIED = ("seed", "data.", "model.", "optim.", "train.", "sample.", "latent.groups", "latent.dim", "latent.project",
           "latent.sigma", "latent.dropout", "latent.width")  # fmt: skip
"""Settings that a control shares with the arm it is the control of."""
LEFT_OUT = (
    "data.name", "data.workers", "train.device", "train.init_from", "train.log_every", "train.valid_every",
    "train.valid_rows", "train.save_every", "train.sample_every", "train.sample_n", "train.tensorboard",
)  # fmt: skip
"""Of those, what changes nothing of the control."""


def independent_arm(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """The preset that would be the control of an RMDM arm, if there is one, with what the arm's run has changed."""
    for arm in arms:
        name = f"{arm.config.name.removesuffix('-rmdm')}-indep"
        if arm.has_text_latent and name in preset_names():
            words = ["rmdm run", name, *changes(arm, name), "--out", _word(arm.run.parent / name)]
            return [("The control with an independent z", " ".join(words))]
    return []


def changes(arm: Arm, preset: str) -> list[str]:
    """Flags that give a preset the data, size and training of a run."""
    own, base = (flatten(ADAPTER.dump_python(config, mode="json")) for config in (arm.config, load_config(preset)))
    words: list[str] = []
    for key, value in own.items():
        if key.startswith(CARRIED) and key not in LEFT_OUT and value != base.get(key):
            words += [f"--{key}", _word("null" if value is None else json.dumps(value) if _is_json(value) else value)]
    return words


def _is_json(value: object) -> bool:
    return isinstance(value, bool | list)


def _word(value: object) -> str:
    return shlex.quote(str(value))
