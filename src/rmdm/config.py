"""Every setting of a run, as plain dataclasses. Nothing here imports torch.

A preset is a YAML file that fills these dataclasses; the command line overrides single fields (`--optim.lr 1e-4`);
the resolved result is written to the run directory, where it is itself a valid preset.
"""

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rmdm.errors import ConfigError, nearest

STRICT = ConfigDict(extra="forbid")


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
    """Rows a rank takes through the model at once; null takes its whole share. Smaller saves memory, not results."""
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
    """Precision of the encoder; `auto` is bf16 on a GPU and fp32 on a CPU."""
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
    """Steps of the map from e to z_0; null takes the recipe's own (paper: 1)."""
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
    sampler: Literal["ancestral", "max_prob", "margin", "entropy", "balanced", "analytic", "euler"] | None = None
    """`max_prob`, `margin`, `entropy`, `balanced` write the surest positions first. null, or one that does not fit
    the model: the model's own law (`ancestral`; `analytic` for SEDD)."""
    temperature: float = 1.0
    """Divides the logits."""
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
PRESETS = resources.files("rmdm") / "configs"
OPEN_BELOW = {"sample.latent_temperature"}
"""Fields whose lower bound is itself not allowed."""


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if p.name.endswith(".yaml"))


def load_config(ref: str | Path) -> Config:
    """The config that `ref` names: a preset of the package, a YAML file, or a run directory."""
    path = Path(ref)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path} has no config.yaml, so it is no run directory; give a preset, a YAML file or a run"
            )
        path = path / "config.yaml"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(
                f"{path} is not UTF-8 text, so it is no YAML config; give another or restore it"
            ) from None
        return decode(with_base(_parse_yaml(text, str(path)), str(path)), str(path))
    if str(ref) in preset_names():
        return decode(preset_values(str(ref)), f"preset {ref}")
    if path.suffix in {".yaml", ".yml"}:
        raise ConfigError(f"{ref} does not exist; give a YAML file, a run directory or a preset ('rmdm presets')")
    raise ConfigError(f"{str(ref)!r} is no preset, YAML file or run directory; {nearest(str(ref), preset_names())}")


def preset_values(name: str) -> dict[str, Any]:
    """The fields of a preset, those of its base included."""
    where = f"preset {name}"
    return with_base(_parse_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), where), where)


def with_base(values: Any, where: str) -> Any:
    """The fields of a file; one that names a preset as its `base` says only what it changes."""
    if not isinstance(values, dict) or values.get("base") is None:
        return values
    base = str(values["base"])
    if base not in preset_names():
        raise ConfigError(f"{where}: base={base!r} is no preset; {nearest(base, preset_names())}")
    return merged(preset_values(base), {name: value for name, value in values.items() if name != "base"})


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the changes put in, section by section."""
    both = {name: (base.get(name), value) for name, value in changes.items()}
    return base | {k: merged(a, b) if isinstance(a, dict) and isinstance(b, dict) else b for k, (a, b) in both.items()}


def decode(values: Any, where: str) -> Config:
    """Build and validate a config from plain values; the first mistake becomes one line that names its field."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected fields such as 'name:' and 'data:', found {type(values).__name__}")
    try:
        config = ADAPTER.validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error)}") from None
    validate(config)
    return config


def explain(error: ValidationError) -> str:
    """One line for the first mistake pydantic found, with the nearest field name when a field is unknown."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        prefix = field.rpartition(".")[0] + "." if "." in field else ""
        siblings = {n.removeprefix(prefix).split(".")[0] for n in field_names(Config) if n.startswith(prefix)}
        return f"unknown field {field!r}; {nearest(str(first['loc'][-1]), siblings)}"
    rule = first["msg"][0].lower() + first["msg"][1:]
    return f"{field}={first['input']!r}: {rule}"


def validate(config: Config) -> None:
    """Check the rules that span fields or bound values."""
    model, train, data, optim = config.model, config.train, config.data, config.optim
    tau = config.sample.latent_temperature
    infinity = float("inf")
    for name, value, low, high in [
        ("model.layers", model.layers, 1, 1000),
        ("model.width", model.width, 2, 65_536),
        ("model.heads", model.heads, 1, 4096),
        ("model.mlp_ratio", model.mlp_ratio, 0.1, 64),
        ("model.dropout", model.dropout, 0, 0.99),
        ("data.length", data.length, 2, 1_000_000),
        ("data.holdout", data.holdout, 0, infinity),
        ("data.stories", data.stories, 1, infinity),
        ("data.tokenizer.train_bytes", data.tokenizer.train_bytes, 1, infinity),
        ("data.tokenizer.vocab_size", data.tokenizer.vocab_size, 1, 2**31),
        *_bounds_of_loop("", train, optim),
        ("train.sample_every", train.sample_every, 0, infinity),
        ("train.sample_n", train.sample_n, 1, 10_000),
        ("sample.steps", config.sample.steps, 1, infinity),
        ("sample.temperature", config.sample.temperature, 1e-6, 1e6),
        ("sample.draws", config.sample.draws, 1, 1_000_000),
        ("sample.rounds", config.sample.rounds, 1, 1_000_000),
        ("sample.guidance", config.sample.guidance, -1000, 1000),
        ("sample.latent_temperature", 1 if tau == "paper" else tau, 0, 1000),
        ("seed", config.seed, 0, 2**63 - 1),
        *_bounds_of_stage_one(config),
    ]:
        is_open = name in OPEN_BELOW
        if not (low < value <= high if is_open else low <= value <= high):  # also false for nan
            if is_open:
                raise ConfigError(f"{name}={value} is not above {low} and at most {high:g}; use 1.0, for example")
            if high == infinity:
                raise ConfigError(f"{name}={value} is below {low}; use {low} or more")
            raise ConfigError(f"{name}={value} is outside {low}..{high:g}; use a value in that range")
    for prefix, net in (("model", model), ("meanflow.model", config.meanflow.model)):
        if net.width % 2 or net.width % net.heads or (net.width // net.heads) % 2:
            good = next((h for h in range(net.heads, 0, -1) if net.width % (2 * h) == 0), None)
            remedy = f"use {prefix}.heads={good}" if good else "use an even width"
            raise ConfigError(
                f"{prefix}.heads={net.heads} must divide {prefix}.width={net.width} into even parts; {remedy}"
            )
    if data.wrap and data.layout != "packed":
        raise ConfigError(f"data.wrap needs data.layout=packed, not {data.layout}; drop one of them")
    for prefix, loop in (("", train), ("meanflow.", config.meanflow.train)):
        if loop.micro_batch is not None and not 1 <= loop.micro_batch <= loop.batch:
            raise ConfigError(
                f"{prefix}train.micro_batch={loop.micro_batch} is outside 1..{prefix}train.batch={loop.batch}"
            )
    groups, project = config.latent.groups, config.latent.project
    if (config.encoder.name is not None or config.process == "rmdm") and data.length % groups:
        divisors = [g for g in range(1, data.length + 1) if data.length % g == 0]
        near = [g for g in divisors if g < groups][-1:] + [g for g in divisors if g > groups][:1]
        raise ConfigError(
            f"latent.groups={groups} does not divide data.length={data.length}; use a divisor such as "
            f"{' or '.join(map(str, near))}"
        )
    if project is not None and project > config.latent.dim:
        raise ConfigError(f"latent.project={project} is above latent.dim={config.latent.dim}; use at most that")
    draw_steps = config.meanflow.draw_steps
    if draw_steps != 1 and draw_steps % 2:
        raise ConfigError(
            f"meanflow.draw_steps={draw_steps} is odd, and Heun's rule takes two a step; use 4, for example"
        )
    if config.latent.draw == "flow" and config.latent.store == "z0":
        raise ConfigError("latent.draw=flow needs the embeddings of all rows; use latent.store=e")
    if config.latent.source == "online" and config.latent.store == "z0":
        raise ConfigError("latent.store=z0 needs latent.source=cache: whoever encodes online stores nothing; drop one")


def _bounds_of_loop(prefix: str, train: LoopConfig, optim: OptimConfig) -> list[tuple[str, float, float, float]]:
    """(name, value, low, high) of a training loop and its optimiser."""
    infinity = float("inf")
    return [
        (f"{prefix}train.steps", train.steps, 1, 10**12),
        (f"{prefix}train.batch", train.batch, 1, 10_000_000),
        (f"{prefix}train.log_every", train.log_every, 1, infinity),
        (f"{prefix}train.valid_every", train.valid_every, 0, infinity),
        (f"{prefix}train.save_every", train.save_every, 0, infinity),
        (f"{prefix}train.valid_rows", train.valid_rows, 1, infinity),
        (f"{prefix}optim.lr", optim.lr, 1e-12, 1000),
        (f"{prefix}optim.warmup", optim.warmup, 0, infinity),
        (f"{prefix}optim.cooldown", optim.cooldown, 0, 1),
        (f"{prefix}optim.final_lr", optim.final_lr, 0, 1),
        (f"{prefix}optim.betas[0]", optim.betas[0], 0, 0.999999),
        (f"{prefix}optim.betas[1]", optim.betas[1], 0, 0.999999999),
        (f"{prefix}optim.eps", optim.eps, 1e-30, 1),
        (f"{prefix}optim.weight_decay", optim.weight_decay, 0, 1000),
        (f"{prefix}optim.clip", optim.clip, 0, infinity),
        (f"{prefix}optim.ema", optim.ema, 0, 0.999999999),
    ]


def _bounds_of_stage_one(config: Config) -> list[tuple[str, float, float, float]]:
    """(name, value, low, high) of encoder, latent and flow."""
    infinity = float("inf")
    encoder, latent, flow = config.encoder, config.latent, config.meanflow
    return [
        ("encoder.channels", 1 if encoder.channels is None else encoder.channels, 1, infinity),
        ("encoder.batch_tokens", encoder.batch_tokens, 16, infinity),
        ("latent.groups", latent.groups, 1, infinity),
        ("latent.dim", latent.dim, 1, 65_536),
        ("latent.fit_rows", latent.fit_rows, 2, infinity),
        ("latent.project", 1 if latent.project is None else latent.project, 1, infinity),
        ("latent.sigma", latent.sigma, 0, 1000),
        ("latent.dropout", latent.dropout, 0, 0.99),
        ("latent.blur", latent.blur, 0, 1),
        ("latent.width", latent.width, 1, 65_536),
        ("meanflow.transport_steps", 1 if flow.transport_steps is None else flow.transport_steps, 1, 10_000),
        ("meanflow.often[0]", flow.often[0] if flow.often else 0, 0, 1),
        ("meanflow.often[1]", flow.often[1] if flow.often else 1, flow.often[0] if flow.often else 0, 1),
        ("meanflow.draw_steps", flow.draw_steps, 1, 10_000),
        ("meanflow.guide_steps", flow.guide_steps, 0, 10**12),
        ("meanflow.guidance", flow.guidance, 0, 100),
        ("meanflow.distil_steps", flow.distil_steps, 0, 10**12),
        ("meanflow.distil_rows", flow.distil_rows, 16, 10**9),
        ("meanflow.model.layers", flow.model.layers, 1, 1000),
        ("meanflow.model.width", flow.model.width, 2, 65_536),
        ("meanflow.model.heads", flow.model.heads, 1, 4096),
        ("meanflow.model.mlp_ratio", flow.model.mlp_ratio, 0.1, 64),
        *_bounds_of_loop("meanflow.", flow.train, flow.optim),
    ]


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


def to_yaml(config: Config) -> str:
    """The config as YAML, every field spelled out; `decode` reads it back."""
    return yaml.safe_dump(ADAPTER.dump_python(config, mode="json"), sort_keys=False, allow_unicode=True, width=120)


def save_config(config: Config, run: Path) -> None:
    """Write the config into a run directory, whole or not at all."""
    run.mkdir(parents=True, exist_ok=True)
    temporary = run / ".config.yaml.tmp"
    temporary.write_text(to_yaml(config), encoding="utf-8")
    temporary.replace(run / "config.yaml")


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where} is not valid YAML{line}: {getattr(error, 'problem', error)}") from None
