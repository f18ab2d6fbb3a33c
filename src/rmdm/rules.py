"""The rules a config must keep beyond its types: bounds of values, and what settings ask of each other."""

from rmdm.config import Config, LoopConfig, OptimConfig
from rmdm.errors import ConfigError
from rmdm.request import RANGES

OPEN_BELOW = {"sample.latent_temperature"}
"""Fields whose lower bound is itself not allowed."""


def validate(config: Config) -> None:
    """Check the rules that span fields or bound values."""
    model, train, data, optim = config.model, config.train, config.data, config.optim
    if config.name in ("", ".", "..") or set(config.name) & set("/\\\0"):
        raise ConfigError(f"name={config.name!r} is no name of a folder; use one without / and \\, such as 'first'")
    tau, without = config.sample.latent_temperature, config.sample.null_temperature
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
        ("sample.steps", config.sample.steps, *RANGES["steps"][:2]),
        ("sample.spacing", 2 if config.sample.spacing is None else config.sample.spacing, *RANGES["spacing"][:2]),
        ("sample.temperature", config.sample.temperature, 1e-6, 1e6),
        ("sample.null_temperature", 1 if without is None else without, 1e-6, 1e6),
        ("sample.draws", config.sample.draws, *RANGES["draws"][:2]),
        ("sample.rounds", config.sample.rounds, *RANGES["rounds"][:2]),
        ("sample.guidance", config.sample.guidance, -1000, 1000),
        ("sample.latent_temperature", 1 if tau == "paper" else tau, 0, 1000),
        ("seed", config.seed, 0, 2**63 - 1),
        *_bounds_of_stage_one(config),
    ]:
        is_open = name in OPEN_BELOW
        if not (low < value <= high if is_open else low <= value <= high):  # also false for nan
            if is_open:
                raise ConfigError(f"{name}={value} is not above {low} and at most {plain(high)}; use 1.0, for example")
            if high == infinity:
                raise ConfigError(f"{name}={value} is below {low}; use {low} or more")
            raise ConfigError(f"{name}={value} is outside {low}..{plain(high)}; use a value in that range")
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
    if config.latent.draw == "flow" and config.latent.store == "z0":
        raise ConfigError("latent.draw=flow needs the embeddings of all rows; use latent.store=e")
    if config.latent.source == "online" and config.latent.store == "z0":
        raise ConfigError("latent.store=z0 needs latent.source=cache: whoever encodes online stores nothing; drop one")


def plain(bound: float) -> str:
    """A bound as people write it: whole numbers with all their digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


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
