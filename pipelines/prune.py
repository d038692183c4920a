"""Prune a target to a drafter: its most important layers, heads, MLP channels and hidden elements.

    python -m pipelines.prune configs/targets/smollm2.yaml configs/prune/smollm2.yaml

Importance is measured on chats of an activation cache. Then distill it: pipelines.distill with init.drafter=OUTPUT and
the same `drafter` settings.
"""

from moray.config import run_entry_point
from moray.distill.pruning.config import PruneConfig


def main(config: PruneConfig) -> None:
    """Measure, cut, and write a drafter's folder."""
    from itertools import islice

    import torch

    from moray.activations.format.manifest import read_manifest
    from moray.activations.format.store import CacheStore
    from moray.activations.reading.chats import chat_tokens
    from moray.activations.reading.token_counts import token_counts
    from moray.cluster.training.resume import check_same_target
    from moray.distill.pruning.prune import check_prunable, prune
    from moray.progress import Progress
    from moray.text import ChatTokenizer

    spec, store = check_prunable(config), CacheStore(config.activations)
    check_same_target(read_manifest(store), spec, config.activations, config.target)
    counts = torch.from_numpy(token_counts(store, spec.vocab_size))
    fingerprint = ChatTokenizer.load(config.target.model, config.target.template).fingerprint
    with Progress("measure importance", config.num_chats, unit="chats") as progress:
        layers = prune(
            config, islice(chat_tokens(store), config.num_chats), counts, fingerprint, lambda: progress.advance(1)
        )
    print(f"pruned: {config.output} (layers {', '.join(map(str, layers))} of {spec.num_layers})")


CONFIG = PruneConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
