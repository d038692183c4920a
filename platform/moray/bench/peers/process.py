"""The benchmark's handle on an engine's process: starts it, sends prompts, and stops it while others are measured."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import moray
from moray.errors import DataError

MODULES = {
    "moray": "moray.bench.peers.engines.moray_decoder",
    "transformers": "moray.bench.peers.engines.hugging_face",
    "llama-cpp": "moray.bench.peers.engines.llama_cpp",
    "vllm": "moray.bench.peers.engines.vllm_cpu",
    "openvino": "moray.bench.peers.engines.openvino",
}


class EngineProcess:
    """One engine in its own process group, so that its child processes are stopped along with it.

    An engine that fails or exceeds its time limit is killed, so that it cannot disturb the others.
    """

    def __init__(self, engine: str, python: str, settings: dict[str, Any], log: Path) -> None:
        """
        Args:
            engine: key of `MODULES`.
            python: interpreter of the environment in which the engine is installed.
            settings: fields of `answering.Settings`.
            log: file for the engine's output.
        """
        self.version = ""
        self.failures: dict[int, str] = {}
        """Rows that the engine could not prepare: the reason by row number."""
        self.drafted: tuple[int, int] | None = None
        """Drafts and accepted tokens of the last answer, if the engine counts them."""
        self._log = log
        self._end: str | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join(filter(None, [str(Path(moray.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        threads = str(settings["threads"])
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", MODULES[engine]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
        self._replies: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._send(settings)

    def wait_until_loaded(self, seconds: float) -> None:
        """Wait until the engine has loaded, then stop it.

        Raises:
            DataError: the engine could not be loaded in time.
        """
        reply = self._receive(seconds)
        self.version = reply["version"]
        self.failures = {int(row): why for row, why in reply["failures"].items()}
        self._signal(signal.SIGSTOP)

    def answer(self, row: int, prompt: list[int], max_new_tokens: int, seconds: float) -> tuple[list[int], float]:
        """Return the new tokens of one answer and the seconds it took; the process runs only during this call.

        Raises:
            DataError: the engine failed, died or took longer than `seconds`, in this call or an earlier one.
        """
        if self._end is not None:
            raise DataError(self._end)
        self._signal(signal.SIGCONT)
        self._send({"row": row, "prompt": prompt, "max_new_tokens": max_new_tokens})
        reply = self._receive(seconds)
        self._signal(signal.SIGSTOP)
        self.drafted = None if reply["drafts"] is None else (reply["drafts"], reply["accepted"])
        return reply["tokens"], reply["seconds"]

    def close(self) -> None:
        """Kill the engine and all processes that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(b"")

    def _send(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: the next `_receive` reports why
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Return the engine's next reply; kill the engine if there is none or if it is an error."""
        problem = f"no reply within {seconds:.0f} s"
        with contextlib.suppress(queue.Empty):
            line = self._replies.get(timeout=seconds)
            if line:
                with contextlib.suppress(ValueError):
                    reply = json.loads(line)
                    if "error" not in reply:
                        return reply
                    line = reply["error"].encode()
                problem = line.decode(errors="replace").strip()[:300]
            else:
                problem = f"ended with exit code {self._process.wait()}"
        self.close()
        self._end = f"{problem}; its output is in '{self._log}'"
        raise DataError(self._end)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
