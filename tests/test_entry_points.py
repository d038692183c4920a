"""Every entry point answers `--help` at once and explains a wrong key on one line."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from moray.bench.compare import comparison_parser
from moray.bench.configs import DecodeBenchmarkConfig, ShapedBenchmarkConfig
from moray.config import load_config, validate
from moray.errors import ConfigError
from pipelines.benchmark import split_command

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = [
    f"pipelines.{path.stem}" for path in sorted((REPOSITORY / "pipelines").glob("*.py")) if path.stem != "__init__"
]
HEAVY = {"torch", "ray", "transformers", "datasets"}
MAX_CPU_SECONDS = 2.0


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
    """Every `python -m pipelines...` that the README and the entry points show, continuation lines joined."""
    files = [REPOSITORY / "README.md", *REPOSITORY.glob("pipelines/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    found = [m for text in texts for m in re.findall(r"python -m (pipelines\.\w+ (?:\\+\n|[^`\n])+)", text)]
    return sorted({re.sub(r"\\+\n", " ", command).strip() for command in found})


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_are_complete_and_valid(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    module, *arguments = shlex.split(command)
    if arguments[0] == "compare":
        assert comparison_parser().parse_args(arguments[1:])
    elif module == "pipelines.benchmark":
        is_shaped, settings = split_command(arguments)
        if is_shaped and not (REPOSITORY / settings[0]).is_file():
            pytest.skip(f"{settings[0]} is still to come")
        config = load_config(ShapedBenchmarkConfig if is_shaped else DecodeBenchmarkConfig, settings)
        assert ("--json" in arguments) == (config.report is not None)
    else:
        assert load_config(importlib.import_module(module).CONFIG, arguments)


def test_a_benchmark_is_told_apart_and_its_file_named():
    demo = str(REPOSITORY / "configs" / "benchmarks" / "decode-demo.yaml")
    for words, expected in (
        ([], (False, [demo])),
        (["decode"], (False, [demo])),
        (["decode", "--json", "a.json"], (False, [demo, "report=a.json"])),
        (["--json", "a.yaml", "max_new_tokens=3"], (False, [demo, "report=a.yaml", "max_new_tokens=3"])),
        (["decode", "mine.yml", "--json", "a b.json"], (False, ["mine.yml", "report=a b.json"])),
        (["decode", "questions=q.yaml"], (False, [demo, "questions=q.yaml"])),
        (["shaped", "--json", "a.json", "b.yaml"], (True, ["report=a.json", "b.yaml"])),
        (["shaped"], (True, [])),
        (["decode", "--json"], (False, [demo, "--json"])),
    ):
        assert split_command(words) == expected


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
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert answer.stdout.strip() == "{'127.0.0.1'}"
