"""Who begins while others run does not make them wait for its first draft, which stands in line behind theirs."""

import pytest
from side_by_side import GREEDY
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.trees.shapes import ChainShape

CAPACITY = 320
NEW_TOKENS = 60
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


class Elsewhere(LocalDrafts):
    """Drafts that are there when they are asked for, but for those of some sequences, which are under way for long."""

    def __init__(self, drafter) -> None:
        super().__init__(drafter, CAPACITY, 64)
        self.slow: set[int] = set()
        self.waited_for: list[int] = []

    def is_under_way(self, number):
        return number in self.slow and number in self._jobs

    def collect(self, numbers):
        self.waited_for += [number for number in numbers if self.is_under_way(number)]
        return super().collect([number for number in numbers if not self.is_under_way(number)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("starting"))


class Run:
    """An engine, its texts, and who got tokens in which step."""

    def __init__(self, tiny, num_micro_batches: int) -> None:
        self.source = Elsewhere(build(tiny, VARIANTS["moa-0"]))
        config = EngineConfig(
            max_num_seqs=4,
            kv_cache_tokens=4 * 384,
            max_model_len=CAPACITY,
            num_micro_batches=num_micro_batches,
            tree=ChainShape(type="chain", depth=3),
        )
        self.engine = Engine(tiny.target, config, (), drafts={"d": self.source})
        self.tiny = tiny
        self.prompts: list[list[int]] = []
        self.texts: list[list[int]] = []
        self.drafted: dict[int, int] = {}

    def submit(self) -> int:
        prompt = self.tiny.prompt(len(self.prompts), 20)
        number = self.engine.submit(Request(prompt=tuple(prompt), params=GREEDY, max_new_tokens=NEW_TOKENS))
        self.prompts.append(prompt)
        self.texts.append([])
        self.drafted[number] = 0
        return number

    def step(self) -> set[int]:
        """Who got tokens."""
        updates = self.engine.step()
        for update in updates:
            self.texts[update.number] += update.tokens
            self.drafted[update.number] += update.num_levels > 0
        return {update.number for update in updates if update.tokens}

    def finish(self) -> None:
        """The rest; texts are the target's own."""
        while self.engine.is_busy:
            self.step()
        decoder = PlainDecoder(self.tiny.target, CAPACITY)
        assert self.texts == [decoder.generate(p, GREEDY, NEW_TOKENS, ()).tokens for p in self.prompts]


def running(tiny, num_micro_batches: int, count: int) -> Run:
    """An engine with so many in its cycles."""
    run = Run(tiny, num_micro_batches)
    numbers = {run.submit() for _ in range(count)}
    while not all(run.drafted[number] for number in numbers):
        run.step()
    return run


def begin(run: Run) -> int:
    """One more, whose first draft is under way; returns its number once it has its first token."""
    new = run.submit()
    run.source.slow |= {new}
    while new not in run.step():
        pass
    return new


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_it_joins_when_its_draft_is_there(tiny, num_micro_batches):
    run = running(tiny, num_micro_batches, 3)
    new = begin(run)
    run.source.slow.clear()
    for _ in range(num_micro_batches):
        run.step()
    assert run.drafted[new] == 1
    run.finish()


def test_it_is_passed_over_until_then(tiny):
    run = running(tiny, 2, 3)
    new = begin(run)
    assert run.step() - {new}, "a cycle of others"
    assert len(run.texts[new]) == 1
    run.source.slow.clear()
    for _ in range(2):
        run.step()
    assert run.drafted[new] == 1, "the draft that was asked for at first is used"
    assert not run.source.waited_for
    run.finish()


@pytest.mark.parametrize(("num_micro_batches", "num_others", "most"), [(1, 3, 1), (2, 3, 2), (2, 1, 1)])
def test_it_is_passed_over_once_by_each_group_and_no_longer(tiny, num_micro_batches, num_others, most):
    run = running(tiny, num_micro_batches, num_others)
    new = begin(run)
    for _ in range(most):
        assert run.step()
        assert not run.source.waited_for
    for _ in range(num_micro_batches):
        run.step()
    assert run.source.waited_for == [new], "its draft is the first in the queue now"
    assert len(run.texts[new]) == 2, "what comes too late is done without"
    run.source.slow.clear()
    run.finish()


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_who_runs_alone_waits_for_nobody(tiny, num_micro_batches):
    run = Run(tiny, num_micro_batches)
    run.source.slow = {run.submit()}
    while not run.source.waited_for:
        run.step()
    assert run.engine.stats.num_steps <= 3
    run.source.slow.clear()
    run.finish()
    assert run.drafted[0]


def test_who_began_later_may_join_sooner(tiny):
    """Their rows change places."""
    run = running(tiny, 2, 2)
    first, second = run.submit(), run.submit()
    run.source.slow = {first}
    while not (run.texts[first] and run.texts[second]):
        run.step()
    while not run.drafted[second]:
        run.step()
    assert len(run.texts[first]) == 1
    run.source.slow.clear()
    run.finish()
    assert run.drafted[first]


def test_who_leaves_before_it_has_joined_leaves_no_gap(tiny):
    run = running(tiny, 2, 2)
    first, second = run.submit(), run.submit()
    run.source.slow = {first, second}
    while not (run.texts[first] and run.texts[second]):
        run.step()
    run.step()
    assert run.source.is_under_way(first)
    run.engine.cancel(first)
    run.source.slow.clear()
    while run.engine.is_busy:
        run.step()
    assert len(run.texts.pop(first)) == 1, "nothing came after it had left"
    run.prompts.pop(first)
    run.finish()
    assert run.engine.kv_used == 0
