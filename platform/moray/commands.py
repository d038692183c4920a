"""Entry points of more than one command, such as `python -m pipelines.benchmark shaped ...`.

A table maps names to commands; "" is what is done without a name, and `--help` shows the others. This module refuses
to know any command, and it imports neither torch nor ray.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from moray.config import AnyConfig, CommandLine, Config, is_override, load_config, program, run_command, validate
from moray.errors import ConfigError


class _CommandLine(CommandLine):
    """Says of wrong words what to write in place of them."""

    def __init__(
        self, config_class: type[Config], description: str, prog: str | None, usage: str, advice: str | None
    ) -> None:
        super().__init__(config_class, description, prog, usage)
        self.advice = advice or CommandLine.advice


@dataclass(frozen=True)
class Command(Generic[AnyConfig]):
    """What one command takes and does; the first line of its `main`'s docstring says so in `--help`."""

    config_class: type[AnyConfig]
    """With a key `report`, the command also takes `--json FILE`."""
    main: Callable[[AnyConfig], None]
    """Imports torch and ray inside: nothing heavy is loaded before parsing has succeeded."""
    default: Path | None = None
    """YAML file that is read where none is named."""
    files: tuple[str, ...] = ()
    """Keys that take the words of the command line, one file each and in this order; empty: words are YAML files,
    merged left to right, and overrides."""
    folders: str = ""
    """Key that takes all words but overrides: any number of folders."""
    flags: tuple[str, ...] = ()
    """Keys of texts that may also be written `--key TEXT`."""

    @property
    def usage(self) -> str:
        """What stands behind the command's name."""
        files = ["folder [folder ...]"] if self.folders else [f"{key}.json" for key in self.files]
        words = files or ["[config.yaml ...]", "[key=value ...]"]
        return " ".join([*words, *(f"[--{flag} {_placeholder(flag)}]" for flag in self._keys_by_flag)])

    @property
    def summary(self) -> str:
        """One line on what it does."""
        return (self.main.__doc__ or "").strip().partition("\n")[0]

    def load(self, words: Sequence[str], name: str = "", description: str = "") -> AnyConfig:
        """Read the words behind the command's name; `--help` prints and exits.

        Raises:
            ConfigError: naming what is wrong with a word, a file or a key.
        """
        prog = " ".join(part for part in (program(), name) if part)
        advice = f"write {name} {self.usage}".replace("  ", " ") if self.files or self.folders else None
        parser = _CommandLine(self.config_class, description or self.summary, prog or None, self.usage, advice)
        for flag, key in self._keys_by_flag.items():
            what = "write what was measured there as well" if flag == "json" else "the same as"
            placeholder = _placeholder(flag)
            parser.add_argument(f"--{flag}", metavar=placeholder, help=f"{what}: {key}={placeholder}")
        given = parser.parse_intermixed_args(words)
        if self.files:
            return self._load_files(given, parser)
        settings = list(given.arguments)
        if self.folders:
            settings = self._with_folders(settings, parser)
        if self.default is not None and not any(map(_is_yaml, settings)):
            settings.insert(0, str(self.default))
        # A text stays one, whatever YAML would make of it.
        settings += [f"{key}={json.dumps(text)}" for key, text in self._flagged(given).items()]
        return load_config(self.config_class, settings)

    def _with_folders(self, words: Sequence[str], parser: CommandLine) -> list[str]:
        paths = [word for word in words if not is_override(word)]
        settings = [word for word in words if is_override(word)]
        if not words:
            parser.error("no folder given")
        return [*([f"{self.folders}={json.dumps(paths)}"] if paths else []), *settings]

    @property
    def _keys_by_flag(self) -> dict[str, str]:
        takes_json = "report" in self.config_class.model_fields
        return ({"json": "report"} if takes_json else {}) | {key: key for key in self.flags}

    def _flagged(self, given: argparse.Namespace) -> dict[str, str]:
        """The keys that were written as flags."""
        texts = {key: getattr(given, flag) for flag, key in self._keys_by_flag.items()}
        return {key: text for key, text in texts.items() if text is not None}

    def _load_files(self, given: argparse.Namespace, parser: CommandLine) -> AnyConfig:
        if len(given.arguments) != len(self.files):
            parser.error(f"files given: {len(given.arguments)}, needed: {len(self.files)}")
        values = dict(zip(self.files, given.arguments, strict=True))
        return validate(self.config_class, values | self._flagged(given))


Commands = Mapping[str, Command[Any]]
"""Commands by name; "" is what is done without a name."""


def load_command(commands: Commands, argv: Sequence[str], description: str = "") -> tuple[Command[Any], Any]:
    """The command that is meant, and its configuration.

    Raises:
        ConfigError: there is no such command, or its words are wrong.
    """
    first = next(iter(argv), "")
    if first and first in commands:
        try:
            return commands[first], commands[first].load(argv[1:], first)
        except ConfigError as error:
            if not commands[first].files:
                raise
            # Files alone do not say which command they were for; a key does.
            raise ConfigError(f"{first}: {error}") from None
    if re.fullmatch(r"[A-Za-z]\w*", first) and not Path(first).exists():
        names = sorted(filter(None, commands))
        match = difflib.get_close_matches(first, names, n=1)
        nearest = f"; did you mean '{match[0]}'?" if match else ""
        raise ConfigError(f"there is no command '{first}'; the commands are {', '.join(names)}{nearest}")
    return commands[""], commands[""].load(argv, description=f"{description.rstrip()}\n\n{_listed(commands)}")


def run_commands(
    commands: Commands,
    description: str,
    argv: Sequence[str],
    again: str = "run the same command again to resume",
) -> None:
    """Find the command that is meant, run it, and turn our own errors into one line and an exit code; `again` is what
    to do after Ctrl-C."""

    def run() -> None:
        command, config = load_command(commands, argv, description)
        command.main(config)

    run_command(run, again)


def _listed(commands: Commands) -> str:
    """The commands that have a name, for `--help`."""
    names = sorted(filter(None, commands))
    lines = ["commands (each with its own --help):"]
    for name in names:
        is_default = commands[name] is commands[""]
        lines.append(f"  {name}: {commands[name].summary}{' Without a command, too.' if is_default else ''}")
    return "\n".join(lines)


def _placeholder(flag: str) -> str:
    return "FILE" if flag == "json" else flag.upper()


def _is_yaml(word: str) -> bool:
    return "=" not in word and word.endswith((".yaml", ".yml"))
