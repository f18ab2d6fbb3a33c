"""What there is to report of some runs: settings, training figures, and everything measured, as far as it is there.

RUN/config.yaml, RUN/metrics.jsonl, RUN/flow/metrics.jsonl, RUN/latents/report.json and RUN/eval/KIND[-SET].json are
read as they are; a missing or damaged file is a section without that run, and never an error.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rmdm
from rmdm.config import ADAPTER, Config
from rmdm.errors import CheckpointError, ConfigError
from rmdm.presets import decode, load_config
from rmdm.revision import git_revision
from rmdm.share.names import hub_name, is_shipped

Row = dict[str, Any]
KINDS = ("stories", "ppl", "gen", "judge", "gap", "bench")


@dataclass
class Arm:
    """One run: its place among the others, its settings, and what was measured of it."""

    index: int
    """Its colour and marker."""
    label: str
    run: Path
    config: Config
    model: Path | None
    """The release that figures are about; None where only figures are left."""
    meta: Row
    """What model.json says."""
    weights: list[int] | None
    """What tells its weights from others."""
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """Rows of each kind."""
    stale: list[str] = field(default_factory=list)
    """Files about other weights than the run has now."""
    measured_with: list[str] = field(default_factory=list)
    """Versions and git revisions of the code that took the figures, as far as they are known."""
    training: list[Row] = field(default_factory=list)
    flow_training: list[Row] = field(default_factory=list)
    latents: Row | None = None

    @property
    def is_story(self) -> bool:
        """Whether it writes storyworld's stories, which have an exact measure."""
        return self.config.data.world is not None

    @property
    def is_causal(self) -> bool:
        """Whether it writes one token after another."""
        return self.config.process == "ar"

    @property
    def has_text_latent(self) -> bool:
        """Whether it is an RMDM whose latents come from text."""
        return self.config.process == "rmdm" and not self.config.latent.independent

    @property
    def stage_one(self) -> Path:
        """Where its latents are reported: its own folder, or the run whose flow it uses if only that one has it."""
        flow = self.config.latent.flow
        if (self.run / "latents" / "report.json").is_file() or not self.has_text_latent or flow is None:
            return self.run
        return Path(flow) if (Path(flow) / "latents" / "report.json").is_file() else self.run

    @property
    def tau(self) -> float | None:
        """The latent's temperature that it samples with; None without a latent."""
        if self.config.process != "rmdm":
            return None
        tau = self.config.sample.latent_temperature
        return 1 / (1 + self.config.latent.sigma**2) ** 0.5 if tau == "paper" else float(tau)

    def of(self, kind: str, **wanted: Any) -> list[Row]:
        """Rows of a kind that have the wanted values."""
        return [row for row in self.rows.get(kind, []) if all(row.get(key) == value for key, value in wanted.items())]


def read_arms(runs: Sequence[Path]) -> list[Arm]:
    """Every run once, in the order they were named."""
    folders = list(dict.fromkeys(run.resolve() for run in runs))
    if len(folders) < len(runs):
        raise ConfigError("a run is named twice; name each run once")
    arms = [read_arm(index, run) for index, run in enumerate(runs)]
    for arm, label in zip(arms, labels([arm.config.name for arm in arms], runs), strict=True):
        arm.label = label
    return arms


def labels(names: Sequence[str], runs: Sequence[Path]) -> list[str]:
    """Names of arms, with as much of the run as tells two of one name apart."""
    same = [[run for name, run in zip(names, runs, strict=True) if name == own] for own in names]
    out = []
    for name, run, others in zip(names, runs, same, strict=True):
        folder = run.name if len({other.name for other in others}) == len(others) else str(run)
        out.append(name if len(others) == 1 else f"{name} ({folder})")
    return out


def read_arm(index: int, run: Path) -> Arm:
    """Everything about one run."""
    if not run.is_dir():
        first = (
            f"run 'rmdm eval ppl {shlex.quote(str(run))} --data FILE' first, which keeps its figures in {run / 'eval'}"
        )
        if is_shipped(str(run)):
            raise ConfigError(f"nothing was measured here of {run}, the model of the package; {first}")
        of_hub = f"; for a model of the hub {first}" if hub_name(str(run)) is not None else ""
        raise ConfigError(f"{run} does not exist; give run directories, such as those under runs/{of_hub}")
    model = find_release(run)
    meta = read_object(model / "model.json") if model is not None else {}
    if (run / "config.yaml").is_file():
        config = load_config(run)
    elif "config" in meta:
        config = decode(meta["config"], str(run))
    else:
        raise ConfigError(f"{run} holds neither config.yaml nor model.json, so it is no run; give a run directory")
    arm = Arm(index, config.name, run, config, model, meta, signature(model))
    for kind in KINDS:
        for path in sorted([run / "eval" / f"{kind}.json", *(run / "eval").glob(f"{kind}-*.json")]):
            saved = read_object(path)
            found = [row for row in saved.get("rows", []) if isinstance(row, dict)]
            if path.name == "judge-texts.json" or not found:
                continue
            arm.rows.setdefault(kind, []).extend(found)
            arm.measured_with += [name for name in made_by(saved) if name not in arm.measured_with]
            measured = saved.get("asked", {}).get("weights")
            if None not in (arm.weights, measured) and measured != arm.weights:
                arm.stale.append(f"eval/{path.name}")
    arm.training = read_lines(run / "metrics.jsonl")
    arm.flow_training = read_lines(run / "flow" / "metrics.jsonl")
    arm.latents = read_object(arm.stage_one / "latents" / "report.json") or None
    return arm


def made_by(saved: Row) -> list[str]:
    """Which code made a model or a figure."""
    version, own = saved.get("rmdm"), saved.get("revision")
    return [] if version is None else [f"rmdm {version}" + (f", git {own}" if own else "")]


def find_release(run: Path) -> Path | None:
    """The folder of the run's newest model, if it has one."""
    from rmdm.hub import find_model

    try:
        return find_model(run)
    except CheckpointError:
        return None


def signature(model: Path | None) -> list[int] | None:
    """What tells the weights from others."""
    from rmdm.training.checkpoint import file_signature

    if model is None or not (model / "model.safetensors").is_file():
        return None
    return file_signature(model / "model.safetensors")


def read_object(path: Path) -> Row:
    """A JSON object; empty where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[Row]:
    """JSON objects, one a line; torn lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


NOT_LEARNED = ("__metadata__", "latent.matrix")
"""Entries of a weights file that hold no parameters: the projection of the latent is fixed."""


def parameters(arm: Arm) -> int | None:
    """Numbers the model has learned, from the header of its file."""
    from rmdm.int8 import SCALE

    if arm.model is None:
        return None
    try:
        with open(arm.model / "model.safetensors", "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        learned = [name for name in header if name not in NOT_LEARNED and not name.endswith(SCALE)]
        shapes = [header[name]["shape"] for name in learned]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    return total


def tokenizer_id(arm: Arm) -> str:
    """What two runs share if their tokens are the same: the tokenizer's file, else the name in its figures."""
    if arm.model is not None:
        try:
            return hashlib.sha256((arm.model / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
        except OSError:
            pass
    names = {row["tokenizer"] for row in arm.of("ppl") if row.get("tokenizer")}
    if names:
        return ", ".join(sorted(names))
    tokenizer = arm.config.data.tokenizer
    return f"{tokenizer.kind} {tokenizer.name or arm.config.data.name} {tokenizer.vocab_size}"


def by_tokenizer(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms whose figures a token can be compared."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(tokenizer_id(arm), []).append(arm)
    return list(groups.values())


def settings(arm: Arm) -> dict[str, Any]:
    """Every setting of the parts that the arm has, under its dotted name, but for names and places."""
    flat = flatten(ADAPTER.dump_python(arm.config, mode="json"))
    unused = [] if arm.config.process == "rmdm" else [
        "encoder.", "latent.", "meanflow.", "sample.latent_", "sample.guidance", "sample.draws", "sample.rounds",
    ]  # fmt: skip
    unused = unused if arm.has_text_latent else [*unused, "encoder.", "meanflow."]
    left_out = ("name", "description", "data.dir", "data.workers")
    return {key: value for key, value in flat.items() if key not in left_out and not key.startswith(tuple(unused))}


def limited(arm: Arm, kind: str, **wanted: Any) -> Arm:
    """The arm with only those rows of a kind that have the wanted values."""
    return replace(arm, rows=arm.rows | {kind: arm.of(kind, **wanted)})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def revision() -> str:
    """The package's version, and its git revision where it lies in a repository of its own."""
    version, own = f"rmdm {rmdm.__version__}", git_revision()
    return version if own is None else f"{version}, git {own}"


def default_folder(runs: Sequence[Path]) -> Path:
    """`report` in the folder that holds all the runs; in the run itself where there is one."""
    if len(runs) == 1:
        return runs[0] / "report"
    absolute = any(run.is_absolute() for run in runs)
    parents = [run.resolve().parent if absolute else Path(os.path.normpath(run.parent)) for run in runs]
    return Path(os.path.commonpath(parents)) / "report"
