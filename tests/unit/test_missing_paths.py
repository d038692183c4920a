"""What a command needs and cannot find is reported before Ray starts, which takes longer than the check."""

import pytest
import ray

from moray.config import load_config
from moray.errors import ConfigError
from pipelines import cache_activations, regenerate

CHATS = "configs/chats/smollm2.parquet"


@pytest.mark.parametrize("pipeline", [cache_activations, regenerate])
@pytest.mark.parametrize(
    ("chats", "message"),
    [
        (CHATS, "target.model '{}/none.gguf': there is no such file or folder; give a "),
        ("{}/none.jsonl", "chats.path '{}/none.jsonl' does not exist"),
    ],
)
def test_missing_paths_are_reported_before_ray_starts(pipeline, chats, message, tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    words = [f"target.model={tmp_path}/none.gguf", f"chats.path={chats.format(tmp_path)}", f"output={tmp_path}/out"]
    with pytest.raises(ConfigError) as caught:
        pipeline.main(load_config(pipeline.CONFIG, words))
    assert str(caught.value).startswith(message.format(tmp_path))
