"""How many sequences an engine takes, and how it drafts. Torch-free."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from moray.config import Config
from moray.decoding.synthetic import SyntheticCosts
from moray.trees.shapes import AdaptiveShape, Shape

NodeSelection = Literal["all", "trie", "path", "budget", "drafter"]
"""See `decoding.engine.node_selection`."""


class EngineConfig(Config):
    """Limits of one engine."""

    max_num_seqs: int = Field(default=32, ge=1, le=1024)
    """Maximum number of sequences that run at the same time."""
    kv_cache_tokens: int = Field(default=16_384, ge=64)
    """Size of the KV cache in tokens, over all sequences. A sequence is admitted once its maximum length fits.
    The memory is allocated at start-up, except for a sparse target with `max_num_seqs: 1`, whose cache grows."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and answer together; null for all that context and KV cache allow."""
    max_num_batched_tokens: int = Field(default=512, ge=16)
    """Maximum number of prompt tokens read between two cycles. A higher number reads prompts sooner but delays the
    running sequences."""
    batch_admissions: bool = False
    """Hold new sequences back until there is one for every sixteen that run: for throughput. Reading a few prompts
    costs as much as a cycle of all sequences; use it where the time to the first token does not matter."""
    num_micro_batches: int = Field(default=1, ge=1, le=2)
    """Groups of sequences; with 2, one is verified while the pool drafts for the other. Use 2 with a drafter pool that
    takes about as long as the target."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees; adaptive follows batch size and acceptance, down to no draft at all."""
    select: NodeSelection = "all"
    """Nodes of a draft that a sparse target's later layers verify: all, or some of them (SpaDec). `path` is the
    published choice of its predictor; `trie` keeps more, `budget` as many as pay; `drafter` is `path` by the drafter's
    scores. Passes over several sequences verify all nodes."""
    synthetic: SyntheticCosts = SyntheticCosts()
    """For scaling experiments only: sleep as long as an accelerator would take. Off by default."""

    renamed: ClassVar[Mapping[str, str]] = {
        "max_sequences": "max_num_seqs",
        "kv_tokens": "kv_cache_tokens",
        "capacity": "max_model_len",
        "prefill_tokens": "max_num_batched_tokens",
        "gathers": "batch_admissions",
        "num_groups": "num_micro_batches",
    }

    def max_positions_of(self, max_positions: int) -> int:
        """Maximum length of a sequence for a target with this context; drafters need room for it."""
        return min(max_positions, self.max_model_len or max_positions, self.kv_cache_tokens)
