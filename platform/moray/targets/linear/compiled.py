"""Moray's own linear layers for few rows, compiled by the machine that runs them (`products.c`).

A plain step or a verify pass reads every weight once, so memory limits its speed. torch's and oneDNN's kernels reach
about half of that limit; these read each weight in one stream per thread and reach it. They need gcc and Linux; where
they cannot be compiled, other kernels compute.

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
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

_SOURCE = Path(__file__).with_name("products.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-fopenmp")
_MAX_SECONDS = 120
_WORD_BYTES = 4


class UnavailableError(Exception):
    """The kernels cannot be used on this machine; the text is half a sentence that says why."""


class CompiledKernels:
    """The kernels of a library that was loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._block: int = library.moray_block()
        self._functions = {
            torch.float32: library.moray_linear_float,
            torch.bfloat16: library.moray_linear_bfloat16,
        }
        for function in self._functions.values():
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
            function.restype = None

    def can_compute(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this weight in `dtype`: float32 or bfloat16, with whole words in a row."""
        return dtype in self._functions and weight.shape[1] * dtype.itemsize % _WORD_BYTES == 0

    def pack(self, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "blocks steps block per_word"]:
        """Copy a weight into blocks of outputs, zeros behind the last one; a word is one float32 or two bfloat16."""
        outputs, inputs = weight.shape
        per_word = _WORD_BYTES // weight.element_size()
        blocks = -(-outputs // self._block)
        padded = weight.new_zeros(blocks * self._block, inputs)
        padded[:outputs] = weight
        return padded.view(blocks, self._block, inputs // per_word, per_word).transpose(1, 2).contiguous()

    def linear(
        self,
        x: Float[Tensor, "*batch inputs"],
        packed: Float[Tensor, "blocks steps block per_word"],
        outputs: int,
        bias: Float[Tensor, " outputs"] | None = None,
    ) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias, summed in float32 and rounded once, for x of the weight's dtype."""
        _, steps, _, per_word = packed.shape
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], outputs)
        bias = None if bias is None else bias.float()
        self._functions[packed.dtype](
            packed.data_ptr(),
            x.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            outputs,
            steps,
            x.numel() // (steps * per_word),
            torch.get_num_threads(),
        )
        return out


@cache
def load_kernels() -> CompiledKernels | UnavailableError:
    """Load the kernels, compiled at the first call on this machine; or why there are none. Never raises."""
    try:
        return CompiledKernels(_load())
    except UnavailableError as error:
        return error


def _load() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise UnavailableError("they are for Linux only")
    compiler = shutil.which("gcc")
    if compiler is None:
        raise UnavailableError("gcc is not installed")
    openmp = _torch_openmp()
    try:
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)  # resolves the library's OpenMP functions
        return ctypes.CDLL(str(_compiled(compiler)))
    except OSError as error:
        raise UnavailableError(f"they cannot be loaded: {error}") from None


def _torch_openmp() -> Path:
    """The OpenMP library that torch computes on in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split("\n")
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if "/" in line}
    found = sorted(path for path in loaded if path.name.startswith(("libgomp", "libiomp5")))
    of_torch = [path for path in found if path.parent == Path(torch.__file__).parent / "lib"]
    if not found:
        raise UnavailableError("torch computes without OpenMP here")
    return (of_torch or found)[0]


def _compiled(compiler: str) -> Path:
    """The library in the cache folder, compiled if it is not there."""
    source = _SOURCE.read_bytes()
    version = _output_of([compiler, "--version"])
    identity = repr((source, _FLAGS, version, _cpu())).encode()
    folder = _cache_folder()
    library = folder / f"products-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch, "products.o"), Path(scratch, "products.so")
        _output_of([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled)])
        _output_of([compiler, "-shared", str(compiled), "-o", str(linked)])  # without an OpenMP library of its own
        linked.replace(library)  # other processes may do the same
    return library


def _cache_folder() -> Path:
    """`~/.cache/moray`, which nobody else may write to, since code in it is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moray"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UnavailableError(f"there is no cache folder for them: {error}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UnavailableError(f"others may write to '{folder}'")
    return folder


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"'{' '.join(command)}' failed: {error.stderr.strip()[:300]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"'{' '.join(command)}' failed: {error}") from None
    return done.stdout


def _cpu() -> str:
    """Name and instructions of this machine's CPU, which the compiler compiles for."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))
