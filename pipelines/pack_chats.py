"""Shuffle chats and pack them into one small Parquet file: prompts for the target to answer, or answers to keep.

    python -m pipelines.pack_chats chats.path=runs/smollm2/answers output=answers.parquet max_bytes=3000000

Reads every format that pipelines.cache_activations reads. The output is deterministic.
"""

from moray.config import run_entry_point
from moray.data.pack import PackConfig


def main(config: PackConfig) -> None:
    """Pack the chats and print how many were packed."""
    from moray.data.pack import pack_chats

    told = pack_chats(config)
    print(
        f"{config.output}: {told['packed']:,} of {told['read']:,} chats, {told['bytes']:,} bytes"
        + (f"; {told['bad']:,} bad rows left out" if told["bad"] else "")
    )


CONFIG = PackConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
