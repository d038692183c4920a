"""Recorded conversations: real messages at the batch size asked for, which another drafter answers alike."""

import pytest
from shape_checks import unchecked
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.bench.configs import ChannelsBenchmarkConfig
from moray.bench.conversations import drafts_of, longest_of, record_conversation
from moray.config import validate
from moray.decoding.remote.messages import unpack_reply, unpack_request
from moray.errors import ConfigError, DataError

GIVEN = {"target": {"model": "m"}, "drafter": {"type": "ngram"}, "questions": "q"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("conversations"))


@pytest.mark.parametrize("size", [1, 3])
def test_a_conversation_can_be_held_again(tiny, size):
    config = validate(ChannelsBenchmarkConfig, GIVEN | {"num_cycles": 15, "max_new_tokens": 20})
    drafter, prompts = build(tiny, VARIANTS["moa-0"]), [tiny.prompt(seed, 9 + seed) for seed in range(4)]
    with unchecked():
        conversation = record_conversation(config, tiny.target, drafter, prompts, (), size)
        answer = drafts_of(drafter, longest_of(prompts, config), config.tree)
        again = [answer(frame) for frame in conversation.frames]
    assert len(conversation.frames) == len(conversation.replies) >= 15
    drafted = [unpack_reply(reply).trees for reply in conversation.replies]
    assert [unpack_reply(reply).trees for reply in again] == drafted
    assert all(tree.tokens for trees in drafted for tree in trees)
    requests = [unpack_request(frame) for frame in conversation.frames]
    assert max(len(request.entries) for request, _ in requests) == size
    told = sum(len(entry.tokens) for request, _ in requests for entry in request.entries)
    assert told == sum(next(iter(tensors.values())).shape[0] for _, tensors in requests)
    assert told > sum(map(len, prompts[:size]))


def test_a_tree_that_never_drafts_is_refused(tiny, monkeypatch):
    config = validate(ChannelsBenchmarkConfig, GIVEN | {"num_cycles": 2, "max_new_tokens": 8})
    drafter = build(tiny, VARIANTS["moa-0"])
    monkeypatch.setattr("moray.decoding.remote.source.RemoteDrafts.can_draft", lambda *_: False)
    with unchecked(), pytest.raises(DataError, match="num_cycles=2: tree chain-5 drafts too seldom"):
        record_conversation(config, tiny.target, drafter, [tiny.prompt()], (), 1)


@pytest.mark.parametrize("change", [{"batches": [1, 4, 1]}, {"channels": ["socket", "socket"]}])
def test_nothing_is_measured_twice(change):
    (key,) = change
    with pytest.raises(ConfigError, match=rf"{key} is \[.*\]; name each of them once"):
        validate(ChannelsBenchmarkConfig, GIVEN | change)
