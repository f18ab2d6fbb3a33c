"""What `rmdm VERB PRESET --help` says of the settings: name, type, meaning and the preset's value of each.

The meaning is the docstring under a field in `rmdm.config`.
"""

import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

import rmdm.config
from rmdm.config import Config

INDENT = " " * 6
WIDEST = 110
"""Columns of text at most, however wide the terminal is."""
WORDS = {str: "TEXT", int: "INT", float: "FLOAT", bool: "true|false", NoneType: "null"}


def settings_help(config: Config, sections: Sequence[str] = ()) -> str:
    """The settings that stand outside sections, and those of some sections (all if none is named)."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines: list[str] = []
    for name, section in sections_of(config):
        if name == "" or not sections or name.split(".")[0] in sections:
            lines += section_lines(name, section, width)
    return "\n".join(lines).rstrip("\n")


def sections_of(section: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A section and all those inside it, with their dotted names."""
    yield name, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from sections_of(value, f"{name}.{field.name}".lstrip("."))


def section_lines(name: str, section: Any, width: int) -> list[str]:
    """A heading and the fields of one section."""
    lines = textwrap.wrap(f"{name}: {inspect.getdoc(section)}", width) if name else []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            continue
        flag = f"--{name}.{field.name}" if name else f"--{field.name}"
        about = f"{meaning(type(section), field.name)} (default: {as_yaml(value)})"
        lines.append(f"  {flag} {type_words(field.type)}")
        lines += textwrap.wrap(about, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    return [*lines, ""]


def type_words(kind: Any) -> str:
    """A type in words, spelled as values are: `INT or null`, `mdlm|rmdm`."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return " ".join(type_words(part) for part in get_args(kind))
    if get_args(kind):
        return " or ".join(type_words(part) for part in get_args(kind))
    return WORDS[kind]


def as_yaml(value: Any) -> str:
    """A value as YAML and the command line spell it."""
    if isinstance(value, str):
        return value or "empty"
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("...").strip()


def meaning(owner: type, field: str) -> str:
    """The docstring under a field of a class, or of the class it has the field from."""
    return next(meanings()[one.__name__, field] for one in owner.__mro__ if (one.__name__, field) in meanings())


@functools.cache
def meanings() -> dict[tuple[str, str], str]:
    """The docstring under each field of each class of settings."""
    found = {}
    for owner in ast.parse(inspect.getsource(rmdm.config)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for field, after in zip(owner.body, owner.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[owner.name, name] = " ".join(said.split())
    return found
