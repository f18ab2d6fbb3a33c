"""What is known of a trained model besides its weights: where it comes from, and what was measured of it.

Of a run it is gathered from the run directory; a release carries it along in `card.json`.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

import rmdm
from rmdm.config import ADAPTER, Config, DataConfig
from rmdm.data.shards import Manifest
from rmdm.errors import CheckpointError, RMDMError
from rmdm.hub import find_model
from rmdm.int8 import SCALE
from rmdm.presets import decode, explain
from rmdm.report.read import Arm, read_lines, read_object
from rmdm.report.table import short_paths
from rmdm.revision import git_revision
from rmdm.share.figures import Record, read_records, without_paths
from rmdm.share.manifest import AGAIN, CARD, META, WEIGHTS, verify
from rmdm.share.names import SHIPPED
from rmdm.training.checkpoint import file_signature

FORMAT = 1
FLOW_NETWORKS = ("net.", "student.", "guide.")
PRIVATE = ("data.dir", "data.path", "data.valid_path", "latent.flow", "train.init_from", "data.tokenizer.name")
"""Settings that may name folders of the machine that trained, which a model does without."""
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64"}


@dataclass(frozen=True)
class Rounding:
    """A time at which the weights were stored with less precision than before."""

    before: str
    """How they were stored."""
    to: str
    measured: list[list[int]]
    """`About.measured` of before: figures of these files are of weights that were not rounded yet."""


@dataclass(frozen=True)
class About:
    """A model's history."""

    licence: str | None = None
    """Of the weights, as their author states it."""
    text_note: str | None = None
    """Where the training text comes from and under which licence, in the author's words."""
    rounded: list[Rounding] = field(default_factory=list)
    """Every time the weights were rounded, the first time first."""
    measured: list[list[int]] = field(default_factory=list)
    """Size and CRC-32 of every file of weights that the figures are about."""
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Figures of other weights, which are left out."""

    def stating(self, licence: str | None, text_note: str | None) -> "About":
        """The same with what its author says now; None leaves what was said before."""
        return dataclasses.replace(self, licence=licence or self.licence, text_note=text_note or self.text_note)

    def rounded_since(self, record: Record) -> list[Rounding]:
        """Every time the weights were rounded after a figure was taken."""
        return [one for one in self.rounded if record.asked.get("weights") in one.measured]

    def own_figures(self) -> "About":
        """The same without figures of weights that were not rounded yet, which are only named."""
        own = [record for record in self.records if not self.rounded_since(record)]
        others = {f"eval/{record.file}" for record in self.records if self.rounded_since(record)}
        return dataclasses.replace(self, records=own, stale=sorted({*self.stale, *others}))

    def save(self, path: Path) -> None:
        """Write it as JSON, with the code that wrote it."""
        written = {"rmdm": rmdm.__version__, "revision": git_revision()}
        facts = {"format": FORMAT, **dataclasses.asdict(self), "written": written}
        path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "About":
        """Read what `save` wrote."""
        saved = read_object(path)
        form = saved.pop("format", None)
        if form != FORMAT:
            raise CheckpointError(f"{path} has format {form!r}, this version of rmdm reads {FORMAT}; {AGAIN}")
        try:
            about = TypeAdapter(About).validate_python(saved)
        except ValidationError as error:
            raise CheckpointError(f"{path} is no history of a model: {explain(error)}; {AGAIN}") from None
        before = saved.get("rounded_from")  # cards told of bf16 so when there was nothing else to round to
        if isinstance(before, str):
            about = dataclasses.replace(about, rounded=[Rounding(before, "bf16", about.measured[:-1])])
        return about


@dataclass(frozen=True)
class Source:
    """A model to share: where its files lie, and what is known of it."""

    folder: Path
    """The release, or the checkpoint's model."""
    files: dict[str, Any]
    """The manifest's files; none for a checkpoint."""
    meta: dict[str, Any]
    config: Config
    about: About

    @property
    def arm(self) -> Arm:
        """The same as a report sees it."""
        name = self.config.name
        return Arm(0, name, self.folder, self.config, self.folder, self.meta, None)

    @property
    def stored(self) -> str:
        """How most of the weights are stored, or int8 where any are: exact vectors outnumber small matrices."""
        counts: dict[str, int] = {}
        with safe_open(self.folder / WEIGHTS, "pt") as file:
            for part in map(file.get_slice, file.keys()):
                counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + volume(part.get_shape())
        if "I8" in counts:
            return "int8"
        most = max(counts, key=lambda kind: counts[kind])
        return DTYPES.get(most, most)


def open_source(ref: str | None) -> Source:
    """A run, a released folder, a model of the hub or (None) the package's own, its files verified."""
    folder = find_model(ref)
    files = verify(folder)
    checkpoint = verify_checkpoint_model(folder)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        config = decode(meta["config"], str(folder / META))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{folder / META} is damaged (not the JSON of a model); restore it") from None
    weights = file_signature(folder / WEIGHTS)
    homes = [run_of(folder), Path(ref or SHIPPED)]
    if CARD in files:
        about = About.load(folder / CARD)
        measured = [*(one for one in about.measured if one != weights), weights]
        records, stale = read_records(homes, measured)
        known = {(record.kind, record.file): record for record in [*about.records, *records]}
        return Source(folder, files, meta, config, dataclasses.replace(
            about, measured=measured, records=list(known.values()), stale=sorted({*about.stale, *stale})
        ))  # fmt: skip
    records, stale = read_records(homes, [weights])
    data = data_facts(config, checkpoint.get("data"), folder)
    training = training_facts(config, meta, run_of(folder))
    about = About(measured=[weights], data=data, training=training, records=records, stale=stale)
    return Source(folder, files, meta, config, about)


def verify_checkpoint_model(folder: Path) -> dict[str, Any]:
    """What the checkpoint around a model says of it, after a look at whether its files are whole; nothing elsewhere."""
    meta = read_object(folder.parent / "meta.json") if folder.name == "model" else {}
    files = meta.get("files")
    for name, signature in (files if isinstance(files, dict) else {}).items():
        path = folder.parent / name
        if not path.is_relative_to(folder):
            continue
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; restore it, or use another checkpoint")
        if file_signature(path) != signature:
            raise CheckpointError(f"{path} is damaged (size or CRC-32 is not the one recorded); restore it")
    return meta


def run_of(folder: Path) -> Path:
    """The run directory that a model lies in; itself, if it is a release."""
    if folder.name != "model":
        return folder
    return folder.parents[2] if folder.parent.parent.name == "checkpoints" else folder.parent


def data_facts(config: Config, identity: Any, folder: Path) -> dict[str, Any]:
    """The corpus: its source, fingerprints, tokenizer, and its rows where the shards still lie here."""
    identity = identity if isinstance(identity, dict) else {}
    token = read_object(folder / "tokenizer" / "tokenizer_meta.json")
    facts: dict[str, Any] = {
        "name": config.data.name,
        "source": describe_source(config.data),
        "fingerprints": identity.get("source"),
        "tokenizer": {"name": token.get("name"), "fingerprint": token.get("fingerprint")},
    }
    shards = find_shards(config.data, facts["tokenizer"]["fingerprint"], facts["fingerprints"])
    if shards is not None:
        facts["source"] = shards.description
        facts["fingerprints"] = shards.source
        facts["rows"] = {name: split.rows for name, split in shards.splits.items()}
        facts["tokens"] = {name: split.tokens for name, split in shards.splits.items()}
    return without_paths(facts)


def find_shards(data: DataConfig, tokenizer: str | None, source: Any) -> Manifest | None:
    """The manifest of the shards a model was trained on, if they are here: they have its fingerprints."""
    places = [Path(data.dir).expanduser()] if data.dir is not None else sorted(Path("data").glob(f"{data.name}-*"))
    for place in places:
        try:
            found = Manifest.load(place)
        except (RMDMError, OSError):
            continue
        if found.tokenizer["fingerprint"] == tokenizer and source in (None, found.source):
            return found
    return None


def describe_source(data: DataConfig) -> str:
    """The corpus in words, from its settings."""
    if data.path is not None:
        return data.path
    if data.dataset is not None:
        at = f", revision {data.revision}" if data.revision else ", revision not pinned"
        return f"Hugging Face dataset {data.dataset}, {data.column!r} of split {data.split!r}{at}"
    return f"storyworld {data.storyworld} ({data.stories:,} stories)" if data.storyworld else "unknown"


def training_facts(config: Config, meta: dict[str, Any], run: Path) -> dict[str, Any]:
    """How it was trained, as far as the run tells."""
    step, rows = meta.get("step"), read_lines(run / "metrics.jsonl")
    facts: dict[str, Any] = {
        "step": step,
        "batch": config.train.batch,
        "seed": config.seed,
        "tokens_seen": step * config.train.batch * config.data.length if isinstance(step, int) else None,
        "rmdm": meta.get("rmdm"),
        "revision": meta.get("revision"),
    }
    # The log may go on after the checkpoint that is released.
    own = [row for row in rows if isinstance(row.get("step"), int) and isinstance(step, int) and row["step"] <= step]
    for key in ("loss", "valid_nats", "valid_tokens"):
        facts[key] = next((row[key] for row in reversed(own) if key in row), None)
    return facts


def released_config(config: Config) -> dict[str, Any]:
    """The settings without folders of the machine that trained: absolute paths are cut short."""
    values = ADAPTER.dump_python(config, mode="json")
    for name in PRIVATE:
        *sections, leaf = name.split(".")
        owner = values
        for section in sections:
            owner = owner[section]
        if isinstance(owner[leaf], str):
            owner[leaf] = short_paths(owner[leaf])
    return values


def numbers_in(path: Path, prefixes: tuple[str, ...] = ("",)) -> int | None:
    """How many numbers a safetensors file holds under names that begin so, scales of int8 rows not counted.

    None where it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefixes) and not name.endswith(SCALE)]  # noqa: SIM118
            return sum(volume(file.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError):
        return None


def volume(shape: list[int]) -> int:
    """Numbers in a tensor."""
    total = 1
    for side in shape:
        total *= side
    return total
