"""Configuration: strict frozen models, YAML files merged left to right, then dotted overrides.

This module knows how a configuration is read and how a wrong one is explained. It refuses to know any
particular setting, and it imports neither torch nor ray, so that `--help` and every configuration error
answer at once. For the same reason configuration classes live in torch-free modules.
"""

import argparse
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from moray.errors import ConfigError, MorayError


class Config(BaseModel):
    """Base of every configuration: immutable, no unknown key, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


AnyConfig = TypeVar("AnyConfig", bound=Config)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands here twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|nan)$"),
    list("-+.0123456789"),
)


def load_config(config_class: type[AnyConfig], arguments: Sequence[str]) -> AnyConfig:
    """Build a configuration from YAML paths and `a.b=c` overrides.

    Args:
        config_class: what to build.
        arguments: paths (merged left to right, mappings recursively, everything else replaced) and
            overrides (applied after all files, in order; values are read as YAML).

    Raises:
        ConfigError: naming the file or key, the value, and the nearest valid name.
    """
    merged: dict[str, Any] = {}
    overrides = [argument for argument in arguments if _is_override(argument)]
    for path in (argument for argument in arguments if not _is_override(argument)):
        merged = merge(merged, read_yaml(Path(path)))
    for override in overrides:
        key, _, text = override.partition("=")
        nested: Any = _parse_yaml(text, source=override)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merged = merge(merged, nested)
    return validate(config_class, merged)


def validate(config_class: type[AnyConfig], values: dict[str, Any]) -> AnyConfig:
    """Check plain values against a configuration class; raise `ConfigError` on the first problem."""
    try:
        # JSON mode is strict about types yet takes lists for tuples and strings for paths, which is all
        # that YAML can write.
        return config_class.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ConfigError(_explain(config_class, error)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping, or raise `ConfigError` naming the nearest existing file."""
    if not path.is_file():
        siblings = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError(f"config file '{path}' does not exist{_nearest(str(path), siblings)}")
    values = _parse_yaml(path.read_text(encoding="utf-8"), source=str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file '{path}' holds a {type(values).__name__}; a mapping of keys is needed")
    return values


def merge(base: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings into a new one; the right side wins.

    A mapping that names another `type` (a variant of a tagged union) replaces the left one whole: its
    fields belong to another class.
    """
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        same_variant = isinstance(old, dict) and isinstance(value, dict) and value.get("type") in (None, old.get("type"))
        merged[key] = merge(old, value) if same_variant else value
    return merged


def run_entry_point(
    config_class: type[AnyConfig], description: str, main: Callable[[AnyConfig], None], argv: Sequence[str] | None = None
) -> None:
    """Parse the command line, run `main`, and turn our own errors into one line and an exit code.

    `main` imports torch and ray inside: nothing heavy is loaded before parsing has succeeded.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_describe(config_class)
    )
    parser.add_argument("arguments", nargs="*", metavar="config.yaml | key=value", help="merged from left to right")
    arguments = parser.parse_args(argv).arguments
    try:
        main(load_config(config_class, arguments))
    except MorayError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again to go on", file=sys.stderr)
        sys.exit(130)


def _is_override(argument: str) -> bool:
    return re.match(r"^[A-Za-z_][\w.]*=", argument) is not None


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except yaml.YAMLError as error:
        raise ConfigError(f"'{source}' is not valid YAML: {' '.join(str(error).split())}") from None


def _explain(config_class: type[BaseModel], error: ValidationError) -> str:
    """One line for the first problem, and how many more there are."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    names = [part for part in problem["loc"] if not _is_variant_tag(config_class, problem["loc"], part)]
    location = ".".join(str(part) for part in names)
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        parent = [names for names, _, _ in _fields(config_class)]
        return f"unknown key '{location}'{_nearest(location, parent)}{more}"
    if problem["type"] == "missing":
        return f"'{location}' is missing: give it in a YAML file or as {location}=VALUE{more}"
    received = json.dumps(problem["input"], default=str)
    return f"'{location}' is {received[:80]}: {problem['msg'][0].lower()}{problem['msg'][1:]}{more}"


def _is_variant_tag(config_class: type[BaseModel], location: tuple[int | str, ...], part: int | str) -> bool:
    """Pydantic puts the tag of a union's variant into the location; it is no key that a user wrote."""
    if not isinstance(part, str):
        return False
    known = {name.rsplit(".", 1)[-1] for name, _, _ in _fields(config_class)}
    return part not in known and part != location[-1]


def _nearest(name: str, candidates: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    if not match:
        leaf = name.rsplit(".", 1)[-1]
        match = [c for c in candidates if difflib.get_close_matches(leaf, [c.rsplit(".", 1)[-1]], cutoff=0.7)][:1]
    return f"; did you mean '{match[0]}'?" if match else ""


def _describe(config_class: type[BaseModel]) -> str:
    lines = ["keys:"]
    for name, kind, default in _fields(config_class):
        lines.append(f"  {name}: {kind}{default}")
    return "\n".join(lines)


def _fields(config_class: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every dotted key of a configuration with its type and default, nested and union variants included."""
    for name, field in config_class.model_fields.items():
        nested = list(_config_classes(field.annotation))
        default = "" if field.is_required() else f" = {json.dumps(_plain(field.get_default(call_default_factory=True)))}"
        if nested:
            yield prefix + name, " | ".join(cls.__name__ for cls in nested), ""
            seen: set[str] = set()
            for cls in nested:
                for row in _fields(cls, f"{prefix}{name}."):
                    if row[0] not in seen:
                        seen.add(row[0])
                        yield row
        else:
            yield prefix + name, _type_name(field.annotation), default


def _config_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, typing.Annotated):
        for argument in typing.get_args(annotation):
            yield from _config_classes(argument)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: v.model_dump() if isinstance(v, BaseModel) else str(v)))
