"""Following a progress actor: one that is slow to answer, as on a busy machine, is asked again."""

import time
from types import SimpleNamespace

import pytest
import ray
import ray.exceptions

from moray.cluster import progress_actor as actor_module
from moray.cluster.progress_actor import RunProgress, follow
from sweeps.tuning import progress as sweep_progress

ACTOR = SimpleNamespace(latest=SimpleNamespace(remote=lambda: "latest"), warnings=SimpleNamespace(remote=lambda _: []))


def answers(monkeypatch, *errors: Exception) -> list[int]:
    """An actor whose first answers are errors; returns a list that grows by the steps that were read."""
    left, read = list(errors), []

    def get(asked, timeout):
        if asked == []:
            return []
        if left:
            raise left.pop(0)
        read.append(len(read))
        return RunProgress(len(read), 9)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(actor_module, "_POLL_SECONDS", 0.01)
    return read


def followed(read: list[int]) -> int:
    """Times that the actor was read within a second, or until it was read twice."""
    with follow(ACTOR, "train"):
        end = time.monotonic() + 1.0
        while len(read) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    return len(read)


def test_a_slow_actor_is_asked_again(monkeypatch):
    read = answers(monkeypatch, *[ray.exceptions.GetTimeoutError()] * 3)
    assert followed(read) >= 2


def test_an_actor_that_is_gone_is_left_alone(monkeypatch):
    read = answers(monkeypatch, ray.exceptions.RayActorError())
    assert followed(read) == 0


@pytest.mark.parametrize(
    ("error", "note"),
    [(ray.exceptions.GetTimeoutError(), "rung 1: busy"), (ray.exceptions.RayActorError(), "its process has died")],
)
def test_a_trial_that_is_slow_to_answer_is_not_called_dead(monkeypatch, error, note):
    answers(monkeypatch, error)
    assert note in sweep_progress._part(sweep_progress.RunningTrial(1, ACTOR)).note
