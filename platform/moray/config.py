"""Configuration: strict frozen models, YAML files merged left to right, then dotted overrides.

This module knows how a configuration is read; `moray.explain` words what is wrong with one. It refuses to
know any particular setting, and it imports neither torch nor ray, so that `--help` and every configuration
error answer at once. For the same reason configuration classes live in torch-free modules.
"""

import argparse
import json
import logging
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from moray.errors import ConfigError, MorayError
from moray.explain import default_of, describe, element_of, explain, nearest_path, one_line, variant_of
from moray.renamed import with_current_names
from moray.runs_folder import resolve_runs


class Config(BaseModel):
    """Base of every configuration: immutable, no unknown key, no silent conversion between types.

    A choice between classes is a union told apart by `type: Literal["name"]` on each of them and
    `Field(discriminator="type")` on the union. Range checks belong in `Field`, checks across fields in a
    `model_validator(mode="after")` that raises `ValueError`; `mode="before"` on a model would turn its
    lists and paths into Python objects that strict validation refuses.

    Every field is explained by the docstring under it. Its first sentence is what `--help` shows: one line that says
    what the value does, its unit, and what null means. A docstring, and not `Field(description=...)`, because it leaves
    the type and the default of a field in front and has room for more than that line. Pydantic parses the classes'
    source for it when they are imported, some milliseconds for all keys of a command.
    """

    renamed: ClassVar[Mapping[str, str]] = {}
    """Old names of fields, to the new ones (see `moray.renamed`)."""
    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """By field (its new name): old values, to the new ones."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


AnyConfig = TypeVar("AnyConfig", bound=Config)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, `off` a word, a key is its text, a repeated key is an error."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                message = f"the key '{key.value}' stands here twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"  # `1:` and `on:` must meet the overrides `a.1=` and `a.on=`
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),  # YAML 1.1 wants a dot and a signed exponent
    list("-+.0123456789"),
)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),  # as in YAML 1.2; in 1.1 yes, no, on and off are truths too
    list("tTfF"),
)


class CommandLine(argparse.ArgumentParser):
    """The words of one command; `--help` lists the keys of its configuration.

    A wrong command line is reported as every other configuration error: one line, exit code 2.
    """

    advice = "write settings as key=value (see --help)"

    def __init__(self, config_class: type[Config], description: str, prog: str | None, usage: str = "") -> None:
        """
        Args:
            config_class: what the words configure.
            description: what the command does, as `--help` shows it.
            prog: how the command is called; None for the name of the program.
            usage: what stands behind it; empty for YAML files and overrides.
        """
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {usage or '[config.yaml ...] [key=value ...]'}",
            description=description,
            epilog=describe(config_class, _terminal_width()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("arguments", nargs="*", metavar="arguments", help="files, left to right, then overrides")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.advice}")


def _terminal_width() -> int | None:
    """Columns of the terminal that is written to; None for a pipe or a file, whose lines are to be found by `grep`."""
    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def program() -> str | None:
    """How this process was called: python -m and the module; None outside of an entry point."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else None


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
    overrides = [argument for argument in arguments if is_override(argument)]
    for path in (argument for argument in arguments if not is_override(argument)):
        merged = merge(merged, with_current_names(config_class, read_yaml(Path(resolve_runs(path)))))
    for override in overrides:
        merged = merge(merged, with_current_names(config_class, read_override(override)))
    return validate(config_class, merged)


def read_override(override: str) -> dict[str, Any]:
    """The nested settings that `a.b=c` stands for, its value read as YAML; raise `ConfigError` on an empty key."""
    key, _, text = override.partition("=")
    nested: Any = _parse_yaml(text, source=override)
    for part in reversed(key.split(".")):
        if not part:
            raise ConfigError(f"override '{override}' has an empty key: write it as name=value or a.b=value")
        nested = {part: nested}
    return nested


def validate(config_class: type[AnyConfig], values: dict[str, Any], *, notice: bool = True) -> AnyConfig:
    """Check plain values against a configuration class; raise `ConfigError` listing the problems.

    A leading `runs` in a value is the folder that `moray.runs_folder` says. Keys may have the names of an earlier
    version; `notice` says so on stderr, for values that a user wrote.
    """
    values = with_current_names(config_class, values, notice=notice)
    try:
        text = json.dumps(_complete(config_class, resolve_runs(values)), default=str)
    except (ValueError, RecursionError):
        raise ConfigError("the configuration refers to itself: remove the YAML alias that closes the circle") from None
    try:
        # JSON mode is strict about types yet takes lists for tuples and strings for paths, which is all
        # that YAML can write.
        return config_class.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(explain(config_class, error)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping, or raise `ConfigError` naming the nearest existing file."""
    if path.is_dir():
        raise ConfigError(f"config file '{path}' is a folder: name a YAML file in it")
    if not path.is_file():
        raise ConfigError(f"config file '{path}' does not exist{nearest_path(path)}")
    try:
        values = _parse_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' cannot be read as UTF-8 text: {error}") from None
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
        if isinstance(old, dict) and isinstance(value, dict) and not _other_variant(old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, as overrides write them; lists and empty mappings stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_override(argument: str) -> bool:
    """Whether a word sets a key; all others are paths."""
    key, separator, _ = argument.partition("=")
    return bool(separator) and "/" not in key  # a path with `=` in its name is written ./a=b.yaml


def run_entry_point(
    config_class: type[AnyConfig],
    description: str,
    main: Callable[[AnyConfig], None],
    argv: Sequence[str] | None = None,
    again: str = "run the same command again to resume",
) -> None:
    """Parse the command line, run `main`, and turn our own errors into one line and an exit code; `again` is what to do
    after Ctrl-C.

    `main` imports torch and ray inside: nothing heavy is loaded before parsing has succeeded.
    """
    parser = CommandLine(config_class, description, program())
    run_command(lambda: main(load_config(config_class, parser.parse_args(argv).arguments)), again)


def run_command(command: Callable[[], None], again: str = "run the same command again to resume") -> None:
    """Run a command and turn our own errors into one line and an exit code."""
    ended = threading.Event()
    try:
        with _sigterm_interrupts(ended), _shown_log():
            command()
    except MorayError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"ended by SIGTERM: {again}" if ended.is_set() else f"\ninterrupted: {again}", file=sys.stderr)
        sys.exit(143 if ended.is_set() else 130)


@contextmanager
def _shown_log() -> Iterator[None]:
    """Print what our modules log, such as which kernels were chosen for a target, on standard error."""
    logger, handler = logging.getLogger("moray"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _sigterm_interrupts(ended: threading.Event) -> Iterator[None]:
    """Treat SIGTERM, which `ray job stop` sends, as Ctrl-C, and set `ended`; a second one ends the process at once.

    The handler raises KeyboardInterrupt because Ray's blocking calls let it through and swallow other exceptions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ended.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = (
            f" (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
            if error.problem_mark
            else ""
        )
        raise ConfigError(f"'{source}' is not valid YAML: {one_line(str(error.problem))}{mark}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as the date 2026-13-01
        raise ConfigError(f"'{source}' is not valid YAML: {one_line(str(error))}") from None


def _other_variant(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return None not in (old.get("type"), new.get("type")) and old["type"] != new["type"]


def _complete(annotation: Any, value: Any) -> Any:
    """Lay the given keys over the default of their field, so that `optim.lr=1` keeps its other defaults.

    Pydantic alone would build a partial mapping from the defaults of its class, which may differ from
    the instance that the outer class declares as the default.
    """
    if isinstance(value, list):
        return [_complete(element_of(annotation), item) for item in value]
    if not isinstance(value, dict):
        return value
    variant = variant_of(annotation, value.get("type"))
    if variant is None:
        return {key: _complete(element_of(annotation), item) for key, item in value.items()}
    completed = dict(value)
    for name in value.keys() & variant.model_fields.keys():
        default = default_of(variant.model_fields[name])
        given = value[name]
        if isinstance(default, BaseModel) and isinstance(given, dict):
            given = merge({name: default.model_dump(mode="json")}, {name: given})[name]
        completed[name] = _complete(variant.model_fields[name].annotation, given)
    return completed
