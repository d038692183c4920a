"""Work over which workers die again and again is refused, until a new run begins."""

from pathlib import Path

from moray.activations.capture.attempts import MAX_TRIES, Tries
from moray.activations.format.store import CacheStore


def test_a_piece_may_be_begun_a_few_times_and_others_are_counted_for_themselves(tmp_path: Path) -> None:
    tries = Tries(CacheStore(str(tmp_path)), "shards")
    assert [tries.begin("a") for _ in range(MAX_TRIES + 2)] == [True] * MAX_TRIES + [False] * 2
    assert tries.begin("b")
    tries.end("a")
    tries.end("never begun")
    assert tries.begin("a")


def test_a_new_run_forgets_them(tmp_path: Path) -> None:
    store = CacheStore(str(tmp_path))
    store.claim({"seed": 1})
    tries = Tries(store, "shards")
    while tries.begin("a"):
        pass
    store.claim({"seed": 1})
    assert not list(tmp_path.rglob("*.tries"))
    assert tries.begin("a")
