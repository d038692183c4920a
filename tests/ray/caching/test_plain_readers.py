"""The README's snippets: a cache opens with plain pyarrow, pandas and datasets, and numpy decodes it."""

from pathlib import Path

import numpy as np
import torch


def test_a_cache_opens_without_moray(tiny_cache: Path, tmp_path: Path) -> None:
    folder = str(tiny_cache)

    import json

    import pyarrow.parquet as pq

    manifest = json.load(open(f"{folder}/manifest.json"))  # noqa: SIM115, PTH123
    name = manifest["shards"][0]["name"]
    table = pq.read_table(f"{folder}/shards/{name}.parquet", columns=["uid", "num_tokens", "hidden.-1"])

    # One bfloat16 column of one chat with numpy alone: its 16 bits are the upper half of a float32.
    width = manifest["plan"]["columns"]["hidden.-1"]["width"]
    bits = np.frombuffer(table["hidden.-1"][0].as_py(), dtype="<u2").astype(np.uint32) << 16
    hidden = bits.view(np.float32).reshape(-1, width)  # tokens, width

    wanted = torch.frombuffer(bytearray(table["hidden.-1"][0].as_py()), dtype=torch.bfloat16).float().view(-1, width)
    assert np.array_equal(hidden, wanted.numpy())
    assert len(hidden) == table["num_tokens"][0].as_py()

    import pandas as pd

    frame = pd.read_parquet(f"{folder}/shards/{name}.parquet", columns=["uid", "num_tokens", "tokens"])
    assert frame["uid"].tolist() == table["uid"].to_pylist()
    assert [len(tokens) for tokens in frame["tokens"]] == frame["num_tokens"].tolist()

    import datasets

    chats = datasets.load_dataset(
        "parquet", data_files=f"{folder}/shards/*.parquet", columns=["uid", "tokens"], split="train",
        cache_dir=str(tmp_path),
    )  # fmt: skip
    assert len(chats) == 60
    assert chats[0]["uid"] == table["uid"][0].as_py()
