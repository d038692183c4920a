"""Draft sources and hosts let a drafter draft for all sequences that job for the same shape together."""

import pytest
import torch
from one_tree import propose
from tiny_batches import taps_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.decoding.engine.draft_source import DraftJob, LocalDrafts
from moray.decoding.params import SamplingParams
from moray.decoding.planning.measuring import measure_costs
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import DraftRequest, Entry
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape

CPU = torch.device("cpu")
CHAIN = ChainShape(type="chain", depth=3)
TREE = DynamicShape(type="dynamic", depth=3, breadth=2, nodes=6)
PARAMS = (SamplingParams(), SamplingParams(temperature=0.9, seed=4))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("together") / "target")


@pytest.fixture
def eagle(tiny) -> Drafter:
    return build(tiny, VARIANTS["eagle-0"])


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """For how many sequences drafts were made, time by time."""
    seen: list[int] = []
    drafted = Drafter.propose_many

    def propose_many(self, states, *rest):
        seen.append(len(states))
        return drafted(self, states, *rest)

    monkeypatch.setattr(Drafter, "propose_many", propose_many)
    return seen


def memory_of(tiny: TinyTarget, drafter: Drafter, text: list[int]):
    return drafter.observe(taps_of(tiny.target, torch.tensor([text]), drafter.observed))


def alone(tiny: TinyTarget, drafter: Drafter, text: list[int], root: int, shape, sampler: Sampler):
    state = drafter.new_state(64, 16)
    drafter.extend(state, torch.tensor(text), memory_of(tiny, drafter, text))
    select = sampler.selector(len(text), shape.depth, isinstance(shape, ChainShape))
    return propose(drafter, state, torch.tensor([root]), shape, select)


def test_a_local_source_drafts_once_for_each_shape(tiny, eagle, sizes):
    source = LocalDrafts(eagle, 64, 16)
    texts = [tiny.prompt(seed, 4 + seed) for seed in range(5)]
    samplers = [Sampler(PARAMS[n % 2], eagle.spec.vocab_size, CPU, n) for n in range(5)]
    shapes = [CHAIN, TREE, CHAIN, CHAIN, TREE]
    with torch.no_grad():
        for number, text in enumerate(texts):
            source.extend(number, torch.tensor(text), memory_of(tiny, eagle, text), 0)
        source.submit([DraftJob(n, 7 + n, len(texts[n]), shapes[n], samplers[n]) for n in range(5)])
        found = source.collect([4, 0, 1, 2])
        assert sizes == [2, 2]
        found |= source.collect([3, 9])
        assert sizes == [2, 2, 1]
        assert source.collect([0]) == {}, "handed out already"
        assert sorted(found) == [0, 1, 2, 3, 4]
        for number, text in enumerate(texts):
            wanted = alone(tiny, eagle, text, 7 + number, shapes[number], samplers[number])
            assert found[number].tokens.tolist() == wanted.tokens.tolist()
            assert found[number].parents.tolist() == wanted.parents.tolist()


def test_greedy_children_are_picked_in_one_call(tiny, eagle, monkeypatch):
    calls: list[int] = []
    log_probs = Sampler.log_probs
    monkeypatch.setattr(Sampler, "log_probs", lambda self, logits: calls.append(len(logits)) or log_probs(self, logits))
    samplers = [Sampler(PARAMS[n], eagle.spec.vocab_size, CPU, n) for n in (0, 1, 0, 0)]
    logits = torch.randn(4, 2, eagle.spec.vocab_size, generator=torch.Generator().manual_seed(0))
    positions = [3, 9, 5, 5]
    picked = picks_of(samplers, positions, TREE)([0, 1, 2, 3], logits, 1, 2)
    assert sorted(calls) == [2, 6]
    for row, (sampler, position) in enumerate(zip(samplers, positions, strict=True)):
        tokens, scores, _ = sampler.selector(position, TREE.depth, False)(logits[row], 1, 2)
        assert torch.equal(picked.tokens[row], tokens)
        torch.testing.assert_close(picked.log_probs[row], scores)


def entry(session: str, drafter: str, text: list[int], **values) -> Entry:
    return Entry(session=session, drafter=drafter, **{"known": 0, "num_kept": 0, "tokens": tuple(text), **values})


def request_of(*entries: Entry) -> DraftRequest:
    return DraftRequest(number=1, entries=entries, shapes=(CHAIN, TREE), params=PARAMS)


def test_a_host_answers_a_message_as_it_would_answer_its_entries_alone(tiny, eagle, sizes):
    drafters = {"one": eagle, "two": build(tiny, VARIANTS["eagle-0"], seed=1)}
    texts = {name: tiny.prompt(seed, 3 + seed) for seed, name in enumerate("abcdef")}
    entries = [
        entry("a", "one", texts["a"], root=5, sequence=1),
        entry("b", "two", texts["b"], root=6, params=1),
        entry("c", "one", texts["c"], root=7, params=1, sequence=2),
        entry("d", "one", texts["d"]),  # told, not asked
        entry("lost", "one", texts["e"], known=3, root=8),
        entry("e", "one", texts["e"], root=8, shape=1),
        entry("f", "one", texts["f"], root=9, shape=1),
    ]
    # "lost" is told tokens too: their memory stands between the others'.
    memories = [memory_of(tiny, eagle, list(each.tokens))["feature"][0] for each in entries]
    host = DraftHost(drafters, 64, 16)
    reply = host.handle(request_of(*entries), {"feature": torch.cat(memories)})
    assert sizes == [2, 1, 2]
    assert [tree.session for tree in reply.trees] == [each.session for each in entries]
    other = DraftHost(drafters, 64, 16)
    for each, memory, tree in zip(entries, memories, reply.trees, strict=True):
        (wanted,) = other.handle(request_of(each), {"feature": memory}).trees
        assert tree == wanted
    assert (host.stats.num_drafts, host.stats.num_misses) == (5, 1)
    assert reply.trees[4].known == 0
    assert [len(tree.tokens) for tree in reply.trees] == [4, 4, 4, 0, 0, 7, 7]


def test_a_host_refuses_to_go_on_with_a_sequence_that_waits_for_its_draft(tiny, eagle):
    text = tiny.prompt(0, 4)
    memory = memory_of(tiny, eagle, text)["feature"][0]
    twice = [entry("a", "one", text[:2], root=text[2]), entry("a", "one", text[2:], known=2)]
    with pytest.raises(DataError, match="goes on with a sequence"):
        DraftHost({"one": eagle}, 64, 16).handle(request_of(*twice), {"feature": memory})


def test_calibration_drafts_for_every_number_of_rows(tiny, eagle, sizes):
    costs = measure_costs(tiny.target, eagle, AdaptiveShape(type="adaptive", depth=2), 6, {}).by_rows
    assert sorted(costs) == [1, 2, 4, 6] == sorted(set(sizes))
    for own in costs.values():
        assert [levels for levels, _ in own.draft[0]] == [1, 2]
        assert [tokens for tokens, _ in own.verify] == [1, 2, 3]
