"""Moray's compiled kernels for tests: where they can be compiled, and for which CPUs."""

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moray.targets.kernels import build
from moray.targets.kernels.compiled import CompiledKernels

CAN_COMPILE = sys.platform == "linux" and shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="compiled kernels need g++ and Linux")


def _cpus() -> list[str]:
    if platform.machine() != "x86_64":
        return ["native"]
    has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else False
    return ["native", *(["x86-64-v3"] if has_avx2 else []), "x86-64"]


CPUS = _cpus()
"""What the kernels are compiled for: this machine's CPU, one with AVX2, and one without AVX."""


def kernels_for(cpu: str, folder: Path) -> Iterator[CompiledKernels]:
    """Kernels compiled for a kind of CPU, in a cache folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(build, "_FLAGS", tuple(flag.replace("native", cpu) for flag in build._FLAGS))
        yield CompiledKernels(build.load_library())
