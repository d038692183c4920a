"""Plans by hand: cycles of a chain from where its drafts agree, seconds from tables, the best row."""

import json
from dataclasses import asdict

import pytest
import yaml

from moray.bench.configs import EvaluateConfig
from moray.bench.plan.configs import PlanConfig
from moray.bench.plan.costs import CycleCostTable, tree_key
from moray.bench.plan.cycles import trimmed_mean
from moray.bench.plan.planner import plan
from moray.bench.plan.replayed import PLAIN, PlannedDraft, ReplayedCycle, chain, cycles_of_chain
from moray.bench.plan.throughput import expected, simulate
from moray.bench.replay.chains import ChainMatches, tau_of_chains
from moray.config import load_config, validate
from moray.errors import ConfigError, DataError
from moray.provenance import read_json
from moray.trees.shapes import DynamicShape, SparseShape
from serve.config import read_args

COSTS = {
    "passes": {1: {1: 1.0, 3: 2.0}, 3: {1: 2.0, 3: 4.0}},
    "drafts": {"moa": {1: {1: 0.25, 2: 0.5}}},
    "rest": {1: 0.1},
}
TEXT = ChainMatches("a", [2, 0, 0, 3, 1, 0], [3, 3, 3, 3, 3, 0])
PLAIN_TEXT = [ReplayedCycle(0, 1)] * 6
TREE = {"type": "dynamic", "depth": 2, "breadth": 2, "nodes": 3}


def test_a_tenth_at_each_end_does_not_count():
    usual = [1.0] * 8 + [3.0] * 2  # slow cycles that happen again and again do
    assert trimmed_mean([*usual, 100.0, 0.0]) == pytest.approx(1.4)
    assert trimmed_mean([2.0, 4.0]) == 3.0


def test_cycles_of_every_depth_follow_from_the_matches():
    assert list(TEXT.cycles(1)) == [(1, 1, 2), (1, 0, 1), (1, 1, 2), (0, 0, 1)]
    assert list(TEXT.cycles(3)) == [(3, 2, 3), (3, 3, 3)], "the last cycle is cut where the text ends"
    assert tau_of_chains([TEXT], 1) == 6 / 4
    assert tau_of_chains([TEXT], 3) == 6 / 2
    assert tau_of_chains([], 3) == 0


def test_seconds_between_the_given_sizes_are_interpolated_and_larger_ones_refused():
    costs = validate(CycleCostTable, COSTS)
    assert costs.pass_seconds(1, 2) == 1.5
    assert costs.pass_seconds(2, 2) == 0.5 * (1.5 + 3.0)
    assert costs.draft_seconds("moa", 1, 0) == 0
    assert costs.rest_seconds(1) == 0.1
    with pytest.raises(ConfigError, match=r"passes, sequences\): 4 was asked for, the largest given is 3"):
        costs.pass_seconds(4, 1)
    with pytest.raises(ConfigError, match=r"passes, tokens per sequence\): 4 was asked for"):
        costs.pass_seconds(1, 4)
    with pytest.raises(ConfigError, match=r"costs.drafts has no 'glide' \(there are: moa\)"):
        costs.draft_seconds("glide", 1, 1)


def test_a_batch_costs_what_its_sequences_cost_cycle_by_cycle():
    table = {"passes": {1: {1: 1.0, 2: 1.5}, 2: {1: 1.2, 2: 2.0}}, "drafts": {"moa": {1: {1: 0.5}, 2: {1: 0.75}}}}
    costs = validate(CycleCostTable, table)
    short = ChainMatches("b", [1, 0], [1, 1])
    alone = simulate(costs, chain("moa", 1), 1, [cycles_of_chain(short, 1)])
    assert alone.tokens_per_second == pytest.approx(2 / (0.5 + 1.5))
    assert alone.tau == 2
    texts = [cycles_of_chain(each, 1) for each in (TEXT, short)]
    both = simulate(costs, chain("moa", 1), 2, texts)  # 1 cycle of two, 3 of one, the last of them without a draft
    seconds = (0.75 + 2.0) + 2 * (0.5 + 1.5) + (0.5 + 1.0)
    assert both.tokens_per_second == pytest.approx(8 / seconds)
    assert both.draft_share == pytest.approx((0.75 + 3 * 0.5) / seconds)
    plainly = simulate(costs, PLAIN, 1, [PLAIN_TEXT])
    assert (plainly.tokens_per_second, plainly.tau, plainly.draft_share) == (1.0, 1.0, 0.0)


def test_plain_decoding_has_costs_of_its_own():
    costs = validate(CycleCostTable, COSTS | {"plain": {1: 0.5, 3: 0.9}})
    assert costs.plain_seconds(2) == pytest.approx(0.7)
    assert simulate(costs, PLAIN, 1, [PLAIN_TEXT]).tokens_per_second == 2.0
    assert expected(costs, PLAIN, 1, ()).tokens_per_second == 2.0
    assert validate(CycleCostTable, COSTS).plain_seconds(1) == 1.0 + 0.1, "a pass of one token, and the rest"


def test_given_rates_give_the_expected_tokens():
    found = expected(validate(CycleCostTable, COSTS), chain("moa", 2), 1, [0.5, 0.5, 0.9])
    assert found.tau == 1.75
    assert found.tokens_per_second == pytest.approx(1.75 / (0.5 + 2.0 + 0.1))


def test_a_tree_costs_its_nodes_and_what_drafting_it_takes():
    costs = validate(
        CycleCostTable, COSTS | {"trees": {"moa": {"dynamic-2x2-3": {1: 0.75}}}, "passes": {1: {1: 1, 5: 3}}}
    )
    draft = PlannedDraft("moa", validate(DynamicShape, TREE))
    found = simulate(costs, draft, 1, [[ReplayedCycle(3, 3), ReplayedCycle(1, 1)]])
    assert found.tokens_per_second == pytest.approx(4 / (2 * (0.75 + 0.1) + 2.5 + 1.5))
    assert found.tau == 2
    assert costs.can_draft_tree("moa", validate(DynamicShape, TREE))
    assert not costs.can_draft_tree("moa", validate(DynamicShape, TREE | {"nodes": 5})), (
        "there are no passes of 6 tokens"
    )
    sparse = [validate(SparseShape, {"type": "sparse", "paths": paths}) for paths in ([[0], [1]], [[0], [0, 0]])]
    assert [shape.name for shape in sparse] == ["sparse-2"] * 2
    assert tree_key(sparse[0]) != tree_key(sparse[1])
    with pytest.raises(ConfigError, match=r"costs.trees has no 'dynamic-2x2-3' of 'glide' \(there are: none\)"):
        costs.tree_seconds("glide", validate(DynamicShape, TREE), 1)


def test_trees_of_a_replay_are_planned_beside_its_chains(tmp_path):
    cycles = {"uid": "a", "nodes": [3, 3], "accepted": [2, 2], "emitted": [3, 3]}
    found = {
        "settings": {"log": "runs/log", "drafters": ["runs/moa"], "trees": [{"type": "chain", "depth": 1}, TREE]},
        "chains": [{"drafter": "moa", "depth": 2, "continuations": [asdict(TEXT)]}],
        "rows": [
            {"drafter": "moa", "tree": "chain-1", "cycles": []},
            {"drafter": "moa", "tree": "dynamic-2x2-3", "cycles": [cycles]},
        ],
    }
    replay = {"replay": str(tmp_path / "replay.json")}
    (tmp_path / "replay.json").write_text(json.dumps(found))
    costs = COSTS | {"passes": {1: {1: 1.0, 4: 1.2}}, "trees": {"moa": {"dynamic-2x2-3": {1: 0.2}}}}
    rows = planned(tmp_path, costs, **replay)["rows"]
    assert [row["tree"] for row in rows] == ["", "chain-1", "chain-2", "dynamic-2x2-3"]
    assert rows[-1]["tokens_per_second"] == pytest.approx(6 / (2 * (0.2 + 1.2 + 0.1)))
    best = yaml.safe_load((tmp_path / "plan" / "best.yaml").read_text())
    assert best == {"trees": [TREE], "drafters": ["runs/moa"]}
    best_file = str(tmp_path / "plan" / "best.yaml")
    evaluated = load_config(EvaluateConfig, ["configs/evaluations/demo.yaml", "target.model=x", best_file])
    assert (evaluated.drafters, [tree.name for tree in evaluated.trees]) == (("runs/moa",), ["dynamic-2x2-3"])
    served = read_args({"target": {"model": "x"}, "drafters": {"lookup": {"type": "ngram"}}, "plan": best_file})
    assert ([*served.drafters], served.drafters["moa"], served.engine.tree.name) == (
        ["moa", "lookup"],
        "runs/moa",
        "dynamic-2x2-3",
    ), "the planned drafter is the default"
    assert read_args(served.model_dump(mode="json")) == served
    assert len(planned(tmp_path, costs, trees=[], **replay)["rows"]) == 3
    without = planned(tmp_path, **replay)
    assert (len(without["rows"]), without["not_planned"]) == (3, ["moa, dynamic-2x2-3"])
    with pytest.raises(ConfigError, match=r"costs has no trees.moa.dynamic-2x2-3, .* or leave the tree out of trees"):
        planned(tmp_path, trees=["dynamic-2x2-3"], **replay)
    with pytest.raises(ConfigError, match="but acceptance describes chains alone"):
        planned(tmp_path, costs, trees=["fixed-2"], acceptance={"moa": [0.5]})
    with pytest.raises(ConfigError, match=r"trees has 'fixed-2', replay .* only dynamic-2x2-3: name one of those"):
        planned(tmp_path, costs, trees=["fixed-2"], **replay)


def planned(tmp_path, costs=COSTS, **values):
    (tmp_path / "costs.yaml").write_text(yaml.safe_dump(costs))
    settings = {"costs": str(tmp_path / "costs.yaml"), "output": str(tmp_path / "plan"), "batches": [1], **values}
    return plan(validate(PlanConfig, settings))


def test_the_best_row_is_the_fastest_and_plain_decoding_where_nothing_pays(tmp_path):
    found = planned(tmp_path, acceptance={"moa": [0.5, 0.5]})
    assert [(row["drafter"], row["depth"]) for row in found["rows"]] == [("plain", 0), ("moa", 1), ("moa", 2)]
    assert found["best"][0]["drafter"] == "plain"
    assert found["rows"][0]["break_even_tau"] == 1
    assert found["rows"][2]["break_even_tau"] == pytest.approx(2.6 / 1.1), "a cycle over a plain one"
    assert "no drafter pays" in (tmp_path / "plan" / "best.yaml").read_text()
    found = planned(tmp_path, acceptance={"moa": [0.99, 0.99]})
    assert found["best"][0]["depth"] == 2
    assert read_json(tmp_path / "plan" / "plan.json") == found
    best = yaml.safe_load((tmp_path / "plan" / "best.yaml").read_text())
    assert best == {"trees": [{"type": "chain", "depth": 2}]}, "where the drafter lies is not known"


def test_what_a_plan_cannot_use_is_refused(tmp_path):
    rates = {"acceptance": {"moa": [0.5]}}
    with pytest.raises(ConfigError, match=r"rest, sequences\): 3 was asked for, the largest given is 1"):
        planned(tmp_path, batches=[3], **rates)
    with pytest.raises(ConfigError, match="costs has no drafts of 'glide'"):
        planned(tmp_path, acceptance={"glide": [0.5]})
    with pytest.raises(ConfigError, match=r"costs .* is not a costs file: 'passes' is missing"):
        planned(tmp_path, costs={"rest": {1: 0.1}}, **rates)
    with pytest.raises(ConfigError, match="neither replay nor acceptance is given"):
        planned(tmp_path)
    with pytest.raises(ConfigError, match=r"`pipelines\.replay --json` makes one"):
        planned(tmp_path, replay=str(tmp_path / "nothing.json"))
    (tmp_path / "replay.json").write_text('{"chains": [], "settings": {"log": "runs/log", "drafters": ["runs/moa"]}}')
    with pytest.raises(ConfigError, match="has no chains of all depths: replay with max_depth=8"):
        planned(tmp_path, replay=str(tmp_path / "replay.json"))
    (tmp_path / "replay.json").write_text('{"rows": []}')
    with pytest.raises(DataError, match="replay again"):
        planned(tmp_path, replay=str(tmp_path / "replay.json"))
