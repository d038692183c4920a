"""What is expected of drafts: one N as by its levels alone, several compared with the benefit of the doubt."""

import random

import pytest

from moray.decoding.planning.acceptance import Acceptance


def live(
    acceptance: Acceptance, refusals: dict[int, float], layer_counts: list[int], seed: int = 0, levels: int = 5
) -> None:
    """Cycles that draft all levels; of each N's drafts so many levels are refused."""
    generator = random.Random(seed)
    for num_target_layers in layer_counts:
        accepted = 0
        while accepted < levels and generator.random() > refusals[num_target_layers]:
            accepted += 1
        acceptance.record(num_target_layers, levels, accepted)


def mean(rates: list[float]) -> float:
    return sum(rates) / len(rates)


def test_before_anything_was_drafted_all_values_of_n_are_equal():
    acceptance = Acceptance(3, [0, 1])
    assert acceptance.rates(0) == acceptance.rates(1) == pytest.approx([0.7] * 3)
    assert acceptance.rates(0, in_doubt=True) == acceptance.rates(1, in_doubt=True) == pytest.approx([0.85] * 3)


def test_one_n_has_no_doubt():
    acceptance = Acceptance(3, [0])
    acceptance.record(0, 3, 1)
    assert acceptance.rates(0, in_doubt=True) == acceptance.rates(0)


def test_values_of_n_are_told_apart():
    acceptance = Acceptance(5, [0, 1, 2])
    live(acceptance, {0: 0.3, 1: 0.2, 2: 0.1}, [0, 1, 2] * 60)
    rates = [mean(acceptance.rates(num_target_layers)) for num_target_layers in (0, 1, 2)]
    assert rates == pytest.approx([0.7, 0.8, 0.9], abs=0.1), "with the luck of the last 30 cycles"
    assert [rates[1] - rates[0], rates[2] - rates[1]] == pytest.approx([0.1, 0.1], abs=0.05)


def test_an_n_that_was_not_tried_is_believed_to_be_as_the_others():
    acceptance = Acceptance(5, [0, 1])
    live(acceptance, {0: 0.1}, [0] * 100)
    assert mean(acceptance.rates(1)) == pytest.approx(mean(acceptance.rates(0)), abs=0.03)
    assert mean(acceptance.rates(1, in_doubt=True)) > mean(acceptance.rates(0, in_doubt=True)) + 0.02


def test_one_bad_draft_condemns_nobody():
    acceptance = Acceptance(5, [0, 1])
    live(acceptance, {0: 0.1}, [0] * 50)
    before = mean(acceptance.rates(1))
    acceptance.record(1, 5, 0)
    assert before - 0.1 < mean(acceptance.rates(1)) < before


def test_doubt_grows_with_the_cycles_since():
    acceptance = Acceptance(5, [0, 1])
    live(acceptance, {0: 0.1, 1: 0.3}, [0, 1] * 40)
    gaps = []
    for _ in range(3):
        gaps.append(mean(acceptance.rates(1, in_doubt=True)) - mean(acceptance.rates(1)))
        live(acceptance, {0: 0.1}, [0] * 150)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 1.2 * gaps[0]


def test_a_hard_text_is_hard_for_all_values_of_n_at_once():
    acceptance = Acceptance(5, [0, 1])
    live(acceptance, {0: 0.2, 1: 0.1}, [0, 1] * 60)
    before = mean(acceptance.rates(1))
    live(acceptance, {0: 0.5}, [0] * 30)
    assert mean(acceptance.rates(1)) < before - 0.03


def test_cycles_without_a_draft_are_no_refusals():
    acceptance = Acceptance(4, [0, 1])
    for _ in range(500):
        acceptance.record(0, 0, 0)
    assert acceptance.rates(0) == pytest.approx(Acceptance(4, [0, 1]).rates(0))


def test_the_drafts_of_a_pass_together_age_earlier_ones_by_one_cycle():
    """Sixteen sequences say sixteen times as much in a cycle, and look back as many cycles."""
    one, many = Acceptance(1, [0]), Acceptance(1, [0])
    for acceptance, count in ((one, 1), (many, 16)):
        for _ in range(200):
            for _ in range(count):
                acceptance.record(0, 1, 1, 1 / count)
        for _ in range(23):  # half of what was known is forgotten
            for _ in range(count):
                acceptance.record(0, 1, 0, 1 / count)
    assert abs(one.rates(0)[0] - 0.5) < 0.05
    assert abs(many.rates(0)[0] - 0.5) < 0.02
