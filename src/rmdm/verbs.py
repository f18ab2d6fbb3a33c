"""The verbs of `rmdm VERB ...`: what each is, its flags, and the function behind it.

Only what parsing needs is imported here; the modules that do the work are imported when a verb runs.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rmdm.arguments import as_flag, check_out
from rmdm.errors import ConfigError, DataError, OtherShardsError
from rmdm.kinds import Outcome, Show, add_kinds


@dataclass(frozen=True)
class Verb:
    """A verb: what it does in a few words, its own flags, and the function behind it."""

    help: str
    takes_config: bool
    flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, dict[str, Any], Show], Outcome]
    takes_more: bool = False
    """Whether it takes several presets."""
    sections: tuple[str, ...] = ()
    """For those that take a preset: the sections of settings the verb uses; none named: all."""
    lasts: bool = False
    """Whether it goes on when nobody reads its lines any more: it takes long, and what it makes is on the disk."""


PRESET_HELP = "PRESET: a preset's name, a YAML file or a run directory. FIELD: one of the settings below."


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag every verb has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def preset_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the verbs that work on a preset."""
    parser.usage = "%(prog)s PRESET [--out OUT] [--json] [--FIELD VALUE ...]"
    parser.epilog = PRESET_HELP
    parser.add_argument("--out", help="run directory (default: runs/<name>)")


def run_out(ref: str, out: str | None, config: Any) -> Path:
    """The run directory: what --out says, the run that was named, or runs/<name>."""
    if out:
        return Path(out)
    return Path(ref) if (Path(ref) / "config.yaml").is_file() else Path("runs") / config.name


@contextlib.contextmanager
def advice_for(ref: str, out: Path | None = None) -> Iterator[None]:
    """Errors say what to do about the preset, file or run that was named, not about any."""
    try:
        yield
    except OtherShardsError as error:
        if not (Path(ref) / "checkpoints").exists():
            raise
        remedy = f"{ref} was trained on these, so leave that as it is, or give a preset and another --out"
        raise DataError(f"{error.difference}; {remedy}") from None
    except DataError as error:
        any_preset = f"'rmdm align PRESET --out {out}'"
        if any_preset not in str(error):
            raise
        raise DataError(str(error).replace(any_preset, f"'rmdm align {ref} --out {out}'")) from None


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `run`."""
    train_flags(parser)
    parser.usage = (
        "%(prog)s PRESET [PRESET ...] [--out OUT] [--resume RESUME] [--init-from RUN] [--json] [--FIELD VALUE ...]"
    )


def run_all(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm run`: every stage of one preset or of several, skipping what is done."""
    from rmdm.presets import resolve_config
    from rmdm.stages import is_main, run_presets

    check_out(args.out)
    refs = [args.preset, *args.more]
    configs = [resolve_config(ref, overrides) for ref in refs]
    if len(refs) == 1:
        with advice_for(args.preset):
            return run_presets([(configs[0], run_out(args.preset, args.out, configs[0]))], args.resume, show)
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of {', '.join(refs)} have the same name; give each preset once")
    # Several runs lie side by side under --out.
    done = run_presets([(c, Path(args.out or "runs") / c.name) for c in configs], args.resume, show)
    if done.get("exit") and is_main():
        show(f"this and the others of the command: rmdm {shlex.join(sys.argv[1:])}")
    return done


def run_prepare(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm prepare`: text to token shards."""
    from rmdm.presets import resolve_config
    from rmdm.stages import prepare_stage

    check_out(args.out)
    config = resolve_config(args.preset, overrides)
    with advice_for(args.preset):
        return prepare_stage(config, show, Path(args.out) if args.out else None)


def encode_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `encode`, which writes beside the shards."""
    parser.usage = "%(prog)s PRESET [--json] [--FIELD VALUE ...]"
    parser.epilog = PRESET_HELP


def run_encode(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm encode`: token shards to embeddings."""
    from rmdm.presets import resolve_config
    from rmdm.stages import encode_stage

    config = resolve_config(args.preset, overrides)
    with advice_for(args.preset):
        return encode_stage(config, show)


def align_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `align`."""
    preset_flags(parser)
    parser.usage = "%(prog)s PRESET [--out OUT] [--resume RESUME] [--json] [--FIELD VALUE ...]"
    parser.add_argument("--resume", default="auto", help="auto (default), never, or a checkpoint's folder")


def run_align(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm align`: embeddings to a Gaussian latent."""
    from rmdm.presets import resolve_config
    from rmdm.stages import align_stage

    check_out(args.out)
    config = resolve_config(args.preset, overrides)
    with advice_for(args.preset):
        return align_stage(config, run_out(args.preset, args.out, config), args.resume, show)


def latents_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `latents`."""
    parser.add_argument("run", help="a run directory that 'rmdm align' has finished")
    parser.add_argument("beside", nargs="*", help="other runs on the same embeddings, for the same table")
    parser.add_argument("--rows", type=int, help="held-out rows to measure (default 16384; as many more for training)")
    parser.add_argument("--no-pictures", action="store_true", help="draw no figures (they take UMAP a minute or two)")
    parser.add_argument("--quick", action="store_true", help="no draws and no pictures")


def run_latents(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm latents`: the report on stage I."""
    from rmdm.stages import latents_stage

    if args.rows is not None and args.rows < 80:
        raise ConfigError(f"--rows {args.rows} is too few to measure anything; use 80 or more")
    runs = [Path(run) for run in [args.run, *args.beside]]
    return latents_stage(
        runs, show, rows=args.rows, draws=not args.quick, pictures=not (args.quick or args.no_pictures)
    )


def train_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `train`."""
    align_flags(parser)
    parser.usage = "%(prog)s PRESET [--out OUT] [--resume RESUME] [--init-from RUN] [--json] [--FIELD VALUE ...]"
    parser.add_argument("--init-from", help="a trained model of the same trunk to start from (--train.init_from)")


def run_train(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm train`: token shards to a model."""
    from rmdm.presets import resolve_config
    from rmdm.stages import train_stage

    check_out(args.out)
    config = resolve_config(args.preset, overrides)
    out = run_out(args.preset, args.out, config)
    with advice_for(args.preset, out):
        return train_stage(config, out, args.resume, show)


def eval_flags(parser: argparse.ArgumentParser) -> None:
    """Kinds of `eval`."""
    from rmdm.evaluation.verbs import KINDS

    add_kinds(parser, KINDS, add_json)


def run_eval(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm eval KIND`: measure trained models."""
    from rmdm.evaluation.verbs import KINDS

    return KINDS[args.kind].run(args, show)


def bench_flags(parser: argparse.ArgumentParser) -> None:
    """Kinds of `bench`."""
    from rmdm.bench import KINDS

    add_kinds(parser, KINDS, add_json)


def run_bench(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm bench KIND`: how fast it is."""
    from rmdm.bench import KINDS

    return KINDS[args.kind].run(args, show)


def report_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `report`."""
    from rmdm.report.verb import flags

    flags(parser)


def run_report(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm report`: everything measured of some runs on one page."""
    from rmdm.report.verb import run

    return run(args, show)


def sample_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `sample`."""
    from rmdm.share.names import SHIPPED_HELP
    from rmdm.share.verbs import MODEL_HELP

    parser.add_argument("model", nargs="?", help=f"{MODEL_HELP} ({SHIPPED_HELP})")
    parser.add_argument("--n", type=int, default=4, help="number of texts (default 4)")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's; AR takes one a token)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same texts (default 0)")
    parser.add_argument("--temperature", type=float, help="divides the logits (default: the model's)")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that hold this much probability")
    parser.add_argument(
        "--sampler",
        help="ancestral, spaced, max_prob, margin, entropy, balanced; of sedd analytic, euler (default own)",
    )
    parser.add_argument(
        "--remask",
        type=float,
        help="share of unsure tokens that the first step takes back, later ones less (confidence orders)",
    )
    parser.add_argument(
        "--spacing", type=int, help="positions between those of a step; steps beyond so many write anew (spaced)"
    )
    latent = parser.add_argument_group("latent (rmdm models)")
    latent.add_argument("--guidance", type=float, help="weight on the latent (default: the model's)")
    latent.add_argument(
        "--latent-temperature", type=tau_of, metavar="TAU", help="scales its noise; a number or 'paper'"
    )
    latent.add_argument("--latent-seed", type=int, help="seed of the latents (default: --seed)")
    latent.add_argument("--like", metavar="TEXT", help="write with the latent of this text")
    latent.add_argument("--between", nargs=2, metavar=("A", "B"), help="write in between of two texts")
    latent.add_argument("--weight", type=float, help="for --between: 0 is A, 1 is B (default 0.5)")
    given = parser.add_argument_group("given tokens")
    given.add_argument("--infill", metavar="TEXT", help="fill the gaps of a text: [MASK], or [MASK:3] for three tokens")
    given.add_argument("--prefix", metavar="TEXT", help="what the texts begin with")
    given.add_argument("--suffix", metavar="TEXT", help="what the texts end with")
    given.add_argument("--tokens", type=int, help="tokens between prefix and suffix, or after the prefix")
    given.add_argument("--given", help="the latent then: null, prior, encode or resample (default: the model's)")
    given.add_argument("--draws", type=int, help="for --given resample: latents to choose from (default: the model's)")
    given.add_argument(
        "--rounds", type=int, help="for --given resample: how often one is chosen (default: the model's)"
    )
    parser.add_argument("--show", action="store_true", help="watch the denoising in the terminal")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def tau_of(word: str) -> Any:
    """A number, or `paper`."""
    try:
        return word if word == "paper" else float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is neither a number nor 'paper'") from None


def run_sample(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm sample`: a model to text."""
    from rmdm.request import Request

    names = [field.name for field in fields(Request) if hasattr(args, field.name)]
    values = {name: getattr(args, name) for name in names}
    values["between"] = tuple(args.between) if args.between is not None else None
    try:
        request = Request(**values)
        request.check()
        from rmdm.stages import sample_stage

        return sample_stage(args.model, request, args.device, None if args.json else show, frames=args.show)
    except ConfigError as error:
        raise ConfigError(as_flag(str(error), [*names, "device"], getattr(error, "names", ()))) from None


def serve_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`."""
    from rmdm.serving.verb import flags

    flags(parser)


def run_serve(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm serve`: the page and the API."""
    from rmdm.serving.verb import run

    return run(args, show)


def share_flags(verb: str, parser: argparse.ArgumentParser) -> None:
    """Flags of a verb that shares models."""
    from rmdm.share.verbs import VERBS as SHARE

    SHARE[verb][0](parser)


def run_share(verb: str, args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm export`, `push`, `pull` and `card`: models to and from others."""
    from rmdm.share.verbs import VERBS as SHARE

    return SHARE[verb][1](args, show)


def share_verb(name: str, text: str) -> Verb:
    """One of them, not imported until it is asked for."""
    return Verb(text, False, partial(share_flags, name), partial(run_share, name))


def presets_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `presets`."""
    parser.add_argument("name", nargs="?", help="print this preset in full, ready to be saved and edited")


def run_presets(args: argparse.Namespace, overrides: dict[str, Any], show: Show) -> Outcome:
    """`rmdm presets`: what is on offer."""
    from rmdm.presets import load_config, preset_names, to_yaml

    if args.name:
        text = to_yaml(load_config(args.name))
        show(text)
        return {"name": args.name, "yaml": text}
    listing = [{"name": name, "description": load_config(name).description} for name in preset_names()]
    width = max(len(entry["name"]) for entry in listing)
    for entry in listing:
        show(f"{entry['name']:<{width}}  {entry['description']}")
    return {"presets": listing}


STAGE_ONE = ("data", "encoder", "latent", "meanflow")
"""The sections that stage I is made of."""
VERBS: dict[str, Verb] = {
    "run": Verb("run whole presets, stage by stage, skipping what is done", True, run_flags, run_all, True, lasts=True),
    "prepare": Verb("tokenise a corpus into shards", True, preset_flags, run_prepare, sections=("data",), lasts=True),
    "encode": Verb(
        "embed every row with a pretrained encoder", True, encode_flags, run_encode, sections=STAGE_ONE[:-1], lasts=True
    ),
    "align": Verb(
        "train the flow that makes the embeddings Gaussian",
        True,
        align_flags,
        run_align,
        sections=STAGE_ONE,
        lasts=True,
    ),
    "latents": Verb("report how Gaussian the latents of a run are", False, latents_flags, run_latents, lasts=True),
    "train": Verb("train a model on prepared shards", True, train_flags, run_train, lasts=True),
    "eval": Verb("measure trained models", False, eval_flags, run_eval, lasts=True),
    "bench": Verb("measure speed and memory", False, bench_flags, run_bench),
    "report": Verb("put everything measured of some runs on one page", False, report_flags, run_report),
    "sample": Verb("write text with a trained model", False, sample_flags, run_sample),
    "serve": Verb("a page and an OpenAI-compatible API for models", False, serve_flags, run_serve),
    "export": share_verb("export", "put a trained model in a folder that can be shared"),
    "push": share_verb("push", "share a model on the Hugging Face hub, or in a folder"),
    "pull": share_verb("pull", "get a shared model, verified"),
    "card": share_verb("card", "print a model's card: settings, data, figures, licence"),
    "presets": Verb("list the presets, or print one", False, presets_flags, run_presets),
}
