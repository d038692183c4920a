"""Settings under which the tests on Ray make their caches: small parts and shards, so that there are several."""

from typing import Any

CACHE_SETTINGS: dict[str, Any] = {"max_length": 384, "batch_tokens": 1024, "shard_mib": 1, "chats_per_part": 12}
