"""Synthetic costs: how long is slept, and that no token changes."""

import pytest
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.decoding import synthetic
from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.params import SamplingParams
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import DraftRequest, Entry
from moray.decoding.request import Request
from moray.decoding.synthetic import SyntheticCost, SyntheticCosts
from moray.trees.shapes import ChainShape

CAPACITY = 128
CHAIN = ChainShape(type="chain", depth=3)
COSTS = SyntheticCosts(verify=SyntheticCost(ms=40, ms_per_sequence=5), draft=SyntheticCost(ms=7, ms_per_sequence=2))


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(synthetic, "time", clock)
    return clock


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("synthetic"))


def answers(tiny, costs: SyntheticCosts) -> tuple[list[list[int]], Engine]:
    """Greedy and sampled ones."""
    source = LocalDrafts(build(tiny, VARIANTS["moa-0"]), CAPACITY, CHAIN.num_expanded, costs.draft)
    config = EngineConfig(
        max_num_seqs=3, kv_cache_tokens=3 * CAPACITY, max_model_len=CAPACITY, tree=CHAIN, synthetic=costs
    )
    engine = Engine(tiny.target, config, (), drafts={"d": source})
    requests = [
        Request(
            prompt=tuple(tiny.prompt(seed, 9 + seed)),
            params=SamplingParams(temperature=0.9 * (seed % 2), seed=seed),
            max_new_tokens=20,
            sequence=seed,
            drafter="d",
        )
        for seed in range(5)
    ]
    return [made.tokens for made in answer_batch(engine, requests)], engine


def test_tokens_stay_and_every_pass_and_draft_costs_what_was_set(tiny, clock):
    plain, _ = answers(tiny, SyntheticCosts())
    assert clock.slept == []
    paced, engine = answers(tiny, COSTS)
    assert paced == plain
    stats = engine.stats
    passes = (40 * stats.num_passes + 5 * stats.num_rows) / 1000
    drafts = (7 * stats.num_passes + 2 * stats.num_drafts) / 1000
    assert stats.num_drafts == stats.num_rows > 0, "every sequence is drafted for in every pass"
    assert sum(clock.slept) == pytest.approx(passes + drafts)


def test_a_drafter_process_sleeps_once_for_all_that_a_message_asks(tiny, clock):
    host = DraftHost({"d": build(tiny, VARIANTS["ngram-0"])}, CAPACITY, 64, cost=COSTS.draft)
    entries = tuple(
        Entry(session=name, drafter="d", known=0, tokens=(1, 2), num_kept=0, root=3, shape=0, params=0)
        for name in "abc"
    )
    host.handle(DraftRequest(number=1, entries=entries, shapes=(CHAIN,), params=(SamplingParams(),)), {})
    assert clock.slept == [pytest.approx(0.007 + 3 * 0.002)]
    host.handle(DraftRequest(number=2, entries=()), {})
    assert len(clock.slept) == 1


def test_real_work_is_part_of_the_time_and_not_added_to_it(clock):
    cost = SyntheticCost(ms=30)
    with cost.spent(4):
        clock.now += 0.02
    with cost.spent(4):
        clock.now += 0.04
    assert clock.slept == [pytest.approx(0.01)]


def test_whoever_reads_a_log_is_told():
    assert not SyntheticCosts().is_on
    assert COSTS.is_on
    assert COSTS.notice.startswith(
        "SYNTHETIC COSTS ARE ON (verify 40 ms + 5 ms per sequence, draft 7 ms + 2 ms per sequence)"
    )
