"""What a target and a drafter say to each other while an engine decodes real prompts, kept word for word.

The drafter answers in the same process: what is recorded depends on no channel.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from moray.bench.configs import ChannelsBenchmarkConfig
from moray.decoding.engine import Engine
from moray.decoding.engine_config import EngineConfig
from moray.decoding.fitting import say_once
from moray.decoding.remote.channel import Channel, Endpoint
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import pack, unpack_request
from moray.decoding.remote.places import Places
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.targets.model import Target
from moray.trees.shapes import Shape

DRAFTER = "drafter"
"""What the messages call it."""
_HERE = Endpoint("", 0, "", "here")
_IDLE_SECONDS = 3600.0
_MOST_PASSES_PER_CYCLE = 20


@dataclass
class Conversation:
    """Frames to a drafter and its replies, in the order in which they were sent."""

    frames: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    num_passes: int = 0
    """Of the target, meanwhile."""


class RecordingChannel(Channel):
    """Answers at once, and keeps what was said."""

    def __init__(self, answer: Callable[[bytes], bytes], conversation: Conversation) -> None:
        self._answer, self._conversation = answer, conversation
        self._replies: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        reply = self._answer(frame)
        self._conversation.frames.append(frame)
        self._conversation.replies.append(reply)
        self._replies.append(reply)

    def receive(self, seconds: float) -> bytes | None:
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        self._replies.clear()


class OnePlace(Places):
    """All sequences have their place in the one drafter process that there is."""

    def __init__(self, endpoint: Endpoint = _HERE) -> None:
        """`endpoint` is where it answers; left out for channels that need no address."""
        self._endpoint = endpoint

    def open(self, session: str) -> None:
        pass

    def find(self, session: str) -> Endpoint:
        return self._endpoint

    def lose(self, session: str) -> None:
        pass

    def close(self, session: str) -> None:
        pass


def drafts_of(drafter: Drafter, capacity: int, shape: Shape) -> Callable[[bytes | bytearray], bytes]:
    """A drafter's side: answers frames, with drafting states of its own for sequences of up to `capacity` tokens."""
    host = DraftHost({DRAFTER: drafter}, capacity, shape.num_expanded, _IDLE_SECONDS)
    return lambda frame: pack(host.handle(*unpack_request(frame)))


def longest_of(prompts: list[list[int]], config: ChannelsBenchmarkConfig) -> int:
    """Most tokens of a prompt and its answer."""
    return max(map(len, prompts)) + config.max_new_tokens


def record_conversation(
    config: ChannelsBenchmarkConfig,
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    eos_ids: Collection[int],
    size: int,
) -> Conversation:
    """Decode, always `size` sequences at a time, until so many messages are recorded as the configuration says.

    Raises:
        DataError: nothing is drafted for these prompts.
    """
    longest = longest_of(prompts, config)
    slots = size * (longest + config.tree.num_nodes + 64)
    conversation = Conversation()
    answer = drafts_of(drafter, longest, config.tree)
    source = RemoteDrafts(drafter, DRAFTER, OnePlace(), connect=lambda _: RecordingChannel(answer, conversation))
    limits = EngineConfig(max_sequences=size, kv_tokens=slots, tree=config.tree)
    engine = Engine(target, limits, eos_ids, drafts={DRAFTER: source})
    say_once(engine.drafting[DRAFTER].notices)
    number = 0
    while len(conversation.frames) < config.num_cycles:
        while engine.num_running + engine.num_waiting < size:
            prompt = tuple(prompts[number % len(prompts)])
            engine.submit(Request(prompt=prompt, max_new_tokens=config.max_new_tokens, sequence=number))
            number += 1
        engine.step()
        if engine.stats.num_passes > _MOST_PASSES_PER_CYCLE * config.num_cycles:
            raise DataError(
                f"{engine.stats.num_passes} passes of the target gave {len(conversation.frames)} messages to the "
                f"drafter, not num_cycles={config.num_cycles}: tree {config.tree.name} drafts too seldom; name a chain"
            )
    conversation.num_passes = engine.stats.num_passes
    return conversation
