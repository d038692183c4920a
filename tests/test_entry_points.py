"""Every entry point answers `--help` at once and explains a wrong key on one line."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pydantic import Field
from pydantic.fields import FieldInfo

from moray.commands import load_command
from moray.config import Config, load_config, validate
from moray.errors import ConfigError
from moray.explain import classes_of, description_of, element_of, help_rows
from pipelines import benchmark, evaluate
from pipelines.benchmarks.shaped_config import ShapedBenchmarkConfig
from serve.api.schemas import ChatRequest
from serve.config import read_args

REPOSITORY = Path(__file__).resolve().parents[1]
ENTRY_POINTS = [
    *sorted(path for path in REPOSITORY.glob("pipelines/*.py") if path.stem != "__init__"),
    *sorted(path for path in REPOSITORY.glob("sweeps/*.py") if "__main__" in path.read_text(encoding="utf-8")),
    REPOSITORY / "serve" / "benchmark.py",
    REPOSITORY / "serve" / "deploy.py",
]
MODULES = [f"{path.parent.name}.{path.stem}" for path in ENTRY_POINTS]
HEAVY = {"torch", "ray", "transformers", "datasets", "pandas", "matplotlib"}
MAX_CPU_SECONDS = 2.0
MAX_DESCRIPTION = 100
UNITS = {
    r"(^|_)seconds$|_s$": "seconds",
    r"(^|_)ms(_|$)": "milliseconds",
    r"_mib$": "MiB",
    r"_bytes$": "bytes",
    r"_flops$": "FLOP per second",
    r"_bandwidth$": "bytes per second",
    r"_per_minute$": "per minute",
    r"(^|_)tokens$|^context$|^max_model_len$|^max_length$|^row_length$|^max_positions$": "tokens",
}
"""The unit that a description must name, by a pattern of the key's name."""


class Outcome(NamedTuple):
    exit_code: int
    out: str
    err: str
    cpu_seconds: float


def run(folder: Path, *arguments: str) -> Outcome:
    """Run Python and measure its own processor time, which a loaded machine does not stretch."""
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, stdout=out_file, stderr=err_file)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return Outcome(process.returncode, out.read_text(), err.read_text(), seconds)


def imported_modules(importtime: str) -> set[str]:
    """The top-level names in what `python -X importtime` wrote."""
    lines = (line for line in importtime.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("module", MODULES)
def test_help_is_fast_and_imports_nothing_heavy(tmp_path, module):
    outcome = run(tmp_path, "-m", module, "--help")
    assert outcome.exit_code == 0, outcome.err
    assert outcome.out.startswith(f"usage: python -m {module} ")
    assert "keys:" in outcome.out
    assert outcome.cpu_seconds < MAX_CPU_SECONDS
    imported = imported_modules(run(tmp_path, "-X", "importtime", "-m", module, "--help").err)
    assert "moray" in imported
    assert imported & HEAVY == set()


@pytest.mark.parametrize("arguments", [["a.json"], ["no_such_report.json", "b.json"], ["README.md", "README.md"]])
def test_a_comparison_that_cannot_be_made_gives_one_line_and_exit_code_2(tmp_path, arguments):
    outcome = run(tmp_path, "-m", "pipelines.evaluate", "compare", *arguments)
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: compare: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("module", MODULES)
def test_an_unknown_key_gives_one_line_and_exit_code_2(tmp_path, module):
    outcome = run(tmp_path, "-m", module, "no_such_key=1")
    assert outcome.exit_code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: unknown key 'no_such_key'")
    assert outcome.err.count("\n") == 1
    assert outcome.cpu_seconds < MAX_CPU_SECONDS


def test_the_import_check_sees_a_heavy_import(tmp_path):
    imported = imported_modules(run(tmp_path, "-X", "importtime", "-c", "import moray.config, pyarrow").err)
    assert {"moray", "pyarrow"} <= imported


def documented_commands() -> list[str]:
    """Every `python -m` of ours that README, docs and the entry points show, continuation lines joined.

    Results and the notebook are left out: their commands ran at the commits named beside them.
    """
    return _commands(r"python -m ((?:pipelines|sweeps|serve)\.\w+ (?:\\+\n|[^`\n])+)")


def documented_servers() -> list[str]:
    """The arguments of every `serve run` in the same files, but for mentions of the command without any."""
    found = _commands(r"serve run ((?:\\+\n|[^`\n#])+)")
    return [command for command in found if command != "serve.app:build_app"]


def _commands(pattern: str) -> list[str]:
    docs = REPOSITORY / "docs"
    measured = [docs / "notebook.md", *(docs / "results").glob("*.md")]
    pages = sorted(page for page in docs.rglob("*.md") if page not in measured)
    files = [REPOSITORY / "README.md", *pages, *ENTRY_POINTS, REPOSITORY / "serve" / "app.py"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    found = [m for text in texts for m in re.findall(pattern, text)]
    return sorted({re.sub(r"\\+\n", " ", command).strip() for command in found if command.strip()})


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_are_complete_and_valid(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    name, *arguments = shlex.split(command)
    module = importlib.import_module(name)
    written = re.compile(r"runs/.*\.yaml")  # by another command
    arguments = [word for word in arguments if not written.fullmatch(word)]
    if hasattr(module, "COMMANDS"):
        _, config = load_command(module.COMMANDS, arguments)
        assert "--json" not in arguments or config.report == arguments[arguments.index("--json") + 1]
    elif hasattr(module, "COMMAND"):
        assert module.COMMAND.load(arguments)
    else:
        assert load_config(module.CONFIG, arguments)


@pytest.mark.parametrize("command", documented_servers())
def test_documented_servers_are_complete_and_valid(command):
    first, *rest = shlex.split(command)
    if first == "serve.app:build_app":
        args = dict(word.split("=", 1) for word in rest)
        args.pop("plan", None)  # a file that another command writes
    else:
        assert not rest
        (application,) = yaml.safe_load((REPOSITORY / first).read_text(encoding="utf-8"))["applications"]
        args = application["args"]
    assert read_args(args).target.model


def test_documented_make_targets_files_and_extras_are_there():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    documented = {word for line in _commands(r"(?m)^make ([a-z -]+)") for word in line.split()}
    assert {"demo", "test", "peers"} <= documented <= targets
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {extra for found in _commands(r"-e '\.\[([a-z,]+)\]'") for extra in found.split(",")}
    assert {"dev"} <= installed <= set(extras["optional-dependencies"])
    files = _commands(r"(?m)^ray [^\n]*?\b(configs/[\w/.-]+)")
    assert files
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []


def test_documented_requests_are_valid():
    bodies = _commands(r"(?s)/v1/chat/completions[^\n]*? -d '(\{.*?\})'")
    assert bodies
    for body in bodies:
        assert ChatRequest.model_validate_json(body).messages


def test_a_benchmark_is_told_apart_and_its_file_named(tmp_path, monkeypatch):
    (tmp_path / "mine.yml").write_text((REPOSITORY / "configs" / "benchmarks" / "decode-demo.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    for words, changes in (
        ([], {}),
        (["decode"], {}),
        (["decode", "--json", "a.json"], {"report": "a.json"}),
        (["--json", "1", "max_new_tokens=3"], {"report": "1", "max_new_tokens": 3}),
        (["decode", "mine.yml", "--json", "a b.json", "num_questions=2"], {"report": "a b.json", "num_questions": 2}),
        (["decode", "--json=a.json", "questions=q.yaml"], {"report": "a.json", "questions": "q.yaml"}),
    ):
        command, config = load_command(benchmark.COMMANDS, words)
        assert command is benchmark.COMMANDS["decode"]
        given = config.model_dump()
        assert {name: given[name] for name in changes} == changes
        assert (config.target.model, config.report) == ("runs/demo/target", changes.get("report"))
    shaped = str(REPOSITORY / "configs" / "benchmarks" / "llama-3-8b-shaped.yaml")
    command, config = load_command(benchmark.COMMANDS, ["shaped", "--json", "a.json", shaped])
    assert (command.config_class, config.report) == (ShapedBenchmarkConfig, "a.json")
    with pytest.raises(ConfigError, match="is missing"):
        load_command(benchmark.COMMANDS, ["shaped"])


def test_a_comparison_takes_two_files_and_one_to_write():
    for words, report in ((["a.json", "b=1.json"], None), (["a.json", "--json", "c.json", "b=1.json"], "c.json")):
        command, config = load_command(evaluate.COMMANDS, ["compare", *words])
        assert command is evaluate.COMMANDS["compare"]
        assert (config.a, config.b, config.report) == ("a.json", "b=1.json", report)
    for words in ([], ["a.json"], ["a.json", "b.json", "c.json"], ["a.json", "b.json", "--jsn"], ["a", "b", "--json"]):
        with pytest.raises(ConfigError, match=r"^compare: .*; write compare a.json b.json \[--json FILE\]$"):
            load_command(evaluate.COMMANDS, ["compare", *words])


@pytest.mark.parametrize(
    ("module", "names"),
    [("benchmark", ["decode", "engine", "shaped", "tree", "serve"]), ("evaluate", ["compare"])],
)
def test_help_shows_the_commands_and_each_has_its_own(tmp_path, module, names):
    whole = run(tmp_path, "-m", f"pipelines.{module}", "--help")
    assert "commands (each with its own --help):" in whole.out
    for name in names:
        assert f"  {name}: " in whole.out
    outcome = run(tmp_path, "-m", f"pipelines.{module}", names[-1], "--help")
    assert outcome.exit_code == 0, outcome.err
    assert outcome.out.startswith(f"usage: python -m pipelines.{module} {names[-1]} ")
    assert "--json FILE" in outcome.out
    assert "keys:" in outcome.out
    assert outcome.cpu_seconds < MAX_CPU_SECONDS


def test_an_unknown_command_gives_one_line_and_exit_code_2(tmp_path):
    outcome = run(tmp_path, "-m", "pipelines.benchmark", "decod", "--json", "a.json")
    assert (outcome.exit_code, outcome.out) == (2, "")
    names = "cache, decode, engine, peers, serve, shaped, staleness, train, tree"
    assert outcome.err.startswith(f"error: there is no command 'decod'; the commands are {names}")
    assert outcome.err.endswith("; did you mean 'decode'?\n")
    assert outcome.err.count("\n") == 1


def test_a_shaped_benchmark_is_read():
    values = {
        "shape": {
            "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
            "intermediate_size": 96, "vocab_size": 300,
        },
        "drafter": {"type": "medusa", "num_heads": 2},
        "trees": [{"type": "chain", "depth": 2}],
        "tau": 4.2,
    }  # fmt: skip
    assert validate(ShapedBenchmarkConfig, values).report is None
    with pytest.raises(ConfigError, match=r"'tau' is 1"):
        validate(ShapedBenchmarkConfig, values | {"tau": 1})
    with pytest.raises(ConfigError, match=r"'shape.vocab_size'"):
        validate(ShapedBenchmarkConfig, values | {"shape": {**values["shape"], "vocab_size": 0}})


def test_a_benchmark_file_that_is_not_named_gives_one_line_and_exit_code_2(tmp_path):
    for arguments in (["decode", "--json"], ["decode", "--jsn", "a.json"]):
        outcome = run(tmp_path, "-m", "pipelines.benchmark", *arguments)
        assert (outcome.exit_code, outcome.out) == (2, "")
        assert outcome.err.count("\n") == 1


def test_documented_commands_are_found():
    assert {command.split()[0] for command in documented_commands()} == set(MODULES)


def test_the_demo_checks_every_stage_before_the_first(tmp_path):
    outcome = run(tmp_path, "-m", "pipelines.demo", "stages=[[train_demo_targets]]")
    assert outcome.exit_code == 2
    assert outcome.err.startswith("error: stages names 'train_demo_targets'; the stages are cache_activations, ")


def test_a_cluster_of_this_machine_listens_on_loopback_only(tmp_path):
    code = (
        "from moray.cluster.session import ray_session; from moray.cluster.configs import RayConfig\n"
        "with ray_session(RayConfig(num_cpus=1)):\n"
        "    import ray\n"
        "    print({node['NodeManagerAddress'] for node in ray.nodes()})"
    )
    ours = ("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    lines = answer.stdout.splitlines()  # a slow machine prints "start Ray: 0:10 so far" before
    assert lines[-1] == "{'127.0.0.1'}"


def configurations() -> dict[str, type[Config]]:
    """What each command of each entry point is configured by."""
    found: dict[str, type[Config]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        commands = getattr(module, "COMMANDS", {"": getattr(module, "COMMAND", None)})
        for word, command in commands.items():
            found[f"{name} {word}".rstrip()] = module.CONFIG if command is None else command.config_class
    return found


def keys_below(config_class: type[Config], is_variant: bool = False) -> list[tuple[type[Config], str, FieldInfo]]:
    """Class, name and field of every key that can be set, whether it has a line of its own or not.

    The `type` of a union's variants is left out: it is told by the key that holds the union.
    """
    found: list[tuple[type[Config], str, FieldInfo]] = []
    for name, field in config_class.model_fields.items():
        if not (is_variant and name == "type"):
            found.append((config_class, name, field))
        annotation: Any = field.annotation
        while annotation is not None:
            classes = classes_of(annotation)
            for held in classes:
                found += keys_below(held, is_variant=len(classes) > 1)
            annotation = element_of(annotation)
    return found


def undescribed(config_class: type[Config]) -> set[str]:
    """What is wrong with the descriptions of a configuration's keys, one line each, naming class and key."""
    wrong: set[str] = set()
    for owner, name, field in keys_below(config_class):
        text, key = description_of(field), f"{owner.__name__}.{name}"
        if not text:
            wrong.add(f"{key} has no description: write one line under it, as a docstring")
        elif "\n" in text or len(text) > MAX_DESCRIPTION:
            wrong.add(f"{key}: the first sentence has {len(text)} characters; {MAX_DESCRIPTION} fit: {text}")
        elif type(None) in getattr(field.annotation, "__args__", ()) and not re.search(r"\bnull\b", text):
            wrong.add(f"{key} may be null; say what that means: {text}")
        wrong |= {
            f"{key} is in {unit}; say so: {text}"
            for pattern, unit in UNITS.items()
            if text and re.search(pattern, name) and not re.search(rf"\b{unit}\b", text, re.IGNORECASE)
        }
    return wrong


def test_every_key_of_every_command_is_described_in_one_line():
    commands = configurations()
    assert {command.split()[0] for command in commands} == set(MODULES)
    assert set().union(*map(undescribed, commands.values())) == set()
    assert [row for config_class in commands.values() for row in help_rows(config_class) if not row.description] == []


class _Left(Config):
    """One variant."""

    type: str = "left"
    old: int = 1
    """Documented."""
    fresh: int = 1


class _Fresh(Config):
    """A configuration as it is on the day that somebody adds keys to it."""

    inner: _Left = _Left()
    items: tuple[_Left, ...] = ()
    """Things."""
    wait_seconds: float = 1.0
    """How long to wait."""
    limit: int | None = None
    """Most things."""
    long: int = Field(default=1, ge=1)
    """A sentence that goes on and on, and says far more about the key than anybody who looks for it wants to read."""
    good_ms: float | None = None
    """Milliseconds to wait; null for ever. More is said of it here, which is not shown."""


def test_a_key_without_a_description_is_named_with_its_class():
    assert {line.partition(" ")[0] for line in undescribed(_Fresh)} == {
        "_Left.type", "_Left.fresh", "_Fresh.wait_seconds", "_Fresh.limit", "_Fresh.long:",
    }  # fmt: skip
    rows = {row.key: row for row in help_rows(_Fresh)}
    assert rows["good_ms"].description == "Milliseconds to wait; null for ever"
    assert (rows["inner.fresh"].description, rows["items[].old"].description) == ("", "Documented")
