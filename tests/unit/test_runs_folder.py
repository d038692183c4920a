"""What `runs` stands for, and which outputs a job refuses."""

import pytest

from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import columns_to_add
from moray.cluster.caching.answer_store import AnswerStore
from moray.config import Config, load_config
from moray.distill.runs import begin_run, check_run
from moray.errors import ConfigError, MismatchError
from moray.runs_folder import JOB_VARIABLE, RUNS_VARIABLE, as_runs, resolve_runs


class Run(Config):
    output: str = "elsewhere"
    report: str | None = None
    parts: tuple[str, ...] = ()
    by_name: dict[str, str] = {}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    monkeypatch.delenv(JOB_VARIABLE, raising=False)


def test_without_the_variable_and_a_job_nothing_changes():
    values = {"output": "runs/a", "report": "b", "n": 3, "parts": ["./runs/c", None]}
    assert resolve_runs(values) == values


@pytest.mark.parametrize("folder", ["/shared/runs", "/shared/runs/", "s3://bucket/x"])
def test_a_leading_runs_is_the_shared_folder_at_any_depth(monkeypatch, tmp_path, folder):
    monkeypatch.setenv(RUNS_VARIABLE, folder)
    root = folder.rstrip("/")
    config = load_config(Run, ["output=runs/a", "parts=[runs/b, ./runs/c, /d/runs/e, runs]", "by_name.x=runs/f/g"])
    assert config.output == f"{root}/a"
    assert config.parts == (f"{root}/b", f"{root}/c", "/d/runs/e", "runs")
    assert config.by_name == {"x": f"{root}/f/g"}
    assert resolve_runs(resolve_runs({"output": "runs/a"})) == {"output": f"{root}/a"}


def test_a_file_of_settings_is_found_there_too(monkeypatch, tmp_path):
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    (tmp_path / "mine.yaml").write_text("output: runs/a")
    assert load_config(Run, ["runs/mine.yaml"]).output == f"{tmp_path}/a"


@pytest.mark.parametrize(
    "setting", ["output=runs/a", "output=a/b", "report=a.json", "parts=[runs/a]", "by_name.x=runs/a"]
)
def test_a_job_refuses_what_would_be_lost_with_it(monkeypatch, setting):
    assert load_config(Run, [setting])
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    key = setting.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"^{key} is '.*a.*', a relative path in the job's own copy .* set MORAY_RUNS"
    ):
        load_config(Run, [setting])
    with pytest.raises(ConfigError, match=r"^'runs/a\.yaml', a relative path"):
        load_config(Run, ["runs/a.yaml"])


@pytest.mark.parametrize("setting", ["output=/a/b", "output=s3://a/b", "report=~/a.json", "parts=[configs/a.yaml]"])
def test_a_job_takes_what_stays(monkeypatch, setting):
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    assert load_config(Run, [setting])


def test_a_job_with_the_shared_folder_takes_runs(monkeypatch):
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    monkeypatch.setenv(RUNS_VARIABLE, "/shared")
    assert load_config(Run, ["output=runs/a"]).output == "/shared/a"
    with pytest.raises(ConfigError, match="output is 'a'"):
        load_config(Run, ["output=a"])


@pytest.mark.parametrize("first", [True, False])
def test_what_was_begun_with_the_variable_goes_on_without_it_and_the_reverse(monkeypatch, tmp_path, first):
    monkeypatch.chdir(tmp_path)
    words = ["output=runs/a", "parts=[./runs/b, c]", "by_name.x=runs/d"]

    def settings(is_set: bool) -> Run:
        if is_set:
            monkeypatch.setenv(RUNS_VARIABLE, f"{tmp_path}/runs/")
        else:
            monkeypatch.delenv(RUNS_VARIABLE, raising=False)
        return load_config(Run, words)

    before = settings(first)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    begin_run(folder, before, None, {})
    stores = CacheStore(str(tmp_path / "cache")), AnswerStore(str(tmp_path / "answers"))
    stores[0].begin_or_resume(before.model_dump(mode="json"))
    stores[1].begin(before.model_dump(mode="json"), "")
    now = settings(not first)
    assert now != before
    check_run(folder, now, {}, irrelevant=())
    stores[0].begin_or_resume(now.model_dump(mode="json"))
    more = {"target": {"fingerprint": "f"}, "cache": {}, "columns": {"h": {}}}
    CacheStore(str(tmp_path / "grown")).begin_or_resume({**before.model_dump(mode="json"), **more, "columns": {}})
    assert columns_to_add(CacheStore(str(tmp_path / "grown")), now.model_dump(mode="json") | more) == ["h"]
    stores[1].begin(now.model_dump(mode="json"), "")
    other = now.model_copy(update={"by_name": {"x": "elsewhere/d"}})
    for again in (
        lambda: check_run(folder, other, {}, irrelevant=()),
        lambda: stores[0].begin_or_resume(other.model_dump(mode="json")),
        lambda: stores[1].begin(other.model_dump(mode="json"), ""),
    ):
        with pytest.raises(MismatchError, match="elsewhere/d"):
            again()


def test_a_folder_may_be_reached_through_links(monkeypatch, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "runs").symlink_to(tmp_path / "shared")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    names = [f"{tmp_path}/{way}/a/b" for way in ("shared", "here/runs", "link/runs")]
    assert as_runs([*names, "runs/a/b", "./runs/a/b"]) == 5 * ["runs/a/b"]
    monkeypatch.setenv(RUNS_VARIABLE, f"{tmp_path}/link/runs")
    assert as_runs([*names, "runs/a/b"]) == 4 * ["runs/a/b"]


def test_only_what_lies_in_the_folder_is_written_as_runs(monkeypatch, tmp_path):
    monkeypatch.setenv(RUNS_VARIABLE, "s3://bucket/x")
    values = {"a": ["s3://bucket/x/y", "s3://bucket/xy", None], "b": 3, "c": str(tmp_path / "runs" / "y")}
    assert as_runs(values) == values | {"a": ["runs/y", "s3://bucket/xy", None]}
