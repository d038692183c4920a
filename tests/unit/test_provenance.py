"""Records beside artefacts, and files that are either whole or absent."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from moray.config import Config
from moray.errors import DataError
from moray.provenance import (
    git_state,
    machine,
    read_json,
    read_run_yaml,
    sha256_of_files,
    versions,
    write_json_atomically,
    write_run_yaml,
)


class Inner(Config):
    lr: float = 1e-5
    out: Path = Path("runs/a")


class Outer(Config):
    inner: Inner = Inner()
    sizes: tuple[int, ...] = (1, 2)


def test_run_yaml_holds_what_is_needed_to_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipelines/distill.py", "inner.lr=1e-5"])
    monkeypatch.setenv("MORAY_TEST_SECRET", "hunter2-do-not-record")
    path = write_run_yaml(tmp_path / "new" / "folder", Outer(), seed=7, fingerprints={"target": "abc"})
    record = read_run_yaml(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "run.yaml"
    assert Outer.model_validate_json(json.dumps(record["config"])) == Outer()
    assert record["argv"] == ["pipelines/distill.py", "inner.lr=1e-5"]
    assert (record["seed"], record["fingerprints"]) == (7, {"target": "abc"})
    assert datetime.fromisoformat(record["written_at"]).utcoffset() == timedelta(0)
    assert record["versions"] == versions()
    assert record["machine"]["cores"] >= 1
    assert "hunter2" not in path.read_text()


def test_versions_are_the_installed_ones():
    import torch

    assert versions()["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert versions()["torch"] == torch.__version__
    assert all(versions().values())


def test_a_missing_or_damaged_run_yaml_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"has no usable run\.yaml: .*does not exist"):
        read_run_yaml(tmp_path)
    (tmp_path / "run.yaml").write_text("a: [1")
    with pytest.raises(DataError, match=r"run\.yaml' is not valid YAML"):
        read_run_yaml(tmp_path)


def test_the_machine_is_described_from_the_system():
    described = machine()
    cores = subprocess.run(["getconf", "_NPROCESSORS_ONLN"], capture_output=True, text=True, check=True).stdout
    assert 1 <= described["cores"] <= int(cores)
    assert described["memory_gib"] > 0.1
    assert described["cpu"]
    assert isinstance(described["gpus"], list)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_git_state_names_the_commit_and_its_changes(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    assert git_state(source) is None  # outside git
    git(tmp_path, "init", "-q")
    assert git_state(source) is None  # inside, yet not tracked
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert git_state(source) == {"sha": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "note.txt").write_text("untracked")
    assert git_state(source) == {"sha": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    source.write_text("a = 2\n")
    assert git_state(source) == {"sha": git(tmp_path, "rev-parse", "HEAD"), "dirty": True}


def test_run_yaml_does_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    write_run_yaml(tmp_path, Outer())
    assert "git" not in read_run_yaml(tmp_path)


def test_json_survives_the_round_trip_and_leaves_no_temporary_file(tmp_path):
    value = {"tau": 3.5, "drafter": "moa", "text": "grün", "null": None, "list": [1, 2]}
    write_json_atomically(tmp_path / "new" / "a.json", value)
    write_json_atomically(tmp_path / "new" / "a.json", value)
    assert read_json(tmp_path / "new" / "a.json") == value
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomically(path, [1])
    with pytest.raises(DataError, match=r"a\.json' cannot be written as JSON"):
        write_json_atomically(path, {"loss": float("nan")})
    assert read_json(path) == [1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"{'a': 1}"])
def test_damaged_json_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json' is not valid JSON"):
        read_json(path)


def test_absent_json_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(DataError, match=r"a\.json' cannot be read: No such file"):
        read_json(tmp_path / "a.json")


def test_a_kill_while_writing_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomically(path, [0] * 50_000)
    code = (
        "import itertools, sys; from pathlib import Path; from moray.provenance import write_json_atomically\n"
        "for i in itertools.count(): write_json_atomically(Path(sys.argv[1]), [i] * 50_000)"
    )
    before = path.stat().st_ino
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while path.stat().st_ino == before:
        assert time.monotonic() < deadline, "the writer never replaced the file"
        time.sleep(0.01)
    for _ in range(20):  # a reader beside the writer never meets half a file
        assert len(set(read_json(path))) == 1
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    value = read_json(path)
    assert len(value) == 50_000
    assert len(set(value)) == 1


def test_fingerprints_follow_name_and_content_and_nothing_else(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_bytes(b"x" * 3_000_000)
        (tmp_path / folder / "b").write_bytes(b"y")
    one = [tmp_path / "one" / name for name in "ab"]
    two = [tmp_path / "two" / name for name in "ba"]
    fingerprint = sha256_of_files(one)
    entries = [["a", hashlib.sha256(b"x" * 3_000_000).hexdigest()], ["b", hashlib.sha256(b"y").hexdigest()]]
    assert fingerprint == hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    assert sha256_of_files(two) == fingerprint
    two[0].write_bytes(b"z")
    assert sha256_of_files(two) != fingerprint
    assert sha256_of_files([one[0]]) != fingerprint
    with pytest.raises(DataError, match="absent' cannot be read for its fingerprint"):
        sha256_of_files([tmp_path / "absent"])
