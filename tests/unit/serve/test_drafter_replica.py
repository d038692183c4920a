"""A drafter replica without Ray: it runs ahead if it is told to, and what came of it is published."""

import time

from tiny_targets import save_chat_target

from moray.config import validate
from moray.decoding.params import SamplingParams
from moray.decoding.remote.channel import SocketChannel
from moray.decoding.remote.messages import DraftedTree, DraftRequest, Entry, pack, unpack_reply
from moray.trees.shapes import ChainShape
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.metrics import series
from serve.metrics.readings import read_host

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
