"""Which part of every weight a rank of a tensor-parallel target holds. Torch-free.

As Megatron-LM splits layers (arXiv 1909.08053): queries, keys, values, gate and up projections by outputs, the
attention's output and the down projection by inputs, so that a layer needs two sums over all ranks; the lm_head by
outputs. Norms are whole everywhere. Only the first rank holds the embeddings: the others receive hidden states.
"""

from dataclasses import dataclass

from moray.errors import ConfigError
from moray.targets.spec import TargetSpec


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds of a target."""

    rank: int
    num_ranks: int
    query_heads: range
    kv_heads: range
    intermediate: range
    """Channels of the MLP."""
    vocabulary: range
    """Rows of the lm_head."""
    head_dim: int
    splits_attention: bool
    """Whether each rank computes only its heads; otherwise every rank computes all of them."""
    owns_kv_heads: bool
    """Whether no rank before this one holds the same key/value heads."""

    def part_of(self, name: str) -> tuple[int, range] | None:
        """Dimension of a tensor of the model and the range of it that this rank holds.

        Returns:
            None for a tensor that it holds whole; an empty range for one that it does not hold.
        """
        owner, _, kind = name.rpartition(".")
        last = owner.rpartition(".")[2]
        if name == "model.embed_tokens.weight":
            return None if self.rank == 0 else (0, range(0))
        if name == "lm_head.weight":
            return 0, self.vocabulary
        if last in ("gate_proj", "up_proj"):
            return 0, self.intermediate
        if last == "down_proj" or (last == "o_proj" and self.splits_attention):
            if kind == "bias":  # added once
                return None if self.rank == 0 else (0, range(0))
            return 1, self.intermediate if last == "down_proj" else self._elements(self.query_heads)
        if self.splits_attention and last in ("q_proj", "k_proj", "v_proj"):
            return 0, self._elements(self.query_heads if last == "q_proj" else self.kv_heads)
        return None

    def _elements(self, heads: range) -> range:
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


def plan_ranks(spec: TargetSpec, num_ranks: int) -> list[RankPlan]:
    """The plans of all ranks.

    Attention is split if the number of ranks divides that of query heads, and divides or is a multiple of that of
    key/value heads, which are then repeated. Otherwise every rank computes all of it. Other splits may be uneven by
    one.

    Raises:
        ConfigError: there are more ranks than rows of something that has to be split.
    """
    most = min(spec.intermediate_size, spec.vocab_size)
    if num_ranks > most:
        raise ConfigError(
            f"target.tensor_parallel is {num_ranks}; this target can be split among 1 to {most}: give a smaller number"
        )
    kv_divides = spec.num_kv_heads % num_ranks == 0 or num_ranks % spec.num_kv_heads == 0
    splits_attention = spec.num_heads % num_ranks == 0 and kv_divides
    plans: list[RankPlan] = []
    for rank in range(num_ranks):
        if splits_attention:
            query_heads = _share(spec.num_heads, rank, num_ranks)
            group = spec.num_heads // spec.num_kv_heads
            kv_heads = range(query_heads.start // group, (query_heads.stop - 1) // group + 1)
        else:
            query_heads, kv_heads = range(spec.num_heads), range(spec.num_kv_heads)
        plans.append(
            RankPlan(
                rank=rank,
                num_ranks=num_ranks,
                query_heads=query_heads,
                kv_heads=kv_heads,
                intermediate=_share(spec.intermediate_size, rank, num_ranks),
                vocabulary=_share(spec.vocab_size, rank, num_ranks),
                head_dim=spec.head_dim,
                splits_attention=splits_attention,
                owns_kv_heads=not plans or plans[-1].kv_heads != kv_heads,
            )
        )
    return plans


def _share(size: int, rank: int, num_ranks: int) -> range:
    """The rank's part of `size`; parts differ by at most one."""
    return range(size * rank // num_ranks, size * (rank + 1) // num_ranks)
