"""What a job brings along: the shipped file leaves out nothing that an entry point needs, and nothing large goes."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_entry_points import MODULES

from moray.cluster import ENVIRONMENT
from moray.cluster.session import runtime_env
from moray.config import read_yaml
from moray.runs_folder import JOB_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = read_yaml(REPOSITORY / "configs" / "runtime_env.yaml")
OWN = {name for name in ENVIRONMENT if name != "RAY_AUTH_MODE"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a node unpacks."""
    from ray._private.runtime_env.packaging import create_package

    folder = tmp_path_factory.mktemp("job")
    sent = str(REPOSITORY / SHIPPED["working_dir"])
    create_package(sent, folder / "code.zip", include_gitignore=True, excludes=SHIPPED["excludes"])
    assert (folder / "code.zip").stat().st_size < 8 << 20
    with zipfile.ZipFile(folder / "code.zip") as archive:
        archive.extractall(folder / "code")
    return folder / "code"


@pytest.mark.parametrize("module", MODULES)
def test_an_entry_point_runs_from_what_is_sent(copy, module):
    environment = os.environ | SHIPPED["env_vars"]
    words = [sys.executable, "-m", module, "--help"]
    outcome = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
    code = "import moray, serve; print(moray.__file__, serve.__file__)"
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert all(Path(file).is_relative_to(copy) for file in found.stdout.split())


def test_files_beside_the_code_are_sent_and_outputs_are_not(copy):
    sent = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "configs").rglob("*.yaml")} <= sent
    assert {"platform/moray/bench/reports/report.html.jinja", "serve/api/page/index.html", "pyproject.toml"} <= sent
    assert [name for name in sent if name.split("/")[0] in {"runs", "tests", ".git", ".venv"}] == []


def test_outside_of_a_job_the_same_is_sent_with_our_settings_of_ray(monkeypatch):
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    found = runtime_env()
    assert found["working_dir"] == str(REPOSITORY)
    assert found["excludes"] == SHIPPED["excludes"]
    assert set(found["env_vars"]) == OWN | {"PYTHONPATH"}


def test_in_a_job_only_what_it_was_not_given_is_added(monkeypatch):
    for given, missing in (('"MALLOC_TRIM_THRESHOLD_": "1"', {"MALLOC_TRIM_THRESHOLD_"}), ("", set())):
        monkeypatch.setenv(
            JOB_VARIABLE, f'{{"runtime_env": {{"working_dir": "gcs://a.zip", "env_vars": {{{given}}}}}}}'
        )
        assert set(runtime_env()) == {"env_vars"}
        assert set(runtime_env()["env_vars"]) == OWN - missing
    monkeypatch.setenv(JOB_VARIABLE, '{"runtime_env": null, "metadata": {}}')
    assert set(runtime_env()["env_vars"]) == OWN
