"""The benchmark on random weights: its synthetic acceptance is what was asked for, and said to be synthetic."""

import json

import pytest
import torch
from rich.console import Console
from support import DRAFTERS

from moray.bench.configs import ShapeConfig, ShapedBenchmarkConfig
from moray.bench.shaped import ReplayedAcceptance, acceptance_rate, benchmark_shape, print_shaped, random_target
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import Sampler
from moray.errors import ConfigError
from moray.provenance import write_json_atomically
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape
from moray.trees.tree import TokenTree, fixed_structure

CPU = torch.device("cpu")
SHAPE = ShapeConfig(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=120
)
TREES = (
    ChainShape(type="chain", depth=5),
    DynamicShape(type="dynamic", depth=5, breadth=3, nodes=12),
    AdaptiveShape(type="adaptive", depth=6),
)


def config_of(drafter: str = "moa", **changes) -> ShapedBenchmarkConfig:
    settings = {"dtype": "float32", "device": "cpu", "tau": 3.2, "verify_sizes": (1, 8), "context": 40}
    settings |= {"max_new_tokens": 128, "trees": TREES, "memory_bandwidth": 1e10}
    return ShapedBenchmarkConfig(shape=SHAPE, drafter=DRAFTERS[drafter][0], **(settings | changes))


@pytest.mark.parametrize("shape", TREES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("tau", [1.5, 3.0, 5.5])
def test_the_acceptance_rate_gives_the_tau_asked_for(shape, tau):
    rate = acceptance_rate(tau, shape)
    assert sum(rate**k for k in range(shape.depth + 1)) == pytest.approx(tau)


def test_a_tree_too_shallow_for_the_tau_is_refused():
    with pytest.raises(ConfigError, match=r"tau is 4\.2; a tree 'chain-3' emits 4 tokens a pass at most"):
        acceptance_rate(4.2, ChainShape(type="chain", depth=3))


def test_replayed_lengths_follow_the_rate_and_paths_lie_in_the_tree():
    structure = fixed_structure((2, 2, 2, 1), CPU)
    size = structure.parents.shape[0]
    tree = TokenTree(torch.arange(size), structure.parents, structure.depths, structure.ancestors, 4)
    logits = torch.randn(size, 50, generator=torch.Generator().manual_seed(0))
    accept = ReplayedAcceptance(acceptance_rate(3.0, FixedShape(type="fixed", branching=(2, 2, 2, 1))))
    sampler = Sampler(SamplingParams(), 50, CPU)
    lengths = []
    for _ in range(200):
        accepted = accept(tree, logits, sampler, 0)
        lengths.append(len(accepted.path))
        for above, below in zip([0, *accepted.path], accepted.path, strict=False):
            assert int(tree.parents[below]) == above
        last = accepted.path[-1] if accepted.path else 0
        assert accepted.next_token == int(logits[last].argmax())
    assert 1 + sum(lengths) / len(lengths) == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("drafter", ["moa", "eagle", "independent"])
def test_the_benchmark_measures_every_tree_and_says_that_acceptance_is_synthetic(drafter, tmp_path):
    result = benchmark_shape(config_of(drafter))
    assert result["acceptance"].startswith("SYNTHETIC")
    assert set(result["verify_ms"]) == {"1", "8"}
    assert result["draft_step_ms"] > 0
    assert [row["tree"] for row in result["rows"]] == [shape.name for shape in TREES]
    chain = result["rows"][0]
    assert chain["tau"] == pytest.approx(3.2, abs=0.3)
    for row in result["rows"]:
        if row["draft_cost"] is None:  # an adaptive shape that found drafting a loss
            assert row["tree"].startswith("adaptive")
            continue
        ideal = row["tau"] / (1 + row["draft_steps"] * row["draft_cost"])
        assert row["efficiency"] == pytest.approx(row["speedup_vs_plain"] / ideal)
        cycle_ms = sum(row["phases_ms"].values())
        assert row["speedup_vs_plain"] == pytest.approx(row["tau"] * result["plain_ms"] / cycle_ms, rel=0.02)
    write_json_atomically(tmp_path / "shaped.json", result)
    assert json.loads((tmp_path / "shaped.json").read_text()) == json.loads(json.dumps(result))
    console = Console(record=True, width=100)
    print_shaped(result, console)
    assert "SYNTHETIC" in console.export_text()


def test_the_ceiling_counts_the_bytes_that_a_step_reads():
    config = config_of()
    ceiling = benchmark_shape(config)["ceiling"]
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64  # q and o, k and v, MLP, two norms
    plain = 4 * (2 * layer + 64 + 120 * 64)  # and the last norm and lm_head, but no embeddings
    assert ceiling["plain_bytes"] == plain
    assert ceiling["plain_ms"] == pytest.approx(1e3 * plain / 1e10)
    layers = 2 * (2 * 64 * 64 + 3 * 64 * 96 + 2 * 64)  # q and o, MLP, two norms of both proposing layers
    keys_values = 64 * 2 * 32  # of self-attention; those of the memory are made where the target runs
    assert ceiling["draft_bytes"] == 4 * (layers + keys_values + 120 * 64)
    assert ceiling["draft_cost"] == pytest.approx(ceiling["draft_bytes"] / plain)


def test_random_weights_are_sure_of_themselves_and_come_in_the_type_asked_for():
    target = random_target(config_of(dtype="bfloat16"), CPU)
    assert target.dtype == torch.bfloat16
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert float(target.logits(hidden).float().softmax(-1).max(-1).values.mean()) > 0.3
