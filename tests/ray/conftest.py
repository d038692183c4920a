"""What the tests on Ray share: a tiny target with its tokenizer, chats, a cache of them, and processes to kill."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_caches import CACHE_SETTINGS

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_MARK = "MORAY_TEST_RUN"

# Ray's processes inherit the environment of their driver: so they are told from those of other sessions.
os.environ[RUN_MARK] = uuid.uuid4().hex

# What a shell runs in the background is deaf to Ctrl-C, and so would be all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _write_chats(path: Path, num_chats: int, seed: int = 0) -> Path:
    """Chats of one to three turns and very different lengths, in UltraChat's schema."""
    rng = random.Random(seed)
    words = "one two three four five six seven eight nine ten".split()

    def text(most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, most)))

    rows = []
    for number in range(num_chats):
        messages = []
        for _ in range(rng.randint(1, 3)):
            messages += [{"role": "user", "content": text(6)}, {"role": "assistant", "content": text(30)}]
        rows.append({"prompt": messages[0]["content"], "prompt_id": f"chat-{number}", "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny target."""
    from tiny_targets import save_chat_target

    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes and tokenizer, other weights."""
    from tiny_targets import save_chat_target

    return save_chat_target(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def write_chats() -> Callable[[Path, int], Path]:
    """Write that many chats to a file."""
    return _write_chats


@pytest.fixture(scope="session")
def chats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty chats."""
    return _write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 60)


@pytest.fixture(scope="session")
def tiny_cache(
    ray_session: None, tiny_target: Path, chats_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A complete cache of the sixty chats. Not to be written to."""
    from moray.activations.format.schema import CacheConfig
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig
    from moray.data.ultrachat import ChatsConfig
    from moray.targets.spec import TargetConfig

    folder = tmp_path_factory.mktemp("cache")
    cache_activations(
        str(folder),
        TargetConfig(model=str(tiny_target)),
        ChatsConfig(path=str(chats_file)),
        CacheConfig(**CACHE_SETTINGS),
        CaptureConfig(),
    )
    return folder


class Pipeline:
    """`python -m pipelines.NAME ...`, or another package's entry point by its whole name, in a process of its own."""

    def __init__(self, name: str, arguments: list[str], log: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self._log = log
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", name if "." in name else f"pipelines.{name}", *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **environment, RUN_MARK: self.mark},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def finish(self, seconds: float = 280) -> int:
        """Wait for it; the exit code."""
        return self._process.wait(timeout=seconds)

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """kill -9 the driver as soon as `ready`, then wait until all that works for it has gone by itself.

        Ray's two agents, which touch no file of ours, first try for a minute to tell the dead cluster's head.
        """
        self.wait_until(ready)
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.wait_until_gone(60, but=("DashboardAgent", "RuntimeEnvAgent"))

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self._process.pid, signal.SIGINT)

    def wait_until_gone(self, seconds: float, but: tuple[str, ...] = ()) -> None:
        """Wait until nothing that it has started lives any more."""
        deadline = time.monotonic() + seconds
        while left := [name for name in self.processes("").values() if not any(part in name for part in but)]:
            assert time.monotonic() < deadline, f"it left processes behind: {[name[:80] for name in left]}"
            time.sleep(0.1)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for something that the run does."""
        while not ready():
            assert self._process.poll() is None, f"it ended before it could be killed:\n{self.output}"
            time.sleep(0.02)

    def processes(self, title: str) -> dict[int, str]:
        """What it has started, by (part of) its command line or Ray's title."""
        return marked_processes(self.mark, title)

    def close(self) -> None:
        """End what a failed test left running."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in marked_processes(self.mark):
            _kill(pid)


def marked_processes(mark: str, title: str = "") -> dict[int, str]:
    """Living processes whose environment carries the mark, and whose command line holds `title`."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended, or is not ours
        if f"{RUN_MARK}={mark}".encode() in environment and title in command:
            found[int(folder.name)] = command
    return found


def _kill(pid: int) -> None:
    """kill -9, if it still lives."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture(scope="session")
def kill() -> Callable[[int], None]:
    """kill -9 a process by its id."""
    return _kill


@pytest.fixture(scope="module")
def start_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pipeline]]:
    """Start pipelines as a user would; whatever is left of them ends with the module."""
    started: list[Pipeline] = []
    logs = tmp_path_factory.mktemp("logs")

    def start(name: str, *arguments: str, **environment: str) -> Pipeline:
        started.append(Pipeline(name, list(arguments), logs / f"run-{len(started)}.log", **environment))
        return started[-1]

    yield start
    for pipeline in started:
        pipeline.close()


@pytest.fixture
def ray_processes() -> Callable[[str], dict[int, str]]:
    """Processes of this test session's own Ray by (part of) their title."""
    return lambda title: marked_processes(os.environ[RUN_MARK], title)
