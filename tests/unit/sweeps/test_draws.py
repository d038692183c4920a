"""What a random search draws: inside of the space, the same for the same seed, and nothing twice."""

import random

import pytest
from pydantic import TypeAdapter, ValidationError

from sweeps.tuning.spaces import Space, draw, draw_distinct, folder_name, lies_in

SPACE = TypeAdapter(Space).validate_python(
    {
        "a": [0, [1, 2], None],
        "b": {"type": "loguniform", "low": 1e-4, "high": 1.0},
        "c": {"type": "integers", "low": 2, "high": 5},
        "d": {"type": "uniform", "low": -1.0, "high": 1.0},
    }
)


def test_draws_lie_in_the_space_and_use_all_of_it():
    drawn = [draw(SPACE, random.Random(seed)) for seed in range(300)]
    assert all(lies_in(choices, SPACE) for choices in drawn)
    assert {str(choices["a"]) for choices in drawn} == {"0", "[1, 2]", "None"}
    assert {choices["c"] for choices in drawn} == {2, 3, 4, 5}
    below = sum(choices["b"] < 1e-2 for choices in drawn)
    assert 100 < below < 200, "half of the logarithms"
    assert min(choices["d"] for choices in drawn) < -0.9 < 0.9 < max(choices["d"] for choices in drawn)


def test_what_is_outside_of_the_space_does_not_lie_in_it():
    inside = {"a": None, "b": 0.5, "c": 3, "d": 0.0}
    assert lies_in(inside, SPACE)
    for changed in ({"a": 1}, {"b": 2.0}, {"c": 1}, {"d": -1.5}):
        assert not lies_in(inside | changed, SPACE)
    assert not lies_in(inside | {"e": 1}, SPACE)


def test_a_random_search_tries_nothing_twice_and_ends_where_there_is_no_more():
    space = {"a": [0, 1, 2], "b": [0, 1]}
    points = draw_distinct(space, 20, random.Random(0))
    assert len({folder_name(choices) for choices in points}) == len(points) == 6
    assert draw_distinct(space, 4, random.Random(1)) == draw_distinct(space, 4, random.Random(1))
    assert len(draw_distinct(space, 4, random.Random(1))) == 4


def test_a_value_that_is_listed_twice_is_refused():
    with pytest.raises(ValidationError, match=r"'a' lists \[1, 2\] twice"):
        TypeAdapter(Space).validate_python({"a": [[1, 2], 0, [1, 2]]})
