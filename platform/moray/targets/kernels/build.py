"""Compiles Moray's own kernels (`kernels.cpp` and its headers) on the machine that runs them, and loads them.

The library is kept in the user's cache folder. Its name holds a hash of its source, its compiler and the CPU, since
several machines may share that folder. It runs on the threads of torch's own OpenMP: those of a second one would
compete with them for the cores.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from moray.explain import one_line

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-fopenmp")
_MAX_SECONDS = 120


class UnavailableError(Exception):
    """The kernels cannot be used on this machine; the text is half a sentence that says why."""


def load_library() -> ctypes.CDLL:
    """Load the kernels, compiled if this machine has not done so yet.

    Raises:
        UnavailableError: they cannot be compiled or loaded.
    """
    if sys.platform != "linux":
        raise UnavailableError("they are for Linux only")
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("g++ is not installed")
    try:
        ctypes.CDLL(str(_torch_openmp()), mode=ctypes.RTLD_GLOBAL)  # resolves the library's OpenMP functions
        library = _compiled(compiler)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # a disk was full or a machine stopped while it was written
            library.unlink()
            return ctypes.CDLL(str(_compiled(compiler)))
    except OSError as error:
        raise UnavailableError(f"they cannot be loaded: {one_line(str(error))}") from None


def _torch_openmp() -> Path:
    """The OpenMP library that torch computes on in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").split("\n")
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line}
    found = [path for path in loaded if path.name.startswith(("libgomp", "libiomp5", "libomp"))]
    package = Path(torch.__file__).parent
    of_torch = [path for path in found if path.parent in (package / "lib", package.parent / "torch.libs")]
    if len(of_torch or found) != 1:
        raise UnavailableError(f"which OpenMP torch computes on is not clear, of {len(found)}")
    return (of_torch or found)[0]


def _compiled(compiler: str) -> Path:
    """The library in the cache folder, compiled if it is not there."""
    source = [path.read_bytes() for path in sorted([_SOURCE, *_SOURCE.parent.glob("*.h")])]
    version = _output_of([compiler, "--version"])
    identity = repr((source, _FLAGS, version, _cpu())).encode()
    folder = _cache_folder()
    library = folder / f"kernels-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _output_of([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled)])
        _output_of([compiler, "-shared", str(compiled), "-o", str(linked)])  # with no OpenMP library of its own
        linked.replace(library)  # other processes may do the same
    return library


def _cache_folder() -> Path:
    """`~/.cache/moray`. Only the user may write to it, because code in it is run."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moray"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise UnavailableError(f"there is no cache folder for them: {error}") from None
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnavailableError(f"others may write to '{folder}'")
    return folder


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_MAX_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"'{' '.join(command)}' failed: {one_line(error.stderr)[:300]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"'{' '.join(command)}' failed: {error}") from None
    return done.stdout


def _cpu() -> str:
    """Name and instructions of this machine's CPU, which the compiler compiles for."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))
