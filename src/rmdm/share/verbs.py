"""`rmdm export | push | pull | card`: flags, and the functions behind them."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show
from rmdm.share.manifest import total_bytes
from rmdm.share.names import SHIPPED, SHIPPED_HELP, hub_name, is_here, is_hub_name

MODEL_HELP = "a run directory, a released folder or a hub name"


def export_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `export`."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("dir", help="the folder to make, which must not exist or be empty")
    add_release_flags(parser)


def push_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `push`."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("target", help="owner/name on the Hugging Face hub, or a folder (./name)")
    parser.add_argument("--private", action="store_true", help="a repo that is made for it is private")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch, made if it is not there (default: main)")
    add_release_flags(parser)


def pull_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `pull`."""
    parser.add_argument("model", help="owner/name on the Hugging Face hub, or a released folder")
    parser.add_argument("dir", nargs="?", help="the folder to make (default: the last part of the name)")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")


def card_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `card`."""
    parser.add_argument("model", nargs="?", help=f"{MODEL_HELP} ({SHIPPED_HELP})")
    parser.add_argument("--out", metavar="FILE", help="write it there instead of printing it")
    add_statements(parser)


def add_release_flags(parser: argparse.ArgumentParser) -> None:
    """How a release is written."""
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32", "int8"], help="how weights are stored (default: as they are)"
    )
    parser.add_argument(
        "--own-figures", action="store_true", help="leave out figures taken before the weights were rounded"
    )
    add_statements(parser)


def add_statements(parser: argparse.ArgumentParser) -> None:
    """What only the author knows: the licence, in both spellings, and where the text comes from."""
    parser.add_argument(
        "--licence",
        "--license",
        metavar="NAME",
        help="of the weights, for example cc-by-4.0 (default: stated as unknown)",
    )
    parser.add_argument(
        "--text-note", metavar="TEXT", help="for the card: where the training text comes from, and its licence"
    )


def run_export(args: argparse.Namespace, show: Show) -> Outcome:
    """`rmdm export`: a run to a folder that can be shared."""
    from rmdm.share.export import export

    out = Path(args.dir).expanduser()
    made = export(args.model, out, show, **release_options(args))
    size = total_bytes(made.files.values())
    show(f"export: {out}, {len(made.files)} files, {size / 2**20:.1f} MiB; load it with rmdm.load({str(out)!r})")
    return {"folder": str(out), "files": sorted(made.files), "bytes": size}


def run_push(args: argparse.Namespace, show: Show) -> Outcome:
    """`rmdm push`: a model to the hub, or to a folder."""
    name = hub_name(args.target)
    if name is None:
        if not args.target.startswith((".", "/", "~")) and not is_here(Path(args.target)):
            raise ConfigError(
                f"{args.target!r} is neither owner/name on the hub (letters, digits, - _ .) nor a folder here; "
                f"use ./{args.target.strip('/')} for a new folder"
            )
        if is_hub_name(args.target):
            show(f"{args.target} is a folder here, so it is not looked for on the hub")
        for flag in ("private", "revision"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--{flag} means nothing for the folder {args.target}; leave it out, or use owner/name"
                )
        return run_export(argparse.Namespace(**(vars(args) | {"dir": args.target})), show)
    from rmdm.share.export import export
    from rmdm.share.remote import check_can_push, push

    check_can_push(name)
    with tempfile.TemporaryDirectory(prefix="rmdm-push-") as place:
        folder = Path(place) / name.split("/")[1]
        made = export(args.model, folder, show, **release_options(args), name=name)
        message = f"{made.config.name}, step {made.meta.get('step')}"
        done = push(folder, name, message, private=args.private, revision=args.revision)
    at = f", revision={args.revision!r}" if args.revision else ""
    show(f"push: {done.url}, commit {done.commit[:12]}; load it with rmdm.load({name!r}{at})")
    return {"name": name, "url": done.url, "commit": done.commit, "files": sorted(made.files)}


def run_pull(args: argparse.Namespace, show: Show) -> Outcome:
    """`rmdm pull`: a model from the hub, or from a folder, to a folder."""
    from rmdm.hub import find_model
    from rmdm.share.export import check_free, copy_release
    from rmdm.share.manifest import MANIFEST, PAGE, is_edited, verify

    name = hub_name(args.model)
    out = Path(args.dir or Path(args.model).name).expanduser()
    if name is None and out.resolve() == Path(args.model).expanduser().resolve():
        raise ConfigError(f"{args.model} is here already; give another folder to pull it to")
    check_free(out)
    folder = find_model(args.model, args.revision)
    if name is None and not (folder / MANIFEST).is_file():
        raise ConfigError(f"{args.model} is a run, and no release; use 'rmdm export {args.model} {out}'")
    copy_release(folder, out)
    files = verify(out)
    if is_edited(out, files):
        show(f"note: {out / PAGE} was edited after the release, or deleted; its words are not those that were released")
    if not files:
        show(f"note: {args.model} has no manifest, so that nothing could be verified")
    show(f"pull: {out}, {len(files)} files verified; load it with rmdm.load({str(out)!r})")
    return {"folder": str(out), "files": sorted(files)}


def run_card(args: argparse.Namespace, show: Show) -> Outcome:
    """`rmdm card`: what a model is, where it comes from and what was measured of it."""
    import dataclasses

    from rmdm.report.table import short_paths
    from rmdm.share.about import open_source
    from rmdm.share.card import card

    if args.out is not None and Path(args.out).is_dir():
        raise ConfigError(f"--out {args.out} is a folder; name a file, such as {Path(args.out) / 'README.md'}")
    source = open_source(args.model)
    source = dataclasses.replace(source, about=source.about.stating(**statements(args)))
    text = card(source, short_paths(args.model or SHIPPED))
    if args.out is None:
        show(text.rstrip("\n"))
        return {"card": text}
    Path(args.out).write_text(text, encoding="utf-8")
    show(f"card: {args.out}")
    return {"card": text, "out": args.out}


def release_options(args: argparse.Namespace) -> dict[str, Any]:
    """How a release is written, as `export` takes it."""
    return {"dtype": args.dtype, "own_figures": args.own_figures, **statements(args)}


def statements(args: argparse.Namespace) -> dict[str, str | None]:
    """What the author says of the weights and the text, each in one line; None for what was not said."""
    said: dict[str, str | None] = {}
    for name, example in (("licence", "one such as cc-by-4.0"), ("text_note", "a sentence")):
        value = getattr(args, name)
        said[name] = None if value is None else " ".join(value.split())
        if said[name] == "":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is empty; give {example}, or leave the flag out")
    return said


VERBS = {
    "export": (export_flags, run_export),
    "push": (push_flags, run_push),
    "pull": (pull_flags, run_pull),
    "card": (card_flags, run_card),
}
"""What `rmdm.verbs` has of each: its flags, and the function behind it."""
