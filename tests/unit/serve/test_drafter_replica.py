"""A drafter replica without Ray: it runs ahead if it is told to, and what came of it is published."""

import logging
import time

import pytest
from tiny_drafters import build
from tiny_targets import TinyTarget, save_chat_target

from moray.config import validate
from moray.decoding.params import SamplingParams
from moray.decoding.remote.channel import SocketChannel
from moray.decoding.remote.messages import DraftedTree, DraftRequest, Entry, pack, unpack_reply
from moray.drafters.checkpoint import save_drafter
from moray.drafters.configs import MedusaConfig
from moray.errors import ConfigError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from moray.trees.shapes import AdaptiveShape, ChainShape
from serve.app import build_app
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.metrics import series
from serve.metrics.readings import read_host
from serve.target import TargetReplica

SHAPE = ChainShape(type="chain", depth=3)


def test_it_runs_ahead_while_nobody_asks(tmp_path):
    folder = str(save_chat_target(tmp_path / "target"))
    settings = {
        "target": {"model": folder, "device": "cpu"},
        "drafters": {"same": {"type": "pretrained", "model": folder}},
        "engine": {"tree": SHAPE.model_dump()},
        "run_ahead": True,
    }
    replica = DrafterReplica(validate(ServeConfig, settings), host="127.0.0.1")
    channel = SocketChannel(replica.endpoint)

    def ask(known: int, tokens: tuple[int, ...], root: int) -> DraftedTree:
        entry = Entry(session="a", drafter="same", known=known, tokens=tokens, num_kept=min(known, 3), root=root)
        channel.send(pack(DraftRequest(number=1, entries=(entry,), shapes=(SHAPE,), params=(SamplingParams(),))))
        frame = channel.receive(20.0)
        assert frame is not None
        return unpack_reply(frame).trees[0]

    try:
        first = ask(0, (5, 6, 7, 8), 9)
        deadline = time.monotonic() + 20
        while (guess := replica.host._sessions["a"].guess) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = ask(4, first.tokens, guess.chain[0])
        assert second.tokens == guess.chain
        assert second.known == 8
        readings = {(reading.series, reading.tags): reading.value for reading in read_host(replica.host)}
        assert readings[series.DRAFTER_AHEAD, ("right",)] == 1
    finally:
        channel.close()
        replica._server.close()


def test_a_drafter_that_is_not_deep_enough_to_run_ahead_is_named(tmp_path, caplog):
    folder = save_chat_target(tmp_path / "target")
    target = TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))
    fingerprint = ChatTokenizer.load(str(folder)).fingerprint
    for name, num_heads in (("few", 6), ("enough", 7)):
        (tmp_path / name).mkdir()
        save_drafter(tmp_path / name, build(target, MedusaConfig(type="medusa", num_heads=num_heads)), fingerprint)
    settings = {
        "target": {"model": str(folder), "device": "cpu"},
        "drafters": {name: str(tmp_path / name) for name in ("few", "enough")},
        "engine": {"tree": SHAPE.model_dump()},
        "run_ahead": True,
    }
    with caplog.at_level(logging.WARNING, "ray.serve"):
        DrafterReplica(validate(ServeConfig, settings), host="127.0.0.1")._server.close()
    (record,) = caplog.records
    assert "drafter 'few' will not run ahead: max_depth is 6, and to go on below a chain of depth 3 it needs 7" in (
        record.getMessage()
    )


def test_a_tree_too_deep_is_refused_at_deploy_and_at_start(tmp_path, caplog):
    folder, medusa = save_chat_target(tmp_path / "target"), tmp_path / "medusa"
    target = TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))
    medusa.mkdir()
    few = build(target, MedusaConfig(type="medusa", num_heads=5))
    save_drafter(medusa, few, ChatTokenizer.load(str(folder)).fingerprint)
    settings = {
        "target": {"model": str(folder), "device": "cpu"},
        "drafters": {"heads": str(medusa)},
        "engine": {"tree": {"type": "chain", "depth": 8}, "kv_cache_tokens": 1024, "max_num_seqs": 1},
    }
    message = "tree 'chain-8' is 8 levels deep; drafter 'heads' drafts at most 5: give a tree of at most 5 levels"
    with pytest.raises(ConfigError, match=message):
        build_app(settings)
    with pytest.raises(ConfigError, match=message):
        DrafterReplica(validate(ServeConfig, settings), host="127.0.0.1")
    alone = validate(ServeConfig, settings | {"placement": "in_process"})
    with pytest.raises(ConfigError, match=message):
        TargetReplica(alone)
    wide = {"type": "adaptive", "depth": 8, "breadth": 2, "nodes": 6}
    engine = alone.engine.model_copy(update={"tree": AdaptiveShape.model_validate(wide)})
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        TargetReplica(alone.model_copy(update={"engine": engine}))
    (deep,) = caplog.messages
    assert "drafter 'heads' drafts at most 5 levels" in deep
