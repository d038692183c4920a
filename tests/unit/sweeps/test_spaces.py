"""What may be chosen, as YAML and the command line write it, and the names that choices get."""

import json
import re

import pytest

from moray.config import Config, load_config
from moray.errors import ConfigError
from sweeps.tuning.spaces import Space, folder_name, from_text, grid, label, overrides, short, show, size, to_text


class Searching(Config):
    """A space alone."""

    space: Space


def space_of(*words: str) -> Space:
    return load_config(Searching, list(words)).space


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{type: uniform, low: 2, high: 1}", "low 2 must be less than high 1"),
        ("{type: uniform, low: 1, high: 1}", "low 1 must be less than high 1"),
        ("{type: loguniform, low: 0, high: 1}", "low is 0; a loguniform range begins above 0"),
        ("{type: integers, low: 0.5, high: 3}", "low 0.5 and high 3 of integers must be whole numbers"),
        ("{type: integer, low: 0, high: 3}", "type"),
        ("{type: uniform, low: 0}", "high"),
        ("{type: uniform, low: 0, high: 1, steps: 3}", "steps"),
        ("[]", "give a list of values, or a range"),
        ("3", "'a.b' is 3; give a list of values, or a range"),
    ],
)
def test_a_range_or_list_that_means_nothing_is_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        space_of(f"space.a.b={given}")


def test_keys_keep_their_dots_however_they_are_written(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("space:\n  optim.lr: {type: loguniform, low: 1e-3, high: 1e-1}\n  a: {b: {c: [1, 2]}, d: [x]}\n")
    space = space_of(str(path), "space.drafter.layers=[0, 1]")
    assert list(space) == ["optim.lr", "a.b.c", "a.d", "drafter.layers"]
    assert space["a.b.c"] == [1, 2]
    assert space["optim.lr"].bounds == (1e-3, 1e-1)
    assert space_of("space.optim.type=[muon, adamw]") == {"optim.type": ["muon", "adamw"]}
    assert space_of("space.a.b={type: integers, low: 1, high: 4}")["a.b"].bounds == (1, 4)


def test_the_grid_is_every_combination_once_the_last_key_changing_fastest():
    space = space_of("space.a=[1, 2]", "space.b=[[3, 4], [5]]")
    assert size(space) == 4
    assert [tuple(one.values()) for one in grid(space)] == [(1, [3, 4]), (1, [5]), (2, [3, 4]), (2, [5])]
    ranged = space_of("space.a=[1, 2]", "space.b={type: uniform, low: 0, high: 1}")
    assert size(ranged) is None
    assert [one["b"] for one in grid(ranged)] == [0, 1, 0, 1]


def test_choices_survive_the_way_to_a_searcher_and_back():
    choices = {"a": [1, 2], "b": "x", "c": None, "d": {"type": "chain"}, "e": 0.1, "f": True}
    texts = to_text(choices)
    assert all(isinstance(text, str) for text in texts.values())
    assert from_text(texts) == choices
    assert from_text({"lr": 0.25}) == {"lr": 0.25}
    assert [json.loads(word.partition("=")[2]) for word in overrides(choices)] == list(choices.values())


def test_a_label_tells_keys_apart_that_end_alike():
    assert label({"optim.lr": 0.001, "drafter.mask_width": [5, 15]}) == "lr 0.001, mask_width 5-15"
    both = {"a.x.rate": 1, "b.x.rate": 2, "rate": 3, "c.rate": 4}
    names = [short(key, both) for key in both]
    assert names == ["a.x.rate", "b.x.rate", "rate", "c.rate"]
    assert len({label({key: 1, **dict.fromkeys(both, 0)} | {key: 1}) for key in both}) == len(both)
    assert [show(value) for value in (1.23456, [1, 2], {"type": "chain", "depth": 5}, None)] == [
        "1.23", "1-2", "chain 5", "None",
    ]  # fmt: skip


def test_a_folder_has_a_name_of_its_own_that_stays():
    choices = [
        {"lr": 0.0010001}, {"lr": 0.0010002}, {"a": [1, 2]}, {"a": "1-2"}, {"a": "1"}, {"a": 1}, {"b": 1}, {"x.a": 1},
        {"a": "x" * 300}, {"a": "x" * 299 + "y"}, {"a": "../.."}, {"a": "π / 2"},
    ]  # fmt: skip
    names = [folder_name(one) for one in choices]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) and not name.startswith(".") for name in names)
    assert folder_name({"b": 1, "a": [2]}).rpartition("-")[2] == folder_name({"a": [2], "b": 1}).rpartition("-")[2]
    assert folder_name({"drafter.target_layers": 0, "drafter.mask_width": [5, 15]}) == (
        "target_layers_0_mask_width_5-15-55f4c3be"
    ), "another name would lose the trials of sweeps that go on"
