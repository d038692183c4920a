"""Reads the tokens of the chats in an activation cache, without their activations."""

from collections.abc import Iterator

from moray.activations.format.store import CacheStore


def chat_tokens(store: CacheStore) -> Iterator[list[int]]:
    """Yield the token ids of every chat, in the order of the cache's parts."""
    for name in sorted(store.names("tokens", ".parquet")):
        for chat in store.read_table(f"tokens/{name}", ["tokens"]).column("tokens"):
            yield chat.as_py()
