"""Acceptance and tau, counted by hand."""

import time

import pytest

from moray.decoding.engine.stats import EngineStats
from moray.decoding.generation import Generation, acceptance_by_position, depth_shares, layer_count_shares, tau


def generation(accepted: list[int], drafted: int | list[int] = 3, emitted: list[int] | None = None) -> Generation:
    return Generation(
        tokens=[0],
        accepted=accepted,
        emitted=emitted or [a + 1 for a in accepted],
        drafted=drafted if isinstance(drafted, list) else [drafted] * len(accepted),
    )


def test_acceptance_is_conditional_on_the_levels_above():
    """0, 1, 3, 3 of 3 accepted: level 1 reached 4 times and passed 3; level 2 reached 3, passed 2; level 3 2 of 2."""
    assert acceptance_by_position([generation([0, 1, 3, 3])]) == [3 / 4, 2 / 3, 1.0]


def test_acceptance_is_counted_over_all_answers_and_draft_lengths():
    answers = [generation([1, 2], drafted=[1, 3]), generation([0], drafted=2), generation([])]
    # Level 1: 3 reached, 2 passed. Level 2: the second cycle alone (the first drafted one level). Level 3: 0 of 1.
    assert acceptance_by_position(answers) == [2 / 3, 1.0, 0.0]


def test_levels_never_reached_are_left_out():
    assert acceptance_by_position([generation([0, 0], drafted=5)]) == [0.0]
    assert acceptance_by_position([]) == []


def test_values_of_n_are_shared_out_over_the_cycles_that_drafted():
    answers = [generation([1, 0, 0], drafted=[2, 0, 1]), generation([2], drafted=2), generation([1])]
    answers[0].layer_counts, answers[1].layer_counts = [0, 0, 2], [2]
    assert layer_count_shares(answers) == {0: 1 / 3, 2: 2 / 3}, "the last was recorded before there were values of N"
    assert layer_count_shares([generation([1])]) == {}


def test_depths_are_shared_out_over_all_cycles():
    answers = [generation([1, 0, 0], drafted=[2, 0, 1]), generation([2], drafted=2)]
    assert depth_shares(answers) == [1 / 4, 1 / 4, 2 / 4]
    assert depth_shares([generation([])]) == depth_shares([]) == []


def test_tau_is_tokens_per_target_pass_over_all_answers():
    answers = [generation([3, 0, 1]), generation([0])]
    assert tau(answers) == (4 + 1 + 2 + 1) / 4
    assert tau([generation([3, 3], emitted=[4, 2])]) == 3.0, "what was cut off at the end was not emitted"
    assert tau([]) == 0.0
    assert tau([generation([])]) == 0.0
    assert generation([3, 0, 1]).num_cycles == 3


def test_no_second_is_in_two_phases():
    stats = EngineStats()
    with stats.timed("propose") as propose:
        time.sleep(0.01)
        for _ in range(2):
            with stats.timed("observe"):
                time.sleep(0.02)
    with stats.timed("verify"):
        time.sleep(0.01)
    assert 0.04 <= stats.seconds["observe"] < 1.0
    assert stats.seconds["propose"] >= 0.01
    assert propose.seconds == pytest.approx(stats.seconds["propose"] + stats.seconds["observe"])
    assert stats.seconds["verify"] < propose.seconds
    assert EngineStats().seconds["verify"] == 0.0, "engines do not share their times"
    with pytest.raises(KeyError), stats.timed("dream"):
        pass


def test_phases_wait_for_the_device_where_they_are_told_apart():
    waits: list[str] = []
    stats = EngineStats(lambda: waits.append("wait"))
    with stats.timed("verify"):
        assert not waits
    assert waits == ["wait"]
