"""Decoding choices: which keys there are, what they come to for a drafter, and what is left out and why."""

from pathlib import Path
from typing import Any

import pytest

from moray.config import load_config, validate
from moray.errors import ConfigError
from moray.trees.shapes import SparseShape
from sweeps.decoding.check import sizes_of
from sweeps.decoding.combinations import Combination, Limits, UnfitError, combine, drawn, listed
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.tuning.configs import LadderConfig

REPOSITORY = Path(__file__).resolve().parents[3]
FREE = Limits("moa", None, 1024)
HEADS = Limits("medusa", 4, 600)
KEYS = {
    "tree.type": ["chain", "dynamic", "adaptive"],
    "tree.depth": [3, 5],
    "tree.breadth": [1, 4],
    "tree.nodes": [2, 16],
}


def config_of(**values: Any) -> TuneDecodingConfig:
    base = {"target": {"model": "t"}, "drafters": ["a/moa"], "questions": "q", "output": "o", "activations": "c"}
    return validate(TuneDecodingConfig, base | {"space": KEYS} | values)


def names(space: Any, limits: Limits = FREE) -> list[str]:
    return [one.name for one in listed(config_of(space=space).space, limits).combinations]


# --- Combinations ---


def test_a_tree_is_built_of_the_keys_that_its_type_reads():
    assert names(KEYS) == [
        "moa, chain-3", "moa, chain-5", "moa, dynamic-3x1-2", "moa, dynamic-3x4-16", "moa, dynamic-5x1-2",
        "moa, dynamic-5x4-16", "moa, adaptive-3", "moa, adaptive-3x4-16", "moa, adaptive-5", "moa, adaptive-5x4-16",
    ]  # fmt: skip


def test_what_is_left_out_is_counted_by_its_reason():
    found = listed(config_of().space, FREE)
    assert found.left_out == {
        "a chain has no breadth or nodes: the same as another one": 6,
        "the same as another one": 2,  # adaptive chains know no nodes
        "breadth 4 is more than 2 nodes": 4,
        "dynamic tree: nodes is 16, but depth 3 and breadth 1 make 3": 1,
        "dynamic tree: nodes is 16, but depth 5 and breadth 1 make 5": 1,
    }
    assert found.left_out.total() + len(found.combinations) == 24
    assert found.why().startswith("6 x a chain has no breadth or nodes")


def test_a_tree_too_deep_for_a_drafter_is_left_out_and_an_adaptive_one_made_shallower():
    found = listed(config_of(space={"tree.type": ["chain", "adaptive"], "tree.depth": [4, 5, 8]}).space, HEADS)
    assert [one.name for one in found.combinations] == ["medusa, chain-4", "medusa, adaptive-4"]
    assert found.left_out["depth 5: this drafter drafts at most 4 levels"] == 1
    assert found.left_out["the same as another one"] == 2


def test_a_draft_vocabulary_is_smaller_than_the_trained_one_and_holds_a_node_s_children():
    space = {"tree": [{"type": "fixed", "branching": [3, 2]}], "draft_vocab_size": [None, 2, 3, 600, 599]}
    assert names(space, HEADS) == ["medusa, fixed-3x2", "medusa, fixed-3x2, 3 tokens", "medusa, fixed-3x2, 599 tokens"]
    for size, reason in ((600, "not less than this drafter's 600"), (2, "3 children of a node"), (1.5, "no number")):
        with pytest.raises(UnfitError, match=reason):
            combine({"tree": space["tree"][0], "draft_vocab_size": size}, HEADS)


def test_choices_are_kept_and_taken_back():
    space = {"tree": [{"type": "adaptive"}, {"type": "sparse", "paths": [[0], [0, 1]]}], "draft_vocab_size": [None, 9]}
    for one in listed(config_of(space=space).space, FREE).combinations:
        assert Combination.of(one.choices) == combine(one.choices, FREE) == one


def test_trees_of_one_name_are_told_apart():
    shapes = [SparseShape(type="sparse", paths=paths) for paths in (((0,), (1,)), ((0,), (0, 0)))]
    assert len({Combination("moa", shape, None).name for shape in shapes}) == 2


def test_draws_are_different_from_each_other_and_the_same_again():
    space = config_of(space=KEYS | {"tree.depth": {"type": "integers", "low": 2, "high": 9}}, search=RANDOM).space
    first = drawn(space, FREE, 12, seed=1)
    assert len(first.combinations) == 12
    assert {one.tree.depth for one in first.combinations} <= set(range(2, 10))
    assert drawn(space, FREE, 12, seed=1) == first
    assert drawn(space, FREE, 12, seed=2).combinations != first.combinations
    assert len(drawn(config_of().space, FREE, 50, seed=0).combinations) == 10, "there are no more"


RANDOM = {"type": "random", "num_trials": 12}


# --- Configuration ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"space": {"tree.tpye": ["chain"]}}, r"'tree\.tpye' is no decoding choice; did you mean 'tree\.type'\?"),
        ({"space": {"tree": [{"type": "chain", "dpth": 3}]}}, r"did you mean 'tree\.0\.depth'"),
        ({"space": {"tree.type": ["chian"]}}, r"'tree\.type' holds 'chian'; did you mean 'chain'\?"),
        ({"space": {"tree.type": ["fixed"]}}, "list others whole"),
        ({"space": {"draft_vocab_size": [64]}}, "no trees"),
        ({"space": KEYS | {"tree": [{"type": "chain", "depth": 3}]}}, "give one or the other"),
        ({"space": KEYS | {"tree.depth": {"type": "uniform", "low": 1, "high": 3}}}, "range of uniform"),
        ({"space": KEYS | {"tree.depth": {"type": "integers", "low": 1, "high": 3}}}, "'tree.depth' is a range"),
        ({"space": KEYS | {"draft_vocab_size": [None, 64]}, "activations": None}, "needs activations"),
        ({"drafters": ["a/moa", "b/moa"]}, "two folders are called 'moa'"),
        ({"target": {"model": "t", "device": "cuda"}}, "gpus is 0"),
        ({"objectiv": "tau"}, "did you mean 'objective'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**values)


def test_keys_may_be_nested_as_overrides_write_them():
    words = ["target.model=t", "drafters=[d]", "questions=q", "output=o", "space.tree.type=[chain]"]
    assert load_config(TuneDecodingConfig, [*words, "space.tree.depth=[3, 5]"]).space == {
        "tree.type": ["chain"],
        "tree.depth": [3, 5],
    }


def test_an_evaluation_runs_where_resources_are_reserved():
    shape = listed(config_of().space, FREE).combinations[0].tree
    assert config_of().evaluation(("a/moa",), (shape,), "o", 4).target.device == "cpu"
    assert config_of(gpus=1).evaluation(("a/moa",), (shape,), "o", 4).target.device == "auto"


def test_rungs_ask_all_questions_last():
    assert sizes_of(LadderConfig(rungs=3, reduction=2), 16) == [4, 8, 16]
    assert sizes_of(LadderConfig(rungs=3, reduction=2), 78) == [19, 39, 78]
    assert sizes_of(LadderConfig(rungs=4, reduction=3), 5) == [1, 5], "no rung twice"


def test_the_demo_s_sweep_is_read(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    config = load_config(TuneDecodingConfig, ["configs/sweeps/decoding-demo.yaml"])
    assert list(config.folders) == ["moa", "eagle"]
    found = listed(config.space, FREE)
    assert len(found.combinations) == 10
    assert not found.left_out
