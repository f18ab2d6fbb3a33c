"""Stage II as a task of the loop: a process over token rows."""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.config import Config, LoopConfig
from rmdm.data.shards import Manifest, TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError
from rmdm.evaluation.ppl import Perplexity, perplexity
from rmdm.hub import build_backbone, load_model, save_model, save_stage_one
from rmdm.meanflow.flow import Flow
from rmdm.meanflow.rows import StageOne, is_named_by_flow, name_embeddings, released_embeddings
from rmdm.processes import PROCESSES, Objective
from rmdm.samplers.generate import Writer, own_settings
from rmdm.samplers.latents import LatentSource
from rmdm.training.batches import build_step
from rmdm.training.resume import flatten, lies_in, with_whole_paths
from rmdm.training.steps import Plan, Step
from rmdm.training.task import Validation

# Fields that may change between a run and its continuation: where things are, how often they are reported, and how long
# to go on (a falling learning rate then follows the new length from there). Which data is meant, the checkpoint tells.
FREE_FIELDS = {"name", "description", "sample", "train", "data.dir", "data.path", "data.workers", "optim.final_lr"}
FIXED_TRAIN_FIELDS = {"train.batch", "train.init_from"}
SMALL_OPERATIONS = 4e12
"""A step below this is over on a GPU before the host has started all its kernels."""
CPU_TOKENS = 8192
"""Tokens a CPU takes through the model at once, unless the settings say how many rows: more keep no core busier, and a
step of 131,072 would want 40 GB."""
LATENT_FIELDS = {"encoder", "latent", "meanflow"}
"""What processes without a latent do not depend on."""
FREE_LATENT_FIELDS = {"encoder", "meanflow", "latent.flow", "latent.source", "latent.given"}
"""What a process with a latent does not depend on, or finds in its identity: which flow made the latents."""
CONDITION_FIELDS = {"rmdm": ("latent.dim", "latent.project", "latent.width"), "sedd": ("latent.width",)}
"""What the weights of a process's condition depend on."""


@dataclass(frozen=True)
class Corpus:
    """Prepared data: rows to train on, rows to validate on, and the tokenizer that made them."""

    rows: TokenRows
    valid_rows: TokenRows | None
    tokenizer: Tokenizer
    identity: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of tokenizer and source, kept in every checkpoint."""

    @staticmethod
    def open(folder: Path) -> "Corpus":
        """Open a folder that `rmdm prepare` wrote."""
        rows = TokenRows.open(folder, "train")
        valid = TokenRows.open(folder, "valid") if rows.manifest.splits["valid"].rows else None
        return Corpus(rows, valid, Tokenizer.load(folder / "tokenizer"), data_identity(rows.manifest))


def data_identity(manifest: Manifest) -> dict[str, Any]:
    """What tells one prepared corpus from another."""
    return {"tokenizer": manifest.tokenizer["fingerprint"], "source": manifest.source}


class LanguageTask:
    """Trains a process of `PROCESSES` on a corpus; `verb` is the one that goes on with the run."""

    section, unit = "", "tokens"

    def __init__(self, config: Config, corpus: Corpus, verb: str = "train", latents: StageOne | None = None) -> None:
        config = with_whole_paths(config)
        self.config, self.corpus, self.verb, self.latents = config, corpus, verb, latents
        self.name, self.optim, self.sample_every = config.name, config.optim, config.train.sample_every
        self.settings: LoopConfig = config.train
        self.units_a_row = config.data.length
        self.is_small = operations(config) < SMALL_OPERATIONS
        self.most_rows: int | None = max(1, CPU_TOKENS // config.data.length)
        self.identity = corpus.identity | (latents.identity if latents is not None else {})
        self.process = PROCESSES[config.process]
        self.flow: Flow | None = None

    def fixed(self, field: str) -> bool:
        """All but `FREE_FIELDS`, and the latent's settings where there is none."""
        if field == "latent.width":
            return self.config.process in {"rmdm", "sedd"}
        latent = FREE_LATENT_FIELDS if self.config.process == "rmdm" else LATENT_FIELDS
        return field in FIXED_TRAIN_FIELDS or not lies_in(field, FREE_FIELDS | latent)

    def as_named_now(self, data: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
        """Embeddings once went by the flow that draws them; which they were, the checkpoint's flow tells, if any."""
        if self.latents is None or self.config.latent.draw != "flow" or not is_named_by_flow(data.get("latent")):
            return data
        trained_on = released_embeddings(checkpoint / "model")
        return data | {"latent": name_embeddings(trained_on) if trained_on else self.identity["latent"]}

    def again(self, out: Path) -> str:
        """The verb on the run directory."""
        return f"rmdm {self.verb} {out} --resume auto"

    def describe(self, parameters: int) -> str:
        """Process, size, rows and vocabulary."""
        rows, vocabulary = len(self.corpus.rows), self.corpus.tokenizer.size
        return (
            f"{self.config.process}: {parameters / 1e6:.2f}M parameters, {rows:,} rows of {self.config.data.length}, "
            f"vocabulary {vocabulary:,}"
        )

    def build(self) -> Objective:
        """The objective around an untrained backbone."""
        backbone = build_backbone(self.config, self.corpus.tokenizer.size)
        backbone.recompute = self.config.train.recompute
        return Objective(backbone)

    def warm_start(self, module: Objective) -> None:
        """The weights of `train.init_from`, if the config names one."""
        if self.config.train.init_from is not None:
            start_from(module.backbone, self.config.train.init_from, self.config, self.corpus.tokenizer)

    def step(self, step: int, plan: Plan) -> Step:
        """Rows of the step as the process's batches."""
        mask_id = self.corpus.tokenizer.size  # the backbone's one id beyond the vocabulary
        rows, pad_in_loss = self.corpus.rows, self.config.data.pad_in_loss
        latents = self.latents.train if self.latents is not None else None
        return build_step(step, plan, rows, self.process, mask_id, pad_in_loss, latents)

    def validate(self, averaged: Objective) -> Validation | None:
        """Perplexity of held-out rows, or its bound."""
        if self.corpus.valid_rows is None:
            return None
        pad_in_loss = self.config.data.pad_in_loss
        valid = perplexity(
            averaged, self.process, self.corpus.valid_rows, limit=self.settings.valid_rows, pad_in_loss=pad_in_loss,
            latents=self.latents.valid if self.latents is not None else None,
        )  # fmt: skip
        if self.config.latent.independent:  # such a latent tells nothing of the row
            valid = replace(valid, is_bound=valid.is_bound or self.config.process == "rmdm")
        figures = {"valid_nats": valid.nats, "valid_ppl": valid.ppl, "valid_tokens": valid.tokens}
        return Validation(figures, describe_validation(valid, self.config))

    def samples(self, averaged: Objective) -> list[str]:
        """Texts; the same seed each time, so that they can be watched getting better."""
        backbone, settings = averaged.backbone, self.config.sample
        writer = Writer(backbone, self.source(backbone))
        how = own_settings(backbone, settings)
        x_BL = writer.write(
            *writer.blank(self.config.train.sample_n, self.config.seed), how, tau=settings.latent_temperature
        )
        cut = self.config.data.layout == "padded"
        return [self.corpus.tokenizer.decode(row, stop_at_separator=cut) for row in x_BL.cpu().numpy()]

    def source(self, backbone: DiT) -> LatentSource | None:
        """Where samples get their latents from."""
        if backbone.latent is None:
            return None
        by_flow = self.latents is not None and self.config.latent.draw == "flow"
        if by_flow and self.flow is None:
            assert self.latents is not None
            self.flow = Flow.load(self.latents.flow, backbone.embed.weight.device)
        return LatentSource(backbone.latent, self.flow)

    def release(self, folder: Path, weights: dict[str, Tensor], step: int) -> None:
        """A model that `rmdm.hub` loads."""
        kept = {name.removeprefix("backbone."): value for name, value in weights.items()}
        save_model(folder, kept, self.config, self.corpus.tokenizer, step)
        if self.latents is not None:
            save_stage_one(folder, self.latents.flow, self.latents.cache)


def operations(config: Config) -> float:
    """Roughly what the trunk's matrix products take in a step: 6 for each weight and token."""
    weights = 4 * config.model.layers * config.model.width**2 * (1 + config.model.mlp_ratio / 2)
    return 6 * weights * config.train.batch * config.data.length


def start_from(backbone: DiT, ref: str, config: Config, tokenizer: Tokenizer) -> None:
    """Take over the weights of a trained model; what only the new one has, its condition, stays as it is.

    So does its projection of latents, which is not learnt: the seed fixes it, for latents in a cache too.
    """
    model = load_model(ref)
    if model.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"train.init_from={ref} has another tokenizer; start from a model of the same data")
    check_same_trunk(ref, model.config, config)
    weights = {name: value for name, value in model.backbone.state_dict().items() if name != "latent.matrix"}
    backbone.load_state_dict(weights, strict=False)


def check_same_trunk(ref: str, theirs: Config, mine: Config) -> None:
    """Refuse to start from a model whose weights have another shape here, or another meaning."""
    remedy = f"start from {'a sedd' if mine.process == 'sedd' else 'an ar' if mine.process == 'ar' else 'an mdlm'}"
    if theirs.process != mine.process and "ar" in (theirs.process, mine.process):
        raise ConfigError(
            f"train.init_from={ref} has process={theirs.process}, which sees other parts of a row than {mine.process}; "
            f"{remedy}"
        )
    if theirs.process == "mdlm" and mine.process == "sedd":
        raise ConfigError(
            f"train.init_from={ref} has process=mdlm, whose logits mean the same whatever is added to all of them, "
            f"and sedd's do not; {remedy}"
        )
    if CONDITION_FIELDS.get(theirs.process) and theirs.process != mine.process:
        raise ConfigError(
            f"train.init_from={ref} has process={theirs.process}, whose condition has no place in {mine.process}; "
            f"{remedy}"
        )
    fixed = [f"model.{part.name}" for part in fields(theirs.model) if part.name != "dropout"]
    fixed += ["data.length"] if theirs.model.learned_positions else []
    old, new = flatten(theirs), flatten(mine)
    wrong = [name for name in (*fixed, *CONDITION_FIELDS.get(theirs.process, ())) if old[name] != new[name]]
    if wrong:
        found = ", ".join(f"{name}={old[name]} (here {new[name]})" for name in wrong)
        flags = " ".join(f"--{name} {json.dumps(old[name])}" for name in wrong)
        raise ConfigError(f"train.init_from={ref} has {found}; add {flags}")


def describe_validation(valid: Perplexity, config: Config) -> str:
    """The validation figure with what it counts."""
    sign = "<= " if valid.is_bound and valid.is_whole else ""
    given_its_own = config.process == "rmdm" and not config.latent.independent
    what = "conditional perplexity (given the row's own latent, no bound)" if given_its_own else "perplexity"
    share = "; the text's share of a bound, no bound itself" if valid.is_bound and not valid.is_whole else ""
    pad = f", PAD {'counted' if config.data.pad_in_loss else 'not counted'}" if config.data.layout == "padded" else ""
    return (
        f"validation {what} {sign}{valid.ppl:.3f} ({valid.nats:.4f} nats a token, {valid.tokens:,} tokens{pad}{share})"
    )
