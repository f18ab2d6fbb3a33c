"""Stage II as a task of the loop: a process over token rows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rmdm.config import Config, LoopConfig
from rmdm.data.shards import Manifest, TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.evaluation.ppl import Perplexity, perplexity
from rmdm.hub import build_backbone, save_model
from rmdm.processes import PROCESSES, Objective
from rmdm.samplers import sample_rows
from rmdm.training.batches import build_step
from rmdm.training.resume import lies_in
from rmdm.training.steps import Plan, Step
from rmdm.training.task import Validation

# Fields that may change between a run and its continuation: where things are, how often they are reported, and how long
# to go on (a falling learning rate then follows the new length from there). Which data is meant, the checkpoint tells.
FREE_FIELDS = {"name", "description", "sample", "train", "data.dir", "data.path", "data.workers", "optim.final_lr"}
FIXED_TRAIN_FIELDS = {"train.batch"}
LATENT_FIELDS = {"encoder", "latent", "meanflow"}
"""What processes without a latent do not depend on."""


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

    section, unit, is_small = "", "tokens", False

    def __init__(self, config: Config, corpus: Corpus, verb: str = "train") -> None:
        self.config, self.corpus, self.verb = config, corpus, verb
        self.name, self.optim, self.sample_every = config.name, config.optim, config.train.sample_every
        self.settings: LoopConfig = config.train
        self.units_a_row = config.data.length
        self.identity = corpus.identity
        self.process = PROCESSES[config.process]

    def fixed(self, field: str) -> bool:
        """All but `FREE_FIELDS`, and the latent's settings."""
        return field in FIXED_TRAIN_FIELDS or not lies_in(field, FREE_FIELDS | LATENT_FIELDS)

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
        return Objective(build_backbone(self.config, self.corpus.tokenizer.size))

    def step(self, step: int, plan: Plan) -> Step:
        """Rows of the step as the process's batches."""
        mask_id = self.corpus.tokenizer.size  # the backbone's one id beyond the vocabulary
        return build_step(step, plan, self.corpus.rows, self.process, mask_id, self.config.data.pad_in_loss)

    def validate(self, averaged: Objective) -> Validation | None:
        """Perplexity of held-out rows, or its bound."""
        if self.corpus.valid_rows is None:
            return None
        pad_in_loss = self.config.data.pad_in_loss
        valid = perplexity(
            averaged, self.process, self.corpus.valid_rows, limit=self.settings.valid_rows, pad_in_loss=pad_in_loss
        )
        figures = {"valid_nats": valid.nats, "valid_ppl": valid.ppl, "valid_tokens": valid.tokens}
        return Validation(figures, describe_validation(valid, self.config))

    def samples(self, averaged: Objective) -> list[str]:
        """Texts; the same seed each time, so that they can be watched getting better."""
        n, settings = self.config.train.sample_n, self.config.sample
        x_BL = sample_rows(averaged.backbone, n, settings.steps, self.config.seed, settings.temperature)
        cut = self.config.data.layout == "padded"
        return [self.corpus.tokenizer.decode(row, stop_at_separator=cut) for row in x_BL.cpu().numpy()]

    def release(self, folder: Path, weights: dict[str, Tensor], step: int) -> None:
        """A model that `rmdm.hub` loads."""
        kept = {name.removeprefix("backbone."): value for name, value in weights.items()}
        save_model(folder, kept, self.config, self.corpus.tokenizer, step)


def describe_validation(valid: Perplexity, config: Config) -> str:
    """The validation figure with what it counts."""
    sign = "<= " if valid.is_bound else ""
    pad = f", PAD {'counted' if config.data.pad_in_loss else 'not counted'}" if config.data.layout == "padded" else ""
    return f"validation perplexity {sign}{valid.ppl:.3f} ({valid.nats:.4f} nats a token, {valid.tokens:,} tokens{pad})"
