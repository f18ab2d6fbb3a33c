"""Where the gain comes from: independent z, and encoders."""

from collections.abc import Callable, Sequence

from rmdm.report.about import kind_of
from rmdm.report.generation import gen_arms, gen_tracks
from rmdm.report.judges import judge_track
from rmdm.report.read import Arm, limited
from rmdm.report.steps import by_steps
from rmdm.report.stories import story_tracks
from rmdm.report.table import Part, Section


def ablation_section(arms: Sequence[Arm]) -> Section | None:
    """Independent z (Table 5), and encoders (Tables 6 and 7)."""
    independent = [arm for arm in arms if arm.config.process == "rmdm" and arm.config.latent.independent]
    with_text = [arm for arm in arms if arm.has_text_latent]
    parts: list[Part] = []
    if independent and with_text:
        parts += ablation_tables("independent z (the paper's Table 5)", [*with_text, *independent], kind_of)
    if len({arm.config.encoder.name for arm in with_text}) > 1:
        plain = [arm for arm in arms if arm.config.process == "mdlm"]
        parts += ablation_tables("encoders (the paper's Tables 6 and 7)", [*plain, *with_text], encoder_of)
    if not parts:
        return None
    lead = "The same method with latents of different encoders."
    if independent and with_text:
        lead = "An independent z has the same network and prior, and a latent that knows nothing of its text."
    return Section("ablation", "Where the gain comes from", lead, parts)


def encoder_of(arm: Arm) -> str:
    """The encoder's name, or that there is none."""
    return arm.config.encoder.name or "no latent"


def ablation_tables(title: str, arms: Sequence[Arm], describe: Callable[[Arm], str]) -> list[Part]:
    """GenPPL, judges' scores and consistent stories of some arms."""

    def label(arm: Arm, own: str) -> str:
        return f"{own} ({describe(arm)})"

    parts: list[Part] = []
    for evaluator in dict.fromkeys(row["evaluator"] for arm in arms for row in arm.of("gen", row="model")):
        some = [
            limited(arm, "gen", evaluator=evaluator) for arm in arms if arm.of("gen", row="model", evaluator=evaluator)
        ]
        gen = [one for arm, own, rows in gen_arms(some) for one in gen_tracks(arm, label(arm, own), rows)]
        gen.sort(key=lambda one: (one.label.arm or 0, one.label.text))
        if len(some) > 1:
            parts.append(by_steps(f"GenPPL and entropy: {title}", gen, [f"Evaluator {evaluator}."]))
    for judge in dict.fromkeys(row["judge"] for arm in arms for row in arm.of("judge", row="scores")):
        scored = [(arm, arm.of("judge", row="scores", judge=judge)) for arm in arms]
        tracks = [
            judge_track(arm, label(arm, arm.label), "overall", [row for row in rows if row.get("steps") is not None])
            for arm, rows in scored
            if rows
        ]
        if len(tracks) > 1:
            parts.append(by_steps(f"Overall score by {judge}: {title}", tracks, ["± 95%."]))
    told = [arm for arm in arms if arm.rows.get("stories")]
    if len(told) > 1:
        tracks = [one for one in story_tracks(told, "consistent", "consistent %") if one.is_compared]
        parts.append(by_steps(f"Consistent stories, %: {title}", tracks, ["± 95%."]))
    return parts
