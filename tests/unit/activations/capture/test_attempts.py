"""Work over which workers die again and again is refused, until a new run begins."""

from pathlib import Path

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.activations.format.store import CacheStore


def test_a_piece_may_be_begun_a_few_times_and_others_are_counted_for_themselves(tmp_path: Path) -> None:
    attempts = Attempts(CacheStore(str(tmp_path)), "shards")
    assert [attempts.begin("a") for _ in range(MAX_ATTEMPTS + 2)] == [True] * MAX_ATTEMPTS + [False] * 2
    assert attempts.begin("b")
    attempts.end("a")
    attempts.end("never begun")
    assert attempts.begin("a")


def test_a_new_run_forgets_them(tmp_path: Path) -> None:
    store = CacheStore(str(tmp_path))
    store.begin_or_resume({"seed": 1})
    attempts = Attempts(store, "shards")
    while attempts.begin("a"):
        pass
    store.begin_or_resume({"seed": 1})
    assert not list(tmp_path.rglob("*.attempts"))
    assert attempts.begin("a")
