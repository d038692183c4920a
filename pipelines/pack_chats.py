"""Pack chats into one small Parquet file, shuffled: prompts for the target to answer, or answers to keep.

    python -m pipelines.pack_chats chats.path=runs/smollm2/answers output=answers.parquet max_bytes=3000000

Reads whatever pipelines.cache_activations reads. The same command makes the same file.
"""

from moray.config import run_entry_point
from moray.data.pack import PackConfig


def main(config: PackConfig) -> None:
    """Pack, and say what became of the chats."""
    from moray.data.pack import pack_chats

    told = pack_chats(config)
    print(
        f"{config.output}: {told['packed']:,} of {told['read']:,} chats, {told['bytes']:,} bytes"
        + (f"; {told['bad']:,} bad rows left out" if told["bad"] else "")
    )


CONFIG = PackConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
