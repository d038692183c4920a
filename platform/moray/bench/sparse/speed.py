"""Decodes the same prompts with every target and drafter in turn, and counts what each pass read.

Every row is compared with plain decoding of its own target: `lossless` says nothing about the dense one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moray.bench.sparse.divergence import Divergence, first_divergence
from moray.bench.sparse.work import Weights
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.targets.model import Target
from moray.targets.sparse.target import PassCounts, SparseTarget


@dataclass
class DecodingMethod:
    """One way to decode, and what it took."""

    name: str
    target_name: str
    target: Target
    decoder: SpeculativeDecoder
    plain: "DecodingMethod | None" = None
    """Plain decoding of the same target; None for that itself."""
    predictor_auc: float | None = None
    """Of the predictor that selects nodes, on held-out prompts."""
    texts: dict[int, list[int]] = field(default_factory=dict)
    """Answers by prompt."""
    seconds: float = 0.0
    num_tokens: int = 0
    num_cycles: int = 0
    num_emitted: int = 0
    num_verified: int = 0
    """Tokens of all passes: roots and draft nodes."""
    different: dict[int, Divergence | None] = field(default_factory=dict)
    """Prompts whose answers differ from plain decoding of the same target, and where; None for a dense target."""
    counts: PassCounts = field(default_factory=PassCounts)
    params: SamplingParams = field(default_factory=SamplingParams)
    """Greedy."""

    def answer(self, index: int, prompt: list[int], max_new_tokens: int, eos_ids: Sequence[int]) -> None:
        """Answer one prompt, and note the time without the prompt's."""
        target = self.target
        emitted: list[int] = []

        def on_tokens(tokens: list[int], _: int) -> None:
            if not emitted and isinstance(target, SparseTarget):
                target.counts = PassCounts()  # the passes so far have read the prompt
            emitted.extend(tokens)

        made = self.decoder.generate(prompt, self.params, max_new_tokens, eos_ids, on_tokens)
        self.seconds += made.seconds
        self.num_tokens += max(0, len(made.tokens) - 1)
        self.num_cycles += made.num_cycles
        self.num_emitted += sum(made.emitted)
        self.num_verified += made.num_cycles + sum(made.nodes)
        self.texts[index] = made.tokens
        if isinstance(target, SparseTarget):
            self.counts.add(target.counts)
        if self.plain is not None and made.tokens != self.plain.texts[index]:
            explained = None
            if isinstance(target, SparseTarget):
                explained = first_divergence(target, prompt, made.tokens, self.plain.texts[index])
            self.different[index] = explained

    @property
    def tokens_per_second(self) -> float:
        """Without reading prompts."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        """Mean tokens per pass."""
        return self.num_emitted / self.num_cycles if self.num_cycles else 1.0

    def figures(self, dense: "DecodingMethod") -> dict[str, Any]:
        """The row of the table."""
        is_sparse = isinstance(self.target, SparseTarget)
        own, whole = Weights.of(self.target), Weights.of(dense.target)
        depth = own.num_layers / whole.num_layers  # below 1 if layers were dropped
        products = own.products(self.counts) if is_sparse else own.total * self.num_verified
        return {
            "name": self.name,
            "target": self.target_name,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.tokens_per_second / dense.tokens_per_second,
            "tau": self.tau,
            "num_answers": len(self.texts),
            "num_different": len(self.different),
            "num_unexplained": sum(one is None or not one.is_tie for one in self.different.values()),
            "differences": [None if one is None else asdict(one) for one in self.different.values()],
            "layers_read": depth * (self.counts.layers_read if is_sparse else 1.0),
            "rows_run": depth * (self.counts.rows_run if is_sparse else 1.0),
            "kept_nodes": self.counts.kept_nodes if is_sparse else None,
            "weights_read": (own.read(self.counts) if is_sparse else own.total) / whole.total,
            "operations": products / max(1, self.num_tokens) / whole.total,
            "same_as_dense": sum(text == dense.texts[index] for index, text in self.texts.items()),
            "predictor_auc": self.predictor_auc,
        }
