"""Provenance: where an artefact comes from, and files that are either whole or absent.

The folder of every run (a demo target, a cache, a distillation, an evaluation) carries a `run.yaml` with the
resolved configuration, the command line, the commit, versions, machine, seed and fingerprints. This module
refuses to record the environment, host names or remote addresses: they hold secrets more often than answers.
It imports neither torch nor ray.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from moray.config import Config, read_yaml
from moray.errors import ConfigError, DataError
from moray.explain import one_line

RUN_FILE = "run.yaml"
_PACKAGES = ("torch", "ray", "transformers", "pyarrow")


def write_run_yaml(
    folder: Path, config: Config, seed: int | None = None, fingerprints: Mapping[str, str] | None = None
) -> Path:
    """Write `run.yaml` into an artefact's folder, which is made if absent, and return its path."""
    path = folder / RUN_FILE
    write_text_atomically(path, run_yaml(config, seed, fingerprints))
    return path


def run_yaml(config: Config, seed: int | None = None, fingerprints: Mapping[str, str] | None = None) -> str:
    """The text of a `run.yaml`, for folders that are not on a local disk."""
    record: dict[str, Any] = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), "argv": list(sys.argv)}
    git = git_state(Path(__file__))
    if git is not None:
        record["git"] = git
    record |= {"versions": versions(), "machine": machine(), "seed": seed}
    record |= {"fingerprints": dict(fingerprints or {}), "config": config.model_dump(mode="json")}
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120)


def read_run_yaml(folder: Path) -> dict[str, Any]:
    """Read the record that `write_run_yaml` left in a folder; raise `DataError` if there is none or it is damaged."""
    try:
        return read_yaml(folder / RUN_FILE)
    except ConfigError as error:
        raise DataError(f"'{folder}' has no usable {RUN_FILE}: {error}") from None


def write_json_atomically(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader, or a kill at any moment, meets the old file or the new one, whole.

    Raises:
        DataError: for NaN or infinity, which JSON cannot hold; the old file stays.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DataError(
            f"'{path}' cannot be written as JSON: {error}; give null for a figure that is not finite"
        ) from None
    write_text_atomically(path, text + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raise `DataError` naming it if it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(
            f"'{path}' is not valid JSON: {one_line(str(error))}; delete it to have it made again"
        ) from None


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Fingerprint files by name and content, in constant memory.

    Folders and the order of the paths do not count, so a moved copy keeps its fingerprint. The result is not
    the sum that `sha256sum` prints, for names are part of it.
    """
    entries: list[tuple[str, str]] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                entries.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
        except OSError as error:
            raise DataError(f"'{path}' cannot be read for its fingerprint: {error.strerror}") from None
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def machine() -> dict[str, Any]:
    """Describe this machine: processor, cores this process may use, memory, and GPUs if torch is already loaded."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": usable,
        "memory_gib": round(memory / 2**30, 1),
        "gpus": _gpu_names(),
    }


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that decide numbers, read without importing them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state(source: Path) -> dict[str, Any] | None:
    """The commit a source file belongs to and whether tracked files differ from it; None outside git.

    An installed copy inside somebody else's repository is not tracked there, so that commit is not ours to
    name.
    """
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    sha = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return None if sha is None else {"sha": sha, "dirty": changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    return _output("git", "--no-optional-locks", "-C", str(folder), *arguments)


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is absent, fails or hangs: the record then does without."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu_names() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # Asking torch would initialise CUDA: a driver process must not take memory from the GPU of its workers.
    listed = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return listed.splitlines() if listed else ["unnamed"] * torch.cuda.device_count()


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill at any moment, meets the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine can leave the new name on an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under another name, then give it its own: a reader, or a kill at any moment, meets the
    old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    temporary.replace(path)
