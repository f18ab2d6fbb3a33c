"""Configs from presets, YAML files and run directories, and back to YAML. Nothing here imports torch.

A file that names a preset or another file as its `base` says only what it changes. The resolved config is written to
the run directory, where it is itself a valid preset.
"""

import functools
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rmdm.config import ADAPTER, Config, field_names
from rmdm.errors import ConfigError, nearest
from rmdm.rules import validate

PRESETS = resources.files("rmdm") / "configs"


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if p.name.endswith(".yaml"))


def load_config(ref: str | Path) -> Config:
    """The config that `ref` names: a preset of the package, a YAML file, or a run directory."""
    path = Path(ref)
    is_run = (path / "config.yaml").is_file()
    if path.is_dir() and (is_run or str(ref) not in preset_names()):
        if not is_run:
            raise ConfigError(
                f"{path} has no config.yaml, so it is no run directory; give a preset, a YAML file or a run"
            )
        path = path / "config.yaml"
    if path.is_file():
        return decode(file_values(path), str(path))
    if str(ref) in preset_names():
        return decode(preset_values(str(ref)), f"preset {ref}")
    if path.suffix in {".yaml", ".yml"}:
        raise ConfigError(f"{ref} does not exist; give a YAML file, a run directory or a preset ('rmdm presets')")
    raise ConfigError(f"{str(ref)!r} is no preset, YAML file or run directory; {nearest(str(ref), preset_names())}")


def resolve_config(ref: str, overrides: dict[str, Any]) -> Config:
    """The config that `ref` names, with overrides (dotted names to values) applied and checked."""
    own = load_config(ref)
    values = ADAPTER.dump_python(own, mode="json")
    for name, value in overrides.items():
        *path, leaf = name.split(".")
        owner = values
        for part in path:
            owner = owner[part]
        owner[leaf] = value
    try:
        ADAPTER.validate_python(values)
    except ValidationError as error:
        refuse_flag(error, overrides, own)
    return decode(values, ref)


def refuse_flag(error: ValidationError, overrides: dict[str, Any], own: Config) -> None:
    """Raise `ConfigError` for the flag whose value pydantic did not take, with the config's own value as an example."""
    place = ".".join(str(part) for part in error.errors()[0]["loc"])
    for name, value in overrides.items():
        if f"{place}.".startswith(f"{name}."):
            example = spelled(functools.reduce(getattr, name.split("."), own))
            raise ConfigError(f"--{name} {spelled(value)}: {rule_of(error)}; use {example}, for example")


def spelled(value: Any) -> str:
    """A value as it is given after a flag."""
    if isinstance(value, list | tuple):
        return " ".join(map(spelled, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def preset_values(name: str) -> dict[str, Any]:
    """The fields of a preset, those of its base included."""
    where = f"preset {name}"
    return with_base(_parse_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), where), where)


def file_values(path: Path, before: tuple[Path, ...] = ()) -> Any:
    """The fields of a YAML file, those of its base included; `before` are the files that name it as theirs."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text, so it is no YAML config; give another or restore it") from None
    return with_base(_parse_yaml(text, str(path)), str(path), (*before, path.resolve()))


def with_base(values: Any, where: str, files: tuple[Path, ...] = ()) -> Any:
    """The fields of a file; one that names a preset or another file as its `base` says only what it changes.

    `files` are the file itself, from whose folder the other is looked for, and before it those it is the base of.
    """
    if not isinstance(values, dict) or values.get("base") is None:
        return values
    base = str(values["base"])
    changes = {name: value for name, value in values.items() if name != "base"}
    if base in preset_names():
        return merged(preset_values(base), changes)
    if not files or not base.endswith((".yaml", ".yml")):
        raise ConfigError(f"{where}: base={base!r} is no preset; {nearest(base, preset_names())}")
    path = files[-1].parent / os.path.expanduser(base)  # as it is, where there is no such user
    if not path.is_file():
        raise ConfigError(f"{where}: base={base!r} does not exist; name a preset, or a file from {files[-1].parent}")
    if path.resolve() in files:
        raise ConfigError(f"{where}: base={base!r} has this file as its own base; name another, or a preset")
    owner = file_values(path, files)
    if not isinstance(owner, dict):
        raise no_fields(owner, str(path))
    return merged(owner, changes)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the changes put in, section by section."""
    both = {name: (base.get(name), value) for name, value in changes.items()}
    return base | {k: merged(a, b) if isinstance(a, dict) and isinstance(b, dict) else b for k, (a, b) in both.items()}


def decode(values: Any, where: str) -> Config:
    """Build and validate a config from plain values; the first mistake becomes one line that names its field."""
    if not isinstance(values, dict):
        raise no_fields(values, where)
    try:
        config = ADAPTER.validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error)}") from None
    refuse_truths(values, config, where)
    validate(config)
    return config


def no_fields(values: Any, where: str) -> ConfigError:
    """What a file holds instead of fields, in words, and what to write."""
    if values is None:
        return ConfigError(f"{where} is empty; write fields such as 'name:' and 'data:'")
    kinds = {str: "text", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    held = kinds.get(type(values), "one value")
    return ConfigError(f"{where} holds {held} alone; write fields such as 'name:' and 'data:'")


def refuse_truths(values: dict[str, Any], section: Any, where: str, prefix: str = "") -> None:
    """Raise `ConfigError` where true or false stands for a number, which pydantic takes for 1 or 0."""
    for name, value in values.items():
        taken = getattr(section, name)
        if isinstance(value, dict):
            refuse_truths(value, taken, where, f"{prefix}{name}.")
        elif isinstance(value, bool) and type(taken) in (int, float):
            raise ConfigError(f"{where}: {prefix}{name}={str(value).lower()} is no number; write one")


def explain(error: ValidationError) -> str:
    """One line for the first mistake pydantic found, with the nearest field name when a field is unknown."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        prefix = field.rpartition(".")[0] + "." if "." in field else ""
        siblings = {n.removeprefix(prefix).split(".")[0] for n in field_names(Config) if n.startswith(prefix)}
        return f"unknown field {field!r}; {nearest(str(first['loc'][-1]), siblings)}"
    return f"{field}={first['input']!r}: {rule_of(error)}"


def rule_of(error: ValidationError) -> str:
    """What pydantic says of the first mistake, without its capital."""
    said = error.errors()[0]["msg"]
    return said[0].lower() + said[1:]


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
        return yaml.load(text, Loader=_Strict)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where} is not valid YAML{line}: {getattr(error, 'problem', error)}") from None


class _Strict(yaml.SafeLoader):
    """YAML in which a name stands once in a section, and numbers are decimal: PyYAML reads 010 as 8 and 1:30 as 90."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A section, if no name of it comes twice: the earlier value would be lost without a word."""
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):  # no name: refused below
                continue
            if key.value in seen:
                said = f"{key.value!r} stands twice in one section, also at line {seen[key.value].line + 1}; keep one"
                raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


def _plain_integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """A whole number as people write it."""
    digits = node.value.replace("_", "").lstrip("+-")
    if not digits.isdecimal() or (len(digits) > 1 and digits.startswith("0")):
        raise yaml.constructor.ConstructorError(
            None, None, f"{node.value} is no plain decimal number; write it without leading zeros, or in quotes",
            node.start_mark,
        )  # fmt: skip
    return int(node.value.replace("_", ""))


_Strict.add_constructor("tag:yaml.org,2002:int", _plain_integer)
