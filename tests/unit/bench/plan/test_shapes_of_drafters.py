"""Shapes of independent drafters: equal sizes, laws by hand, and files that training takes."""

import pytest
import yaml
from tiny_targets import load_target

from moray.bench.plan.configs import ShapesConfig
from moray.bench.plan.page import print_shapes
from moray.bench.plan.shape_grid import block_parameters, break_even_tau, fit_line, grid_of, name_of
from moray.bench.plan.shapes import measure_shapes
from moray.config import validate
from moray.drafters.configs import IndependentConfig
from moray.errors import ConfigError
from moray.targets.spec import TargetSpec

SMOLLM2 = TargetSpec(
    family="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_positions=2048,
    rope_theta=10000.0,
    norm_eps=1e-5,
    fingerprint="",
)


def config_of(**others) -> ShapesConfig:
    return validate(ShapesConfig, {"target": {"model": "unread"}, "output": "unwritten", **others})


def test_all_shapes_have_the_parameters_of_two_layers_of_the_target():
    shapes = grid_of(config_of(), SMOLLM2)
    assert [name_of(shape) for shape in shapes] == ["1x768", "2x512", "4x384", "8x256"]
    of_target = 2 * (576 * 64 * (2 * 9 + 2 * 3) + 3 * 576 * 1536 + 2 * 576)
    for shape in shapes:
        own = shape.num_layers * block_parameters(shape.hidden_size, shape.layer, shape.head_dim)
        assert abs(own / of_target - 1) < 0.02, name_of(shape)


def test_a_depth_that_leaves_less_than_a_head_is_refused():
    with pytest.raises(ConfigError, match=r"depths has 32, but 100,000 parameters in 32 layers leave less than"):
        grid_of(config_of(depths=[1, 32], block_parameters=100_000), SMOLLM2)


def test_a_line_is_fitted():
    line = fit_line([1, 2, 4], [3.0, 5.0, 9.0])
    assert (line.intercept, line.slope, line.r_squared) == pytest.approx((1.0, 2.0, 1.0))
    bent = fit_line([0, 1, 2], [0.0, 0.0, 3.0])
    assert (bent.intercept, bent.slope, bent.r_squared) == pytest.approx((-0.5, 1.5, 0.75))
    assert fit_line([2, 2], [1.0, 3.0]).intercept == 2.0


def test_a_chain_breaks_even_where_its_tokens_pay_for_its_cycle():
    assert break_even_tau({1: 10.0, 4: 13.0}, 2.0, 3) == (3 * 2.0 + 13.0) / 10.0


def test_shapes_are_measured_and_written_for_training(tmp_path, capsys):
    tiny = load_target(tmp_path / "target")
    settings = {
        "target": {"model": str(tiny.folder), "device": "cpu"},
        "depths": [1, 3],
        "chain_depths": [2],
        "context": 16,
        "rounds": 1,
        "threads": 1,
        "draft_vocab_size": 50,
        "output": str(tmp_path / "shapes"),
    }
    from rich.console import Console

    result = measure_shapes(validate(ShapesConfig, settings))
    print_shapes(result, Console())
    assert "ms for each layer" in capsys.readouterr().out
    assert set(result["passes"]) == {"1", "3"}
    for row in result["rows"]:
        values = yaml.safe_load((tmp_path / "shapes" / f"independent-{row['name']}.yaml").read_text())
        drafter = validate(IndependentConfig, values["drafter"])
        assert (drafter.num_layers, drafter.draft_vocab_size) == (row["num_layers"], 50)
        embeddings = (97 + 50) * row["hidden_size"]
        assert row["parameters"] == row["block_parameters"] + embeddings + row["hidden_size"], "and the final norm"
        expected = (2 * row["step_seconds"] + result["passes"]["3"]) / result["passes"]["1"]
        assert row["break_even_tau"] == {"2": pytest.approx(expected)}
    page = (tmp_path / "shapes" / "shapes.html").read_text()
    assert all(row["name"] in page for row in result["rows"])
    with pytest.raises(ConfigError, match=r"context is 512, with chains of 2 more than the target's 512 tokens"):
        measure_shapes(validate(ShapesConfig, settings | {"context": 512}))
