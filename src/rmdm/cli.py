"""The command line: finds the verb of `rmdm VERB ...`, reads its flags and settings, and turns mistakes into one line.

What the verbs are is in `rmdm.verbs`.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from rmdm import __version__
from rmdm.errors import ConfigError, RMDMError, closest, nearest
from rmdm.kinds import Outcome
from rmdm.streams import put, standing, unheard
from rmdm.verbs import VERBS, Verb, add_json


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are `ConfigError`s of one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and leaving."""
        raise ConfigError(f"{message}; see '{self.prog} --help'")


COMPILER_REMARKS = ("TensorFloat32 tensor cores for float32 matrix multiplication available", "The CUDA Graph is empty")
"""What torch.compile warns of on a GPU though nothing is wrong: float32 was asked for; a graph had nothing to hold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 on success, 2 on bad input, 130 after Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model writes what not every terminal can show
    lasts = bool(args) and args[0] in VERBS and VERBS[args[0]].lasts
    with standing(), unheard() if lasts else contextlib.nullcontext():
        return answer(args)


def answer(args: list[str]) -> int:
    """Run a verb; mistakes become one line, and the exit code tells."""
    wants_json = "--json" in args
    for remark in COMPILER_REMARKS:
        warnings.filterwarnings("ignore", message=remark, category=UserWarning)
    code, outcome = 0, None
    try:
        outcome = dispatch(args, wants_json)
        sys.stdout.flush()
        code = int(outcome.get("exit", 0)) if outcome else 0
    except RMDMError as error:
        code, outcome = 2, {"error": str(error)}
    except BrokenPipeError:  # `rmdm sample | head -1` has what it wants
        return 1
    except OSError as error:
        # What no stage foresaw: an unwritable folder, a path through a file, a full disk.
        place = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        code, outcome = 2, {"error": f"{reason}{place}; check that the path exists, can be written and has room"}
    except Exception as error:
        said = unforeseen(error)
        if said is None:
            raise
        code, outcome = 2, {"error": said}
    except KeyboardInterrupt:
        resumes = args[:1] not in (["sample"], ["serve"], ["bench"])
        code, outcome = 130, {"error": f"interrupted{'; the same command goes on where this one stopped' * resumes}"}
    if outcome is not None and "error" in outcome:
        put(f"rmdm: {outcome['error']}", sys.stderr)
    if wants_json and outcome is not None and os.environ.get("RANK", "0") == "0":
        lost = put(json.dumps({"ok": code == 0, **outcome}), sys.stdout)
        if isinstance(lost, BrokenPipeError):
            return code or 1
        if lost is not None:
            remedy = "make room there, or write it elsewhere, and run the same command again"
            put(f"rmdm: the JSON result cannot be written to standard output ({lost.strerror}); {remedy}", sys.stderr)
            return code or 2
    return code


def unforeseen(error: Exception) -> str | None:
    """A line for what a machine or a path may do to any stage; None for a fault of the program."""
    if is_out_of_memory(error):
        return "out of memory; ask for less at a time (fewer texts, a smaller batch or model)"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # from Path.resolve
        return (
            f"{str(error).removeprefix('Symlink loop from ')} is a link that leads back to itself; name another place"
        )
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home"):  # from Path.expanduser
        return "a path begins with ~ and the name of nobody here; spell it out"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch (which is not imported for it) could not get the memory it asked for."""
    words = ("can't allocate memory", "not enough memory")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def dispatch(args: list[str], wants_json: bool) -> Outcome | None:
    """Find the verb, parse its flags and run it."""
    if not args or args[0] in {"-h", "--help", "help"}:
        print(usage())
        return None
    if args[0] in {"-V", "--version"}:
        print(f"rmdm {__version__}")
        return None
    verb, parser = find_verb(args[0])
    if verb.takes_config and {"-h", "--help"} & set(args):
        print(parser.format_help())
        print_config_help(args, verb.sections)
        return None
    known, overrides = parse(args)

    def show(text: str) -> None:
        # With --json, standard output carries the object alone; people read standard error. Which stream that is is
        # asked line by line: while a bar is drawn it is one that writes above the bar.
        print(text, file=sys.stderr if wants_json else sys.stdout, flush=True)

    return verb.run(known, overrides, show)


def find_verb(name: str) -> tuple[Verb, Parser]:
    """A verb and the parser of its flags."""
    if name not in VERBS:
        raise ConfigError(f"unknown verb {name!r}; {nearest(name, VERBS)}")
    parser = Parser(prog=f"rmdm {name}", description=VERBS[name].help, allow_abbrev=False)
    add_json(parser)
    VERBS[name].flags(parser)
    return VERBS[name], parser


def parse(args: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The flags of a command, its presets among them, and its overrides of the config."""
    verb, parser = find_verb(args[0])
    own = own_flags(parser)
    known, rest = parser.parse_known_args(list(args[1:]))
    if verb.takes_config:
        # argparse cannot tell the preset from the value of an override, so the preset is the first word left over.
        if not rest or rest[0].startswith("-"):
            raise ConfigError(f"'rmdm {args[0]}' needs a preset first, for example 'rmdm {args[0]} storyworld-mini'")
        known.preset = rest.pop(0)
        known.more = []
        while verb.takes_more and rest and not rest[0].startswith("-"):
            known.more.append(rest.pop(0))
    if not verb.takes_config and rest:
        raise ConfigError(f"unknown argument {rest[0]!r} for 'rmdm {args[0]}'; {nearest(rest[0].split('=')[0], own)}")
    refuse_empty(known)
    overrides = read_overrides(rest, own)
    if getattr(known, "init_from", None) is not None:
        overrides["train.init_from"] = known.init_from
    return known, overrides


PLACES = ("preset", "more", "model", "models", "run", "runs", "beside", "dir", "target", "path")
"""Arguments that name a preset, a model or a folder."""


def refuse_empty(known: argparse.Namespace) -> None:
    """Raise `ConfigError` where a name is empty, which as a path would mean the folder one is in."""
    for name in PLACES:
        value = getattr(known, name, None)
        if "" in (value if isinstance(value, list) else [value]):
            raise ConfigError("'' names no preset, model or folder; name one, such as runs/first")
    if getattr(known, "out", None) == "":
        raise ConfigError("--out is empty; name a place, such as runs/first, or leave the flag out")


def own_flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag a parser knows, those of its kinds too."""
    flags = {flag for action in parser._actions for flag in action.option_strings}
    kinds = [action.choices or {} for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return flags.union(*(own_flags(one) for of in kinds for one in of.values()))


def usage() -> str:
    """The text of `rmdm --help`."""
    lines = "\n".join(f"  {name:<9} {verb.help}" for name, verb in VERBS.items())
    return (
        f"rmdm {__version__}: language models that write many tokens per step\n\nusage: rmdm VERB ...\n\n{lines}\n\n"
        "'rmdm sample' and 'rmdm serve' use the model that comes with the package unless they are given another.\n"
        "Any setting of a preset can be overridden, for example:\n"
        "  rmdm run storyworld-mini --out runs/first --train.steps 500 --optim.lr 1e-3\n\n"
        "'rmdm VERB --help' lists a verb's flags; 'rmdm presets' lists the presets."
    )


def config_flags() -> dict[str, str]:
    """Every `--dotted.name` of the config."""
    from rmdm.config import Config, field_names

    return {f"--{name}": name for name in field_names(Config)}


def read_overrides(words: list[str], own: set[str]) -> dict[str, Any]:
    """Dotted overrides as plain values: `--optim.lr 1e-4`, `--optim.lr=1e-4`, `--optim.betas 0.9 0.98`.

    Values are spelled as in the YAML presets and checked by the same rules.
    """
    import yaml

    flags, overrides = config_flags(), {}
    at = 0
    while at < len(words):
        flag, _, inline = words[at].partition("=")
        name = flag[:2] + flag[2:].replace("-", "_")
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}; settings are given as --name value")
        if name not in flags:
            raise ConfigError(f"unknown flag {flag!r}; {nearest_flag(name, flags, own)}")
        end = at + 1
        while not inline and end < len(words) and not words[end].startswith("--"):
            end += 1
        values = [inline] if inline else words[at + 1 : end]
        if not values:
            raise ConfigError(f"{flag} needs a value, for example '{flag} VALUE'")
        # Text stays text, so that a name may look like a number; only lists and null are read as YAML reads them.
        try:
            plain = [None if v in {"null", "None"} else yaml.safe_load(v) if v.startswith("[") else v for v in values]
        except yaml.YAMLError:
            raise ConfigError(f"{flag} {' '.join(values)}: not a list such as [0.9, 0.98]") from None
        overrides[flags[name]] = plain[0] if len(plain) == 1 else plain
        at = end
    return overrides


def nearest_flag(name: str, settings: Iterable[str], own: Iterable[str]) -> str:
    """A clause that suggests what was meant: by the last part of a dotted name where no dots were given."""
    ends: dict[str, list[str]] = {flag: [flag] for flag in own}
    for flag in sorted(settings, key=lambda flag: flag.count(".")):
        ends.setdefault(f"--{flag.removeprefix('--').rpartition('.')[2]}", []).append(flag)
    if "." not in name and (close := closest(name, ends, cutoff=0.6)) is not None:
        return f"did you mean {' or '.join(map(repr, ends[close]))}?"
    close = closest(name, [*settings, *own])
    return f"did you mean {close!r}?" if close is not None else "'rmdm run PRESET --help' lists all"


def print_config_help(args: list[str], sections: Sequence[str]) -> None:
    """The settings a verb uses with their meaning, and their values in the preset if one is named."""
    from rmdm.config import Config
    from rmdm.presets import load_config
    from rmdm.settings_help import settings_help

    refs = [word for word in args[1:] if not word.startswith("-")]
    others = " ('rmdm run PRESET --help' lists those of the other stages, which are accepted too)" if sections else ""
    print(f"Settings of 'rmdm {args[0]}'{others}:\n")
    print(settings_help(load_config(refs[0]) if refs else Config(), sections))
