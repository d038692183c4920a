"""Turns the engine's outputs for a paced sequence into messages to its client. Runs beside the target."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moray.decoding.engine.paced import ClientMemory, Offer
from moray.decoding.remote.frames import pack_frame
from moray.decoding.request import Request, RequestOutput
from moray.edge.codec import encode
from moray.edge.messages import CodecName, Open, Tail, Verified, Verify
from moray.errors import DataError
from moray.trees.tree import TokenTree, chain_of, structure_of


@dataclass(frozen=True)
class Reply:
    """One message to a client, ready to be sent."""

    index: int
    """See `Verified.index`."""
    tokens: tuple[int, ...]
    """New tokens of the answer."""
    num_accepted: int
    """How many of them, from the first on, were drafted."""
    is_finished: bool
    """Whether the answer has ended."""
    frame: bytes


class ReplyWriter:
    """Numbers and packs what is new in one session."""

    def __init__(self, request: Request, codec: CodecName, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            request: what the session answers.
            codec: how memory crosses.
            clock: seconds.
        """
        self._clock = clock
        self._codec: CodecName = codec
        self._index = 0
        self._at = len(request.prompt) + len(request.generated)

    def write(self, update: RequestOutput) -> Reply:
        """The message about one update of the engine."""
        self._index += 1
        paced, memory = update.paced, dict[str, Tensor]()
        fields: dict[str, Any] = {}
        if paced is not None:
            fields = {
                "seq": paced.seq,
                "begin": paced.begin,
                "num_new": paced.num_new,
                "is_void": paced.is_void,
                "is_last": paced.is_last,
                "seconds": round(paced.seconds, 6),
                "tail": tuple(Tail(layer=p.layer, begin=p.begin, num_tokens=p.kv.shape[0]) for p in paced.tail),
                "sent": round(self._clock(), 6),
            }
            tail = {tail.name: piece.kv for tail, piece in zip(fields["tail"], paced.tail, strict=True)}
            memory = encode(self._codec, _joined(paced.memory) | tail)
        message = Verified.model_validate(
            {
                "index": self._index,
                "at": self._at,
                "tokens": tuple(update.tokens),
                "num_accepted": update.num_accepted,
                "finish_reason": update.finish_reason,
                **fields,
            }
        )
        self._at += len(update.tokens)
        is_finished = update.finish_reason is not None
        return Reply(self._index, message.tokens, message.num_accepted, is_finished, pack_frame(message, memory))


def client_memory_of(message: Open) -> ClientMemory:
    """What a device has and needs of its drafter's memory when it opens a sequence."""
    return ClientMemory(message.memory_from, message.num_target_layers, message.tail_from)


def offer_of(verify: Verify, vocab_size: int, device: torch.device) -> Offer:
    """What a client asks for, checked.

    Raises:
        DataError: the nodes are not a tree of tokens.
    """
    tokens, parents = verify.tokens, verify.parents
    if not tokens:
        return Offer(verify.seq, verify.at, None, verify.num_plain, verify.num_target_layers)
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise DataError(f"a tree holds tokens from {min(tokens)} to {max(tokens)}; the vocabulary has {vocab_size}")
    ids = torch.tensor(tokens, device=device)
    if not parents:
        return Offer(verify.seq, verify.at, chain_of(ids), num_target_layers=verify.num_target_layers)
    if len(parents) != len(tokens) or parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
        raise DataError(f"a tree of {len(tokens)} nodes has parents that make no tree: -1, then an earlier node each")
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    structure = structure_of(list(parents), depths, device)
    tree = TokenTree(ids, structure.parents, structure.depths, structure.ancestors, max(depths))
    return Offer(verify.seq, verify.at, tree, num_target_layers=verify.num_target_layers)


def _joined(pieces: tuple[Mapping[str, Tensor], ...]) -> dict[str, Tensor]:
    """Consecutive pieces [1, tokens, width] of memory as rows [tokens, width]."""
    if not pieces:
        return {}
    return {name: torch.cat([piece[name][0] for piece in pieces]) for name in pieces[0]}
