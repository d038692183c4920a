"""Which rank of a tensor-parallel target holds what: everything once, heads with their key/value heads."""

import pytest

from moray.errors import ConfigError
from moray.targets.parallel.plan import plan_ranks
from moray.targets.spec import TargetSpec


def spec(heads: int, kv_heads: int, intermediate: int = 96) -> TargetSpec:
    return TargetSpec(
        family="llama",
        num_layers=2,
        hidden_size=64,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        intermediate_size=intermediate,
        vocab_size=97,
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-5,
        fingerprint="",
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "queries", "keys", "owners"),
    [
        (9, 3, 3, [range(3), range(3, 6), range(6, 9)], [range(1), range(1, 2), range(2, 3)], [True, True, True]),
        (4, 1, 2, [range(2), range(2, 4)], [range(1), range(1)], [True, False]),
        (8, 2, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)], [range(1)] * 2 + [range(1, 2)] * 2, [1, 0, 1, 0]),
        (9, 3, 2, [range(9)] * 2, [range(3)] * 2, [True, False]),  # heads do not divide
        (6, 4, 3, [range(6)] * 3, [range(4)] * 3, [True, False, False]),  # key/value heads do not
    ],
)
def test_heads_go_with_their_keys(heads, kv_heads, ranks, queries, keys, owners):
    plans = plan_ranks(spec(heads, kv_heads), ranks)
    assert [plan.query_heads for plan in plans] == queries
    assert [plan.kv_heads for plan in plans] == keys
    assert [plan.owns_kv_heads for plan in plans] == [bool(owner) for owner in owners]
    assert {plan.splits_attention for plan in plans} == {len(queries[0]) < heads}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_channels_and_vocabulary_are_held_once(ranks):
    plans = plan_ranks(spec(4, 2, intermediate=100), ranks)
    for part, size in (("intermediate", 100), ("vocabulary", 97)):
        held = [list(getattr(plan, part)) for plan in plans]
        assert [one for part_held in held for one in part_held] == list(range(size))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_parts_of_tensors():
    first, second = plan_ranks(spec(4, 2), 2)
    assert second.part_of("model.layers.0.self_attn.q_proj.weight") == (0, range(32, 64))
    assert second.part_of("model.layers.0.self_attn.v_proj.bias") == (0, range(16, 32))
    assert second.part_of("model.layers.0.self_attn.o_proj.weight") == (1, range(32, 64))
    assert second.part_of("model.layers.1.mlp.down_proj.weight") == (1, range(48, 96))
    assert second.part_of("model.layers.1.mlp.gate_proj.weight") == (0, range(48, 96))
    assert second.part_of("model.layers.1.input_layernorm.weight") is None
    assert second.part_of("model.layers.1.self_attn.q_norm.weight") is None
    assert first.part_of("model.embed_tokens.weight") is None
    assert second.part_of("model.embed_tokens.weight") == (0, range(0))
    assert first.part_of("model.layers.1.mlp.down_proj.bias") is None, "added once"
    assert second.part_of("model.layers.1.mlp.down_proj.bias") == (0, range(0))


def test_too_many_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"target.tensor_parallel is 98; this target can be split among 1 to 96"):
        plan_ranks(spec(4, 2), 98)
