"""Entry points of several commands: the right one runs, with its own keys, and what is wrong is one line."""

import pytest

from moray.commands import Command, load_command, run_commands
from moray.config import Config
from moray.errors import ConfigError

received: list[Config] = []


class Steps(Config):
    """Keys without a report."""

    steps: int = 1


class Measured(Config):
    """Keys with one."""

    steps: int
    report: str | None = None


class Pair(Config):
    """Two files."""

    left: str
    right: str


class Folders(Config):
    """Any number of folders."""

    places: tuple[str, ...]
    steps: int = 1
    report: str | None = None


class Reached(Config):
    """A key that is also a flag."""

    url: str
    steps: int = 1
    report: str | None = None


def walk(config: Steps) -> None:
    """Walk some steps.

    Not shown."""
    received.append(config)


def measure(config: Measured) -> None:
    """Measure some steps."""
    received.append(config)


def pair(config: Pair) -> None:
    """Take two files."""
    received.append(config)


def reach(config: Reached) -> None:
    """Reach something."""
    received.append(config)


def visit(config: Folders) -> None:
    """Visit folders."""
    received.append(config)


@pytest.fixture
def commands(tmp_path):
    (tmp_path / "default.yaml").write_text("steps: 7\n")
    received.clear()
    measuring = Command(Measured, measure, default=tmp_path / "default.yaml")
    return {"": Command(Steps, walk), "measure": measuring, "pair": Command(Pair, pair, files=("left", "right"))}


def test_the_named_command_runs_and_none_is_the_plain_one(commands, tmp_path):
    (tmp_path / "mine.yaml").write_text("steps: 2\n")
    for argv, expected in (
        ([], Steps()),
        (["steps=3"], Steps(steps=3)),
        (["measure"], Measured(steps=7)),
        (["measure", "steps=3", "--json", "1"], Measured(steps=3, report="1")),
        (["measure", "--json=a: b", str(tmp_path / "mine.yaml")], Measured(steps=2, report="a: b")),
        (["pair", "a", "b=c"], Pair(left="a", right="b=c")),
    ):
        run_commands(commands, "Test.", argv)
        assert received[-1] == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["measur"], "there is no command 'measur'; the commands are measure, pair; did you mean 'measure'\\?$"),
        (["x"], "there is no command 'x'; the commands are measure, pair$"),
        (["x.yaml"], "config file 'x.yaml' does not exist"),
        (["--json", "a.json"], "unrecognized arguments: --json; write settings as key=value"),
        (["measure", "--js", "a.json"], "unrecognized arguments: --js"),
        (["measure", "--json"], "argument --json: expected one argument"),
        (["measure", "step=1"], "unknown key 'step'"),
        (["pair", "a"], "^pair: files given: 1, needed: 2; write pair left.json right.json$"),
        (["pair", "a", "b", "--json", "c"], "^pair: .*--json.*; write pair left.json right.json$"),
    ],
)
def test_what_is_wrong_is_one_line(commands, argv, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_command(commands, argv)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert received == []


def test_help_lists_the_commands_and_then_the_keys(commands, capsys):
    with pytest.raises(SystemExit) as ended:
        run_commands(commands, "Does a lot.", ["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.index("Does a lot.") < shown.index("  measure: Measure some steps.\n  pair: Take two files.")
    assert "--json" not in shown
    with pytest.raises(SystemExit):
        run_commands(commands, "Does a lot.", ["measure", "-h"])
    shown = capsys.readouterr().out
    assert "measure [config.yaml ...] [key=value ...] [--json FILE]" in shown
    assert shown.index("Measure some steps.") < shown.index("report: str | null = null")


def test_a_command_takes_any_number_of_folders():
    command = Command(Folders, visit, folders="places")
    assert command.usage == "folder [folder ...] [--json FILE]"
    for words, expected in (
        (["a"], Folders(places=("a",))),
        (["a b", "./c=d", "steps=2", "e.yaml"], Folders(places=("a b", "./c=d", "e.yaml"), steps=2)),
        (["--json", "f", "true"], Folders(places=("true",), report="f")),
        (["places=[g]"], Folders(places=("g",))),
    ):
        assert command.load(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^no folder given; write folder \[folder ...\] \[--json FILE\]$"),
        (["a", "step=1"], "^unknown key 'step'; did you mean 'steps'"),
        (["a", "--jsn"], r"--jsn; write folder \[folder"),
    ],
)
def test_wrong_words_beside_folders_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        Command(Folders, visit, folders="places").load(words)


def test_a_key_may_be_a_flag():
    command = Command(Reached, reach, flags=("url",))
    assert command.usage == "[config.yaml ...] [key=value ...] [--json FILE] [--url URL]"
    for words, expected in (
        (["--url", "http://a:1"], Reached(url="http://a:1")),
        (["url=b"], Reached(url="b")),
        (["steps=2", "--url=1", "--json", "f", "url=b"], Reached(url="1", steps=2, report="f")),
    ):
        assert command.load(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "'url' is missing"),
        (["--url"], "argument --url: expected one argument; write settings as key=value"),
        (["--ur", "a"], "unrecognized arguments: --ur"),
    ],
)
def test_a_flag_is_written_in_full_and_with_its_text(words, message):
    with pytest.raises(ConfigError, match=message):
        Command(Reached, reach, flags=("url",)).load(words)


def test_flags_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        Command(Reached, reach, flags=("url",)).load(["--help"])
    assert "--url URL" in capsys.readouterr().out
