"""What Serve hands to the application: nested values of a file, or the words of a command."""

import pytest

from moray.config import validate
from moray.errors import ConfigError
from moray.trees.shapes import ChainShape
from serve.config import ServeConfig, read_args


def test_words_are_overrides():
    config = read_args(
        {
            "target.model": "runs/demo/target",
            "drafters.moa": "runs/demo/moa",
            "drafters.lookup": "{type: ngram}",
            "engine.tree": "{type: chain, depth: 5}",
            "engine.max_num_seqs": "4",
            "draft_timeout_ms": "2.5e1",
            "threads": "1",
            "placement": "in_process",
        }
    )
    assert config.target.model == "runs/demo/target"
    assert list(config.drafters) == ["moa", "lookup"]
    assert config.drafters["moa"] == "runs/demo/moa"
    assert config.engine.tree == ChainShape(type="chain", depth=5)
    assert (config.engine.max_num_seqs, config.threads, config.draft_timeout_ms) == (4, 1, 25.0)
    assert config.placement == "in_process"


def test_a_file_s_values_are_taken_as_they_are():
    values = {"target": {"model": "1"}, "drafters": {"moa": "2"}, "engine": {"max_num_seqs": 4}}
    config = read_args(values)
    assert (config.target.model, config.drafters["moa"], config.engine.max_num_seqs) == ("1", "2", 4)
    assert read_args(values | {"engine.max_num_seqs": "5"}).engine.max_num_seqs == 5
    assert read_args(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "'target' is missing"),
        ({"target.modle": "x"}, "unknown key 'target.modle'; did you mean 'target.model'"),
        ({"target.model": "x", "threads": "many"}, "'threads' is"),
        ({"target.model": "x", "threads": "[1"}, "not valid YAML"),
        ({"target..model": "x"}, "has an empty key"),
        ({"target.model": "x", "run_ahead": "true", "placement": "in_process"}, "in a pool alone"),
        (
            {"target.model": "x", "run_ahead": "true", "engine.tree": "{type: fixed, branching: [2]}"},
            "fixed-2; drafters",
        ),
        ({"target.model": "x", "run_ahead": "true", "engine.tree": "{type: chain, depth: 32}"}, "depth 32; at most 31"),
        (
            {
                "target.model": "x",
                "run_ahead": "true",
                "engine": "{tree: {type: chain, depth: 4}, synthetic: {draft: {ms: 5}}}",
            },
            "engine.synthetic.draft has costs",
        ),
    ],
)
def test_what_is_wrong_is_named(args, message):
    with pytest.raises(ConfigError) as error:
        read_args(args)
    assert message in str(error.value)


def test_a_folder_with_an_equals_sign_stays_one():
    assert read_args({"target.model": "a=b"}) == ServeConfig.model_validate({"target": {"model": "a=b"}})


def test_prompt_lookup_is_not_for_a_pool():
    """It has no weights and is done sooner than somebody else is asked."""
    args = {"target.model": "x", "drafters.lookup": "{type: ngram}"}
    assert read_args(args).pooled == {}
    assert read_args(args | {"drafters.moa": "y"}).pooled == {"moa": "y"}
    assert read_args(args | {"drafters.moa": "y", "placement": "in_process"}).pooled == {}
    for setting in ({"run_ahead": "true"}, {"engine.num_micro_batches": "2"}):
        with pytest.raises(ConfigError, match=r"run_ahead is true|there is no pool"):
            read_args(args | setting)
        read_args(args | {"drafters.moa": "y"} | setting)


def test_who_runs_ahead_holds_more_nodes():
    args = {"target.model": "x", "drafters.d": "y", "engine.tree": "{type: chain, depth: 5}"}
    assert (read_args(args).num_expanded, read_args(args | {"run_ahead": "true"}).num_expanded) == (5, 11)


@pytest.mark.parametrize(
    ("best", "args", "message"),
    [
        (
            "",
            {"drafters": {"moa": "runs/moa"}},
            "found plain decoding to be the fastest, but drafters names moa: leave",
        ),
        ("trees: [{type: chain, depth: 2}]", {}, "was made without a drafter: name in drafters the one that drafts"),
        (
            "trees: [{type: chain, depth: 2}]",
            {"drafters": {"moa": "runs/moa"}, "engine": {"tree": {"type": "chain", "depth": 3}}},
            "and engine.tree name different trees: leave out one",
        ),
        (
            "{trees: [{type: chain, depth: 2}], drafters: [runs/h/moa]}",
            {"drafters": {"moa": "runs/moa"}},
            "drafters.moa is runs/moa, but plan .* gives that name to runs/h/moa: rename the first",
        ),
        ("tree: {type: chain, depth: 2}", {}, "tree"),
        ("drafters: [runs/moa]", {}, "drafters is given without trees"),
        (
            "trees: [{type: chain, depth: 2}]",
            {"drafters": ["runs/moa"]},
            r"drafters is \['runs/moa'\]; with plan it has",
        ),
    ],
)
def test_a_plan_that_contradicts_the_other_values_is_refused(tmp_path, best, args, message):
    (tmp_path / "best.yaml").write_text(best)
    with pytest.raises(ConfigError, match=message):
        read_args({"target": {"model": "x"}, "plan": str(tmp_path / "best.yaml"), **args})


def test_a_plan_without_settings_serves_plain_decoding(tmp_path):
    (tmp_path / "best.yaml").write_text("# For 16 at a time, plain decoding is the fastest: no drafter pays here.")
    config = read_args({"target": {"model": "x"}, "plan": str(tmp_path / "best.yaml")})
    assert not config.drafters


def test_a_planned_drafter_may_be_among_the_given_ones_however_it_is_written(tmp_path):
    best = "{trees: [{type: chain, depth: 2}], drafters: [runs/moa]}"
    (tmp_path / "best.yaml").write_text(best)
    drafters = {"lookup": {"type": "ngram"}, "moa": "./runs/moa/"}
    config = read_args({"target": {"model": "x"}, "plan": str(tmp_path / "best.yaml"), "drafters": drafters})
    assert [*config.drafters] == ["moa", "lookup"]
    (tmp_path / "best.yaml").write_text("{trees: [{type: chain, depth: 2}], drafters: [{type: ngram}]}")
    drafters = {"ngram": {"type": "ngram"}}
    config = read_args({"target": {"model": "x"}, "plan": str(tmp_path / "best.yaml"), "drafters": drafters})
    assert [*config.drafters] == ["ngram"]


def test_a_plan_is_refused_where_it_would_not_be_read():
    with pytest.raises(ConfigError, match=r"plan is 'best.yaml', which only `serve run` and `serve.deploy` read"):
        validate(ServeConfig, {"target": {"model": "x"}, "plan": "best.yaml"})
