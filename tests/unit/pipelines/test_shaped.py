"""The benchmark on random weights: its synthetic acceptance is what was asked for, and said to be synthetic."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_drafters import DRAFTERS

from moray.bench.answers import AnsweredTurn, MethodAnswer
from moray.bench.reports.wording import percent, times
from moray.config import validate
from moray.decoding.generation import Generation, tau
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import Sampler
from moray.errors import ConfigError, DataError
from moray.provenance import write_json_atomically
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape
from moray.trees.tree import TokenTree, fixed_structure
from pipelines.benchmarks.replay import LengthsAtRate, RecordedLengths, ReplayedAcceptance, acceptance_rate
from pipelines.benchmarks.shaped import benchmark_shape, print_shaped, random_target
from pipelines.benchmarks.shaped_config import RecordedAcceptanceConfig, ShapeConfig, ShapedBenchmarkConfig

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
    with pytest.raises(
        ConfigError, match=r"tau is 4\.2; a tree 'chain-3' emits 4 tokens a pass at most: take a deeper"
    ):
        acceptance_rate(4.2, ChainShape(type="chain", depth=3))


def test_replayed_lengths_follow_the_rate_and_paths_lie_in_the_tree():
    structure = fixed_structure((2, 2, 2, 1), CPU)
    size = structure.parents.shape[0]
    tree = TokenTree(torch.arange(size), structure.parents, structure.depths, structure.ancestors, 4)
    logits = torch.randn(size, 50, generator=torch.Generator().manual_seed(0))
    rate = acceptance_rate(3.0, FixedShape(type="fixed", branching=(2, 2, 2, 1)))
    accept = ReplayedAcceptance(LengthsAtRate(rate))
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
    text = console.export_text()
    assert "SYNTHETIC" in text
    for row in result["rows"]:
        ceiling = row["tau"] / (1 + row["draft_steps"] * result["ceiling"]["draft_cost"])
        assert row["ceiling_speedup"] == pytest.approx(ceiling)
        assert row["share_of_ceiling"] == pytest.approx(row["speedup_vs_plain"] / ceiling)
        shown = [drafter, row["tree"], times(row["speedup_vs_plain"]), times(ceiling), percent(row["share_of_ceiling"])]
        assert " ".join(shown).split() in [line.split() for line in text.splitlines()]


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


ACCEPTED = {"chain-5": ([5, 0, 2], [3, 4]), "dynamic-4x2-6": ([1, 1], [4, 0, 4])}


@pytest.fixture
def answers(tmp_path) -> Path:
    """Two answers of a drafter with two trees, the last cycle of each cut by its end; half a line more."""
    lines = []
    for number in range(2):
        generations = [MethodAnswer(method="plain", tree="", generation=Generation([7] * 9))]
        for tree, parts in ACCEPTED.items():
            accepted = parts[number]
            emitted = [length + 1 for length in accepted]
            emitted[-1] = max(1, emitted[-1] - 2)
            generation = Generation([7] * sum(emitted), accepted=accepted, emitted=emitted, drafted=[5] * len(accepted))
            generations.append(MethodAnswer(method="moa", tree=tree, generation=generation))
        turn = AnsweredTurn(question_id=str(number), turn=0, temperature=0.0, answers=tuple(generations))
        lines.append(turn.model_dump_json() + "\n")
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(lines) + '{"question_id": "3"')
    return path


def recorded_in(path: Path, **changes) -> RecordedAcceptanceConfig:
    return RecordedAcceptanceConfig(**({"recorded": str(path), "drafter": "moa", "tree": "chain-5"} | changes))


def test_recorded_lengths_come_in_order_and_cyclically_and_no_deeper_than_the_tree(answers):
    lengths = RecordedLengths.read(recorded_in(answers))
    round_of = [5, 0, 0, 3, 2]  # the ends of the answers took 2 tokens of 2 and of 4
    assert [lengths.next(5) for _ in range(10)] == round_of * 2
    assert [lengths.next(3) for _ in range(5)] == [3, 0, 0, 3, 2]
    assert lengths.next(0) == 0
    lengths.restart()
    assert lengths.next(8) == 5
    folder = RecordedLengths.read(recorded_in(answers.parent, tree="dynamic-4x2-6"))
    assert [folder.next(4) for _ in range(5)] == [1, 0, 4, 0, 2]


def test_a_benchmark_replays_the_recorded_tau_and_says_where_it_comes_from(answers):
    chosen = recorded_in(answers)
    chain = ChainShape(type="chain", depth=5)
    result = benchmark_shape(config_of(tau=None, acceptance=chosen, trees=(chain,), max_new_tokens=1 + 15 * 9))
    recorded = tau([Generation([], accepted=[5, 0, 2, 3, 4], emitted=[6, 1, 1, 4, 3])])
    assert recorded == 3.0
    assert result["rows"][0]["tau"] == pytest.approx(recorded), "nine whole rounds"
    assert result["rows"][0]["acceptance_rate"] is None
    expected = f"SYNTHETIC: replayed from {answers}, moa, chain-5, recorded tau 3 over 5 cycles"
    assert result["acceptance"].startswith(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "eagle"}, r"acceptance.drafter is 'eagle', which '.*' does not hold; it holds moa$"),
        ({"tree": "chain-4"}, r"acceptance.tree is 'chain-4', .* for moa; it holds chain-5, dynamic-4x2-6$"),
        ({"temperature": 1.0}, r"acceptance.temperature is 1; '.*' holds 0: name one of them$"),
    ],
)
def test_what_was_not_recorded_is_named_beside_what_was(answers, changes, message):
    with pytest.raises(DataError, match=message):
        RecordedLengths.read(recorded_in(answers, **changes))


def test_a_file_without_recorded_answers_is_one_line(answers):
    with pytest.raises(ConfigError, match=r"no.jsonl' cannot be read: No such file .*; name the answers.jsonl"):
        RecordedLengths.read(recorded_in(answers.with_name("no.jsonl")))
    report = answers.with_name("report.json")
    for content in ('{"rows": []}\n', '{\n "rows": []\n}\n'):
        report.write_text(content)
        with pytest.raises(
            DataError, match=r"report.json:1: .* is damaged .*; name the answers.jsonl of an evaluation"
        ):
            RecordedLengths.read(recorded_in(report))


def test_one_of_tau_and_recorded_acceptance_is_given(answers):
    values = config_of().model_dump(mode="json")
    with pytest.raises(ConfigError, match="neither tau nor acceptance is given; give one of the two"):
        validate(ShapedBenchmarkConfig, values | {"tau": None})
    acceptance = recorded_in(answers).model_dump()
    with pytest.raises(ConfigError, match="both tau and acceptance are given; give one of the two"):
        validate(ShapedBenchmarkConfig, values | {"acceptance": acceptance})
    assert validate(ShapedBenchmarkConfig, values | {"tau": None, "acceptance": acceptance}).tau is None
