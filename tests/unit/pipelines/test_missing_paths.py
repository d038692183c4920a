"""What a command needs and cannot find is reported before Ray starts, which takes longer than the check."""

import pytest

from moray.cluster import session
from moray.cluster.training import resume
from moray.config import load_config
from moray.errors import ConfigError, DataError
from moray.models import check_path
from pipelines import cache_activations, distill, regenerate

CHATS = "configs/chats/smollm2.parquet"
TARGET = "no such file or folder; give a Hugging Face model folder, a GGUF file or a hub name$"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(session, "ray_session", lambda _: pytest.fail("Ray was started"))


@pytest.mark.parametrize("pipeline", [cache_activations, regenerate])
@pytest.mark.parametrize(("chats", "message"), [(CHATS, TARGET), ("{}/none.jsonl", r"^chats.path '.*' does not exist")])
def test_missing_targets_and_chats(pipeline, chats, message, tmp_path):
    words = [f"target.model={tmp_path}/none.gguf", f"chats.path={chats.format(tmp_path)}", f"output={tmp_path}/out"]
    with pytest.raises(ConfigError, match=message):
        pipeline.main(load_config(pipeline.CONFIG, words))


def test_a_missing_drafter_that_answers_chats(tmp_path):
    (tmp_path / "config.json").touch()
    words = [f"target.model={tmp_path}", f"chats.path={CHATS}", f"drafter={tmp_path}/none", f"output={tmp_path}/out"]
    with pytest.raises(DataError, match="none' holds no drafter"):
        regenerate.main(load_config(regenerate.CONFIG, words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target.model=none/none.gguf"], TARGET),
        (
            ["source={type: stream, chats: {path: none.jsonl}, capture: {num_targets: 2}}"],
            r"^chats.path 'none.jsonl' does not exist",
        ),
        (["validation={chats: none.jsonl}"], r"'none.jsonl' does not exist"),
    ],
)
def test_what_training_reads(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "is_complete", lambda _: False)
    (tmp_path / "config.json").touch()
    files = ["configs/drafters/medusa-demo.yaml", f"target.model={tmp_path}", f"output={tmp_path}/out"]
    with pytest.raises(ConfigError, match=message):
        distill.main(load_config(distill.CONFIG, [*files, *words]))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("README.md", "that is a file, but not a GGUF file"),
        ("configs", "no config.json there"),
        ("configs/none.gguf", "there is no such file or folder"),
    ],
)
def test_paths_that_are_no_models(model, problem):
    with pytest.raises(ConfigError, match=f"^target.model '{model}': {problem}; give "):
        check_path(model)
    check_path("owner/name")
