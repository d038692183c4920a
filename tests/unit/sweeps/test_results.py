"""From trials to an answer: who is ahead, how sure that is, and what could have been told early."""

import random

import pytest
from scipy import stats
from sweep_trials import LAYERS, RUNGS, a_grid, finalist, trial, write_trials

from sweeps.reports.results import best_trials, how_sure, objective_of, pareto, rank_agreement, read_trials, spearman

ANSWERS = [[10, 2.0, 4.0, 5, 9], [30, 2.0, 4.0, 5, 27]]


@pytest.mark.parametrize(("name", "value"), [("speedup", 2.0), ("tau", 3.6), ("tokens_per_second", 10.0)])
def test_an_objective_is_over_all_answers_together(name, value):
    assert objective_of(name, ANSWERS) == pytest.approx(value)
    assert objective_of(name, [[0, 0.0, 0.0, 0, 0]]) == 0.0


def test_a_clear_winner_stays_ahead_and_comes_first_whatever_the_order():
    slow, fast = finalist("slow", [1.0, 1.1, 0.9], [1.1, 1.0, 1.0]), finalist("fast", [2.0, 2.2, 1.9], [2.1, 2.0, 2.3])
    sure = how_sure([slow, fast], "speedup")
    assert [one["name"] for one in sure["finalists"]] == ["fast", "slow"]
    assert sure["stays_ahead"] == 1.0
    low, high = sure["ahead_interval"]
    assert 0 < low < sure["ahead_by"] < high
    first = sure["finalists"][0]
    assert first["spread"] == [min(fast.objectives("speedup")), max(fast.objectives("speedup"))]
    assert first["mean"] == pytest.approx(sum(first["spread"]) / 2)
    assert first["seeds"].keys() == {"0", "1"}
    assert "answers" not in first["seeds"]["0"]
    assert first["seeds"]["0"]["tau"] == 2.0


def test_a_tie_is_called_one():
    one, other = finalist("one", [1.0, 1.6, 1.2], [1.3, 1.1, 1.5]), finalist("other", [1.3, 1.1, 1.5], [1.0, 1.6, 1.19])
    sure = how_sure([one, other], "speedup")
    low, high = sure["ahead_interval"]
    assert low < 0 < high
    assert 0.2 < sure["stays_ahead"] < 0.8
    assert how_sure([one, other], "speedup") == sure, "the same measurements give the same answer"


def test_prompts_are_drawn_alike_for_both():
    """A lead that is the same on every prompt is sure, however much the prompts differ."""
    easy = [0.5, 1.0, 2.0, 4.0, 8.0]
    sure = how_sure([finalist("a", [1.1 * value for value in easy]), finalist("b", easy)], "speedup")
    assert sure["stays_ahead"] == 1.0
    assert sure["ahead_interval"][0] > 0


def test_one_finalist_is_ahead_of_none():
    sure = how_sure([finalist("only", [1.0, 2.0])], "speedup")
    assert len(sure["finalists"]) == 1
    assert (sure["ahead_by"], sure["ahead_interval"], sure["stays_ahead"]) == (None, None, None)


def test_the_best_were_trained_to_the_end_and_lost_nothing():
    trials = [
        trial({LAYERS: 0}, [1.0, 1.5, 1.8]),
        trial({LAYERS: 1}, [9.0, 9.0], "stopped"),
        trial({LAYERS: 2}, [1.0, 1.5, 3.0], lossless=False),
        trial({LAYERS: 3}, [1.0, 1.5, 2.0], lossless=None),
        trial({LAYERS: 4}, [9.0, 9.0, 9.0], "diverged"),
        trial({LAYERS: 5}, [1.0, 1.5, 1.7]),
    ]
    assert [one.choices[LAYERS] for one in best_trials(trials, 2)] == [3, 0]
    assert [one.choices[LAYERS] for one in best_trials(trials, 9)] == [3, 0, 5]


def test_agreement_is_over_the_trials_that_came_to_both_rungs():
    taus = [[1, 3, 1], [2, 1, 2], [3, 2, 3], [4, 4, 4]]
    ranks = rank_agreement([trial({LAYERS: i}, of) for i, of in enumerate(taus)] + [trial({LAYERS: 9}, [9], "stopped")])
    assert [rank["rung"] for rank in ranks] == [0, 1]
    assert [rank["rung_tokens"] for rank in ranks] == list(RUNGS[:2])
    assert [rank["trials"] for rank in ranks] == [4, 4]
    assert ranks[0]["spearman"] == pytest.approx(1.0)
    assert ranks[1]["spearman"] == pytest.approx(stats.spearmanr([3, 1, 2, 4], [1, 2, 3, 4]).statistic)
    assert [rank["same_best"] for rank in ranks] == [True, True]
    turned = rank_agreement([trial({LAYERS: i}, of) for i, of in enumerate([[1, 3], [2, 2], [3, 1]])])
    assert turned[0]["spearman"] == pytest.approx(-1.0)
    assert turned[0]["same_best"] is False
    assert rank_agreement([trial({LAYERS: 0}, [1.0])]) == []


def test_spearman_is_the_one_of_scipy_with_ties_as_well():
    rng = random.Random(0)
    for length in (3, 4, 10, 50):
        first, second = ([float(rng.randrange(length)) for _ in range(length)] for _ in range(2))
        expected = stats.spearmanr(first, second).statistic
        assert spearman(first, second) == pytest.approx(expected, abs=1e-12)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_the_front_holds_what_nothing_beats():
    gains = [(1, 1.0), (2, 3.0), (2, 2.0), (3, 3.0), (4, 5.0), (5, 4.0)]
    trials = [trial({LAYERS: i}, [tau], cost=cost) for i, (cost, tau) in enumerate(gains)]
    front = pareto([*trials[::-1], trial({LAYERS: 9}, [])], lambda row: row["tau"], lambda row: row["draft_cost"])
    assert [(one.last["draft_cost"], one.last["tau"]) for one in front] == [(1, 1.0), (2, 3.0), (4, 5.0)]


def test_trials_are_read_as_they_were_left(tmp_path):
    given = a_grid()
    write_trials(given, tmp_path)
    for read, left in zip(read_trials(str(tmp_path)), given, strict=True):
        assert (read.name, read.choices, read.state, read.message) == (
            left.name,
            left.choices,
            left.state,
            left.message,
        )
        assert read.rows == left.rows
        assert read.training_tokens == left.training_tokens == RUNGS[len(left.rows) - 1] - 7
        assert "answers" not in read.summary()["figures"]
    assert trial({LAYERS: 0}, []).training_tokens == 0
