"""Test session: the environment before anything imports ray or torch, checked tensor shapes, shared fixtures."""

import os

from serve_environment import VARIABLES

# Set before the first import of ray, torch or transformers: all three read these once. Processes that tests start
# inherit them. One thread per process, for Ray's workers and the tests share the cores. Serve runs as users run it, but
# for the token.
os.environ.update(VARIABLES)
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.25",
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",  # as our own sessions have it: a process less for every run
    RAY_DATA_USE_DATASOURCE_V2="0",
    RAY_metrics_report_interval_ms="1000",
    RAY_worker_niceness="0",  # by default others would starve them that share the cores
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
# Without compiled modules on disk, every process that a test starts compiles Moray's modules again, which takes 0.45 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TENSOR_PACKAGES = [
    f"moray.{name}" for name in ("drafters", "decoding", "targets", "trees", "distill", "activations", "batch")
]

# Shapes in annotations are checked on every call from here on; only modules imported later are covered. A function
# defined inside another is compiled anew each time: what runs in every cycle is a `partial` instead.
jaxtyping.install_import_hook(TENSOR_PACKAGES, "beartype.beartype")


_LONGEST = ("ray/chain", "ray/training", "ray/serving", "ray/caching", "unit/distill/test_zero.py")
"""Folders and files that take minutes, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Called by pytest, in every process: what is long comes first."""
    places = [REPOSITORY / "tests" / name for name in _LONGEST]

    def place_of(item: pytest.Item) -> int:
        return next((i for i, place in enumerate(places) if place in (item.path, item.path.parent)), len(places))

    items.sort(key=place_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes that share the tests take them file by file, so that what a file sets up is set up once, in the order
    given above, so that none has much to do when the others are done."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


class _FailuresAtOnce:
    """What fails is shown when it does: a run that is ended by its time limit never comes to pytest's own report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest, in the process that shares the tests out."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(
                f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}"
            )


class _Times:
    """The slowest tests and files, and every folder's total: wall time of set-up, call and tear-down together."""

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest, in the process that shares the tests out."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Called by pytest when all tests have run."""
        files: dict[str, list[float]] = {}
        suites: dict[str, list[float]] = {}
        for test, seconds in self._seconds.items():
            file = test.partition("::")[0]
            files.setdefault(file, []).append(seconds)
            suites.setdefault(str(Path(file).parent), []).append(seconds)
        write = terminalreporter.write_line
        terminalreporter.section(f"the {self._num_shown} slowest tests")
        for test in sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)[: self._num_shown]:
            write(f"{self._seconds[test]:8.1f} s  {test}")
        self._write_totals(terminalreporter, f"the {self._num_shown} slowest files", files, self._num_shown)
        self._write_totals(terminalreporter, "suites", suites, len(suites))
        write(f"{sum(self._seconds.values()):8.1f} s  {len(self._seconds):5d} tests  all together")

    def _write_totals(self, reporter: Any, title: str, groups: Mapping[str, list[float]], num_shown: int) -> None:
        reporter.section(title)
        for name in sorted(groups, key=lambda name: sum(groups[name]), reverse=True)[:num_shown]:
            reporter.write_line(f"{sum(groups[name]):8.1f} s  {len(groups[name]):5d} tests  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Called by pytest, in every process."""
    parser.addoption("--slowest-tests", type=int, default=0, help="show so many, and what every folder has taken")


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest, in every process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))
        if num_shown := config.getoption("--slowest-tests"):
            config.pluginmanager.register(_Times(num_shown))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tokenizers, chats and models beside the repository; skips where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent: no real tokenizers, chats and models to test with")
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of four logical CPUs for the whole session."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Thousands of tiny cycles: checking the tensors' shapes, as other tests do, would cost several times as much."""
    from shape_checks import unchecked

    with unchecked():
        yield
