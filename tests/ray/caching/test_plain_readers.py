"""The cache guide's Python block: a cache opens with plain pyarrow, pandas and datasets, and numpy decodes it."""

import numpy as np
import torch
from documented_code import python_blocks, run_block

PAGE = "docs/guide/cache.md"


def test_a_cache_opens_without_moray(tiny_cache, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (code,) = python_blocks(PAGE)
    assert "moray" not in code
    assert code.count('"runs/demo/activations"') == 1
    names = run_block(code.replace("runs/demo/activations", str(tiny_cache)), PAGE)
    table, frame, chats, hidden = (names[name] for name in ("table", "frame", "chats", "hidden"))
    wanted = torch.frombuffer(bytearray(table["hidden.-1"][0].as_py()), dtype=torch.bfloat16).float()
    assert np.array_equal(hidden, wanted.view(-1, names["width"]).numpy())
    assert len(hidden) == table["num_tokens"][0].as_py()
    assert frame["uid"].tolist() == table["uid"].to_pylist()
    assert [len(tokens) for tokens in frame["tokens"]] == frame["num_tokens"].tolist()
    assert len(chats) == 60
    assert chats[0]["uid"] == table["uid"][0].as_py()
