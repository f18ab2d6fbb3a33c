"""Every setting of a run, as plain dataclasses. Nothing here imports torch.

A preset is a YAML file that fills these dataclasses (`rmdm.presets`); the command line overrides single fields
(`--optim.lr 1e-4`); the result keeps to rules that span fields (`rmdm.rules`).
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
SamplerChoice = Literal["ancestral", "spaced", "max_prob", "margin", "entropy", "balanced", "analytic", "euler"]


@dataclass(kw_only=True, config=STRICT)
class TokenizerConfig:
    """How text becomes tokens."""

    kind: Literal["pretrained", "bpe", "word"] = "bpe"
    """`pretrained` loads `name`; `bpe` trains a byte-level BPE on the corpus; `word` splits on spaces (storyworld)."""
    name: str | None = None
    """For `pretrained`: a hub name, a folder that holds `tokenizer.json`, or the path of such a file."""
    add_special: bool = False
    """For `pretrained`: let the tokenizer frame each document in its own special tokens (BERT: [CLS] ... [SEP])."""
    separator: str | None = None
    """Token that ends a document; null takes the tokenizer's own end-of-text token."""
    vocab_size: int = 16384
    """For `bpe`: number of tokens, special ones included."""
    train_bytes: int = 200_000_000
    """For `bpe`: at most this many bytes of text, spread over the corpus, train the merges."""


@dataclass(kw_only=True, config=STRICT)
class DataConfig:
    """Where the text comes from and how it is cut in rows."""

    name: str = "text"
    """Short name of the corpus; the shard folder is called after it."""
    path: str | None = None
    """Local source: a file, a folder or a glob of .txt, .jsonl, .csv, .parquet (and .gz, .xz, .zst). Wins over
    `dataset` and `storyworld`."""
    dataset: str | None = None
    """Hugging Face dataset, by hub name or local folder."""
    dataset_config: str | None = None
    """Configuration (subset) of the Hugging Face dataset."""
    revision: str | None = None
    """Revision of the Hugging Face dataset; pin it for figures that must be repeatable."""
    split: str = "train"
    """Split of the Hugging Face dataset to train on."""
    valid_split: str | None = None
    """Split of the Hugging Face dataset to validate on; null holds out the last documents instead."""
    valid_path: str | None = None
    """Local source to validate on; null holds out the last documents of `path` instead."""
    column: str = "text"
    """Column (or JSON field) that holds the text."""
    document: Literal["line", "paragraph", "file"] = "line"
    """What a document is in .txt files: a line, a block between blank lines, or the whole file."""
    storyworld: Literal["mini", "full"] | None = None
    """Use the built-in storyworld corpus of this size."""
    stories: int = 100_000
    """For `storyworld`: number of stories to write, held-out ones included."""
    holdout: int = 1000
    """The last this many documents are held out for validation (unless a validation source is named)."""
    layout: Literal["padded", "packed"] = "packed"
    """`padded`: one document a row, cut or padded to `length`. `packed`: documents joined by separators, then cut."""
    length: int = 128
    """Tokens in a row, L."""
    wrap: bool = False
    """For `packed`: every row begins and ends with the separator, around `length - 2` tokens of text."""
    pad_in_loss: bool = True
    """For `padded`: whether PAD positions count in the loss and in every perplexity."""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    """How text becomes tokens."""
    dir: str | None = None
    """Folder of the token shards. Default: `data/<name>-<fingerprint of source, tokenizer and layout>`."""
    workers: int | None = None
    """Tokenising processes; default one a core."""

    @property
    def world(self) -> Literal["mini", "full"] | None:
        """The storyworld that the text is of, if it is."""
        return self.storyworld if self.path is None and self.dataset is None else None


@dataclass(kw_only=True, config=STRICT)
class ModelConfig:
    """The transformer."""

    layers: int = 12
    """Transformer blocks."""
    width: int = 768
    """Hidden size D."""
    heads: int = 12
    """Attention heads; `width / heads` must be even (RoPE turns pairs of channels)."""
    mlp_ratio: float = 4.0
    """Hidden size of the MLP over `width`."""
    dropout: float = 0.0
    """Dropout after attention and MLP, drawn from (seed, step, row)."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head."""
    learned_positions: bool = False
    """Add a learned embedding of the place in the row. RoPE alone cannot tell places apart in a fully masked row, which
    matters where rows have a beginning and an end (`padded`), and not where they are cut anywhere (`packed`)."""


@dataclass(kw_only=True, config=STRICT)
class OptimConfig:
    """AdamW, its schedule, and the weight average."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: momentum made orthogonal for the matrices inside the blocks, AdamW for the rest, at one learning rate."""
    lr: float = 3e-4
    """Peak learning rate."""
    warmup: int = 2500
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up: stay, or fall to `final_lr` x lr over the last `cooldown` of the steps."""
    cooldown: float = 1.0
    """For `cosine` and `linear`: share of the steps after warm-up over which the rate falls."""
    final_lr: float = 0.1
    """For `cosine` and `linear`: last learning rate over the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two averaging factors."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    ema: float = 0.9999
    """Decay of the weight average that validation, samples and the released model use; 0 turns it off. It warms up as
    min(ema, (1 + step) / (10 + step))."""


@dataclass(kw_only=True, config=STRICT)
class LoopConfig:
    """A training loop: how much, where, and how often it reports."""

    steps: int = 50_000
    """Optimiser steps."""
    batch: int = 512
    """Rows in an optimiser step, over all ranks and micro-batches."""
    micro_batch: int | None = None
    """Rows a rank takes through the model at once; null takes its whole share, or on a CPU about 8,192 tokens of it.
    Smaller saves memory, not results."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How `torchrun` ranks share the work: `ddp` copies the model, `fsdp` shards it (FSDP2); `auto` is `ddp`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast precision; `auto` is bf16 on a GPU and fp32 on a CPU."""
    compile: bool | None = None
    """Compile the step with torch.compile; null does so on a GPU only. On a CPU it takes half a minute and needs a C++
    compiler (without one the step is not compiled), and then about halves the time of a step."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    valid_every: int = 1000
    """Steps between figures on held-out rows; 0 for none but the last."""
    valid_rows: int = 1024
    """Rows of the held-out split a validation uses."""
    save_every: int = 1000
    """Steps between checkpoints; 0 for the last one only. The last two are kept."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra `tensorboard`)."""


@dataclass(kw_only=True, config=STRICT)
class TrainConfig(LoopConfig):
    """The training loop of stage II, with samples to watch."""

    recompute: bool = False
    """Keep only what goes between the blocks, and compute each block again in the backward pass: far less memory, about
    a third more work, the same results."""
    sample_every: int = 1000
    """Steps between printed samples; 0 for none."""
    sample_n: int = 2
    """Samples to print."""
    init_from: str | None = None
    """A trained run, or a released model, of the same trunk to start from: an RMDM may start from an MDLM."""


@dataclass(kw_only=True, config=STRICT)
class EncoderConfig:
    """The pretrained encoder whose embeddings become the latent."""

    name: str | None = None
    """A known name (`all-MiniLM-L6-v2`, `all-mpnet-base-v2`, `bert-base-uncased`, `answerdotai/ModernBERT-large`,
    `Qwen/Qwen3-Embedding-0.6B`), any other hub name, a local folder, or a run of this project. Null: no latent."""
    channels: int | None = None
    """Keep only this many first channels of its output (Qwen3-Embedding is trained to be cut so)."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the encoder; `auto` is bf16 on a GPU and on a CPU that multiplies it, else fp32."""
    batch_tokens: int = 65_536
    """Encoder tokens taken through at once, padding counted (a sixteenth of it on a CPU)."""


@dataclass(kw_only=True, config=STRICT)
class LatentConfig:
    """From the encoder's output to the latent of a row: G groups of D_z numbers."""

    groups: int = 4
    """Groups G a row's positions are pooled into: 1 for the whole row, `data.length` for one a token."""
    dim: int = 128
    """Dimensions D_z of a group after PCA."""
    fit_rows: int = 65_536
    """Rows of the training split, evenly spread, the PCA is fitted on."""
    source: Literal["cache", "online"] = "cache"
    """`cache` reads what `rmdm encode` and `rmdm align` wrote; `online` runs the encoder and the flow on every row each
    time it is used, as the paper does."""
    store: Literal["e", "z0"] = "e"
    """What the cache holds for all rows: embeddings `e` (and z_0 beside them), or only the projected `z0`; then e is
    stored for `fit_rows` rows, which the flow is trained on."""
    dtype: Literal["fp16", "int8"] = "fp16"
    """How numbers are stored; `int8` with one scale a dimension."""
    project: int | None = None
    """Dimensions d_z of a group after the fixed orthonormal projection that stage II sees; null keeps D_z."""
    sigma: float = 1.0
    """Standard deviation of the noise stage II adds to the projected latent."""
    draw: Literal["prior", "flow"] = "prior"
    """What stage II is conditioned on and how sampling draws it: z_0, from N(0, I) (`prior`, the paper's), or e, by the
    flow from noise (`flow`)."""
    flow: str | None = None
    """A run whose stage I to use, as several arms or seeds may; null: this run's own."""
    independent: bool = False
    """Draw z from N(0, I) in training too, whatever the text: the baseline that shows what a meaningful latent buys."""
    dropout: float = 0.1
    """Share of the rows that are trained without their latent, which gives an unconditional model and guidance."""
    blur: float = 0.0
    """Share of the groups whose latent training mixes with noise, each by its own amount. The model then trusts a group
    less that goes neither with the others nor with what is written, as groups of drawn latents sometimes do."""
    width: int = 128
    """Width C of the condition that is made of the latent and from which every block's modulation is made."""
    given: Literal["prior", "encode", "resample"] | None = "resample"
    """Where the latent comes from when some tokens are given: null (none), `prior` (drawn as without them), `encode`
    (from the given text), `resample` (several draws, weighted by how likely each makes the given tokens)."""


@dataclass(kw_only=True, config=STRICT)
class FlowModelConfig:
    """The transformer over the group rows that predicts the average velocity."""

    layers: int = 6
    """Transformer blocks."""
    width: int = 384
    """Hidden size."""
    heads: int = 6
    """Attention heads."""
    mlp_ratio: float = 4.0
    """Hidden size of the MLP over `width`."""


@dataclass(kw_only=True, config=STRICT)
class MeanFlowConfig:
    """Stage I: the flow between embeddings and a Gaussian."""

    recipe: Literal["robust", "paper"] = "robust"
    """`paper`: linear path, one-step map, stock sampling of (r, t). `robust`: what gives the most Gaussian z_0 on real
    embeddings (docs/results.md says what each part buys)."""
    direction: Literal["align", "draw", "both"] = "align"
    """Which way to train: from e to z_0 (`align`), from noise to e (`draw`), or both."""
    transport_steps: int | None = None
    """Steps of the map from e to z_0, one evaluation of the network each; null takes the recipe's own (paper: 1)."""
    often: tuple[float, float] | None = None
    """Where the flow practises most: half of the times of a step lie between these two, the others anywhere between 0
    (noise) and 1 (data); null: all anywhere (robust recipe)."""
    draw_steps: int = 4
    """Evaluations of a network in the map from noise to e."""
    guide_steps: int = 0
    """Training steps of a weaker copy of the flow, from which draws are led away (robust recipe, directions `draw` and
    `both`); 0: none. A tenth to a fifth of `train.steps` is a good number."""
    guidance: float = 1.5
    """How far draws are led away from the weaker copy: v = v_weak + guidance (v - v_weak). 1 is the flow's own law."""
    distil_steps: int = 4000
    """Training steps of the network that draws in few steps (robust recipe, directions `draw` and `both`); 0: none."""
    distil_rows: int = 131_072
    """Draws of the many-step flow that network learns from."""
    model: FlowModelConfig = dataclasses.field(default_factory=FlowModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: LoopConfig = dataclasses.field(default_factory=lambda: LoopConfig(steps=10_000, batch=1024))


@dataclass(kw_only=True, config=STRICT)
class SampleConfig:
    """Defaults for sampling."""

    steps: int = 16
    """Denoising steps K (an autoregressive model always takes one a token)."""
    sampler: SamplerChoice | None = None
    """`spaced` writes positions far apart in one step; `max_prob`, `margin`, `entropy`, `balanced` the surest positions
    first. null, or one that does not fit the model: the model's own law (`ancestral`; `analytic` for SEDD)."""
    spacing: int | None = None
    """How many masked positions apart those of a step lie in the `spaced` order; steps beyond that many write anew what
    stands there, seeing all the rest. null: as many as there are steps, so that each position is written once."""
    temperature: float = 1.0
    """Divides the logits."""
    null_temperature: float | None = None
    """The same where tokens are given and the text is written without a latent (`latent.given: null`); null:
    `temperature`, which suits texts that are led by one."""
    latent_temperature: float | Literal["paper"] = 1.0
    """tau: the latent is drawn from N(0, tau^2 I). 1 is the prior that training matches; `paper` is the narrower
    1 / sqrt(1 + sigma^2), which leaves out the noise of training."""
    guidance: float = 1.0
    """Weight on the latent, for models that learnt to do without it too: 1 is the model's own law, above 1 follows the
    latent more closely."""
    draws: int = 16
    """For `latent.given: resample`: latents drawn for each row, of which one is kept."""
    rounds: int = 32
    """For `latent.given: resample`: how often that is done, each time but the first near the one that was kept."""


@dataclass(kw_only=True, config=STRICT)
class Config:
    """A whole run."""

    name: str = "run"
    """Name of the preset; the default run directory is `runs/<name>`."""
    description: str = ""
    """One line for `rmdm presets`."""
    seed: int = 0
    """Every random draw of a run follows from it."""
    process: Literal["mdlm", "rmdm", "sedd", "ar"] = "mdlm"
    """Objective: masked diffusion (`mdlm`), the same given the latent (`rmdm`), score entropy (`sedd`), or
    autoregressive (`ar`)."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    encoder: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    latent: LatentConfig = dataclasses.field(default_factory=LatentConfig)
    meanflow: MeanFlowConfig = dataclasses.field(default_factory=MeanFlowConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)


ADAPTER = TypeAdapter(Config)
"""A config as plain values, and back; `rmdm.presets.decode` says what is wrong with them in one line."""


def needs_latents(config: Config) -> bool:
    """Whether stage II is trained on the latents of stage I."""
    return config.process == "rmdm" and not config.latent.independent


def stage_one_run(config: Config, out: Path) -> Path:
    """The run whose stage I is used."""
    return Path(config.latent.flow) if config.latent.flow is not None else out


def field_names(owner: Any, prefix: str = "") -> list[str]:
    """Dotted names of all fields of nested dataclasses."""
    names: list[str] = []
    for field in dataclasses.fields(owner):
        nested = dataclasses.is_dataclass(field.type)
        names += field_names(field.type, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return names
