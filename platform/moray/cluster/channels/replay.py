"""A recorded conversation sent through channels again: the answerer, and the clock on the sending side."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moray.bench.configs import ChannelsBenchmarkConfig
from moray.bench.conversations import drafts_of
from moray.cluster.channels.far_side import Answerer
from moray.decoding.remote.channel import Channel
from moray.decoding.remote.messages import unpack_reply
from moray.errors import UnreachableError

_PATIENCE_SECONDS = 30.0


class RecordedDrafter(Answerer):
    """Gives the recorded replies of a batch size (the topic) in their order, or drafts anew (None)."""

    def __init__(self, settings: str, replies: Mapping[int, Sequence[bytes]], capacity: int) -> None:
        """
        Args:
            settings: a `ChannelsBenchmarkConfig` as JSON.
            replies: recorded, by batch size.
            capacity: most tokens of a sequence.
        """
        import torch

        from moray.bench.loading import build_drafters, num_head_layers
        from moray.targets.head import TargetHead
        from moray.text import ChatTokenizer

        config = ChannelsBenchmarkConfig.model_validate_json(settings)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._replies = replies
        self._left = iter(())
        self._topic: int | None = None
        if config.drafted_rounds:
            head = TargetHead.load(config.target, num_head_layers((config.drafter,)))
            tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
            _, drafter = build_drafters((config.drafter,), lambda _: head, tokenizer).popitem()
            self._draft = drafts_of(drafter, capacity, config.tree)

    def prepare(self, topic: int | None) -> None:
        self._topic = topic
        self._left = iter(() if topic is None else self._replies[topic])

    def answer(self, frame: bytes | bytearray) -> bytes:
        return self._draft(frame) if self._topic is None else next(self._left)


class Cycle(NamedTuple):
    """One message and its reply."""

    seconds: float
    reply: bytes | bytearray

    @property
    def seconds_beside_drafting(self) -> float:
        """Without what the drafter says that it needed."""
        return self.seconds - unpack_reply(self.reply).seconds


def replay(channel: Channel, frames: Sequence[bytes]) -> list[Cycle]:
    """Send one frame after the other, each when the one before is answered.

    Raises:
        UnreachableError: no answer comes.
    """
    cycles = []
    for frame in frames:
        begin = time.perf_counter()
        channel.send(frame)
        reply = channel.receive(_PATIENCE_SECONDS)
        seconds = time.perf_counter() - begin
        if reply is None:
            raise UnreachableError(f"a channel's other side has not answered for {_PATIENCE_SECONDS:g} s")
        cycles.append(Cycle(seconds, reply))
    return cycles
