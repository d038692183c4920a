"""Kernels are compiled once for each machine, in a folder that only the user can write to; errors say why not."""

from pathlib import Path

import pytest
from compiled_kernels import needs_compiler

from moray.targets.kernels import build
from moray.targets.kernels.build import UnavailableError


def unavailable_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnavailableError) as found:
        build.load_library()
    return str(found.value)


def test_without_a_compiler_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert unavailable_reason(monkeypatch, tmp_path) in ("g++ is not installed", "they are for Linux only")


@needs_compiler
def test_a_compiler_that_fails_is_named_with_its_message(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_FLAGS", ("-O3", "-march=of-a-test"))
    reason = unavailable_reason(monkeypatch, tmp_path)
    assert "g++" in reason
    assert "of-a-test" in reason


@needs_compiler
def test_a_folder_that_others_may_write_to_is_refused(monkeypatch, tmp_path):
    (tmp_path / "moray").mkdir()
    (tmp_path / "moray").chmod(0o777)
    assert unavailable_reason(monkeypatch, tmp_path) == f"others may write to '{tmp_path / 'moray'}'"


@needs_compiler
def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = build.load_library()
    (library,) = (tmp_path / "moray").iterdir()
    written = library.stat().st_mtime_ns
    assert build.load_library()._name == first._name == str(library)
    assert library.stat().st_mtime_ns == written


@needs_compiler
def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", tuple(flag.replace("-O3", "-O0") for flag in build._FLAGS))
    library = build._compiled("g++")
    library.write_bytes(b"")
    assert build.load_library().moray_block() > 0


@needs_compiler
def test_without_a_home_the_reason_is_given(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.raises(UnavailableError, match="no cache folder for them: no home"):
        build.load_library()
