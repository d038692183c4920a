"""Sequences whose drafts a client makes elsewhere and offers when it likes (see `moray.edge`).

    client   offer(number, Offer(seq, at, tree))     the tree's root is the last token; `at` is its position
    engine   verifies the tree in its next cycle, together with the other sequences, and returns the accepted tokens
             and the drafter's memory of all tokens verified since the last output

Between two offers the sequence keeps its row, but takes part in no pass. A client may offer a second tree before the
first is verified: it is used if the first was accepted as expected, and voided otherwise.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.engine.observer import MAX_TOKENS, Observer
from moray.decoding.engine.sequence import EngineSequence
from moray.decoding.request import PacedOutput, Request, RequestOutput, TailPiece
from moray.drafters.base import TAIL, Drafter, Memory
from moray.errors import DataError
from moray.trees.tree import TokenTree

MAX_OFFERS = 2
"""Offers of one sequence that may wait."""
MAX_RECALLED = 1024
"""Tokens whose keys and values in a last layer are sent at once to a client that begins to use this layer."""


@dataclass(frozen=True)
class ClientMemory:
    """What the client of a paced sequence has and needs of the drafter's memory."""

    num_known: int = 0
    """Tokens, from the first one on, whose memory it has."""
    num_target_layers: int = 0
    """N: how many of the target's last layers its drafts run, and need keys and values of."""
    num_known_in_layers: tuple[int, ...] = ()
    """Tokens whose keys and values it has in the target's last layer, the one before it, and so on."""


@dataclass(frozen=True)
class Offer:
    """What the client of a paced sequence wants verified."""

    seq: int
    """Number of the offer, for the client; each is larger than the one before."""
    at: int
    """Position of the tree's root, or of the next cycle's root: the number of tokens before it."""
    tree: TokenTree | None = None
    """The draft; None for cycles without one."""
    num_plain: int = 1
    """Without a tree: the number of cycles, each of which gives one token."""
    num_target_layers: int = 0
    """N: how many of the target's last layers the client's next drafts run."""

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether it continues a sequence of these tokens."""
        return self.at == len(tokens) - 1 and (self.tree is None or int(self.tree.tokens[0]) == tokens[-1])


@dataclass
class Pace:
    """What the engine keeps of a paced sequence."""

    observer: Observer
    """Of the drafter that the client has."""
    memory_from: int
    """Tokens of the prompt whose memory the client has from the start."""
    num_target_layers: int
    """See `ClientMemory.num_target_layers`."""
    num_sent_in_layers: list[int]
    """Tokens whose keys and values the client has in each of the target's last layers, the last one first."""
    offers: deque[Offer] = field(default_factory=deque)
    """Not verified yet; the first is the next."""
    num_sent: int = field(init=False)
    """Tokens whose memory the client has."""
    num_dropped: int = 0
    """Tokens before `memory_from` whose hidden states were dropped."""
    num_left: int = 0
    """Cycles that are left of the first offer, if it is one without a tree."""

    def __post_init__(self) -> None:
        self.num_sent = self.memory_from

    def add(self, offer: Offer, tokens: Sequence[int], max_nodes: int) -> None:
        """Queue an offer.

        Raises:
            DataError: the tree is too large, too many offers wait, or what it continues is verified already. One that
                was sent in a wrong expectation is no error: it is voided.
        """
        if len(self.offers) == MAX_OFFERS:
            raise DataError(f"{MAX_OFFERS} offers wait already: wait for an answer before offering another tree")
        if offer.tree is not None and offer.tree.num_nodes > max_nodes:
            raise DataError(f"the tree has {offer.tree.num_nodes} nodes; {max_nodes} are accepted, root included")
        if offer.at < len(tokens) - 1:
            raise DataError(f"the tree continues position {offer.at}, but the sequence is at {len(tokens) - 1} already")
        self.offers.append(offer)

    def take_void(self, tokens: Sequence[int]) -> list[Offer]:
        """Remove and return the offers that turned out not to continue the sequence."""
        void: list[Offer] = []
        while self.offers and not self.offers[0].fits(tokens) and not self.num_left:
            void.append(self.offers.popleft())
        return void

    def begin_cycle(self) -> tuple[Offer, bool]:
        """The offer of this cycle, and whether it is answered by it; an offer without a tree may need several."""
        offer = self.offers[0]
        self.num_target_layers = offer.num_target_layers
        if offer.tree is None:
            self.num_left = (self.num_left or offer.num_plain) - 1
        if not self.num_left:
            self.offers.popleft()
        return offer, not self.num_left


class PacedSequences:
    """The engine's part for all paced sequences: who may offer what, and what clients get."""

    def __init__(self, drafters: Mapping[str, Drafter], cache: BatchedKVCache, max_nodes: int) -> None:
        """
        Args:
            drafters: drafters that clients run, by the names that requests use; here they only observe.
            cache: of all sequences.
            max_nodes: maximum number of nodes of a tree, root included.
        """
        self._observers = {name: Observer(d.observe, d.observed, cache) for name, d in drafters.items()}
        self._layer_counts = {name: drafter.config.layer_counts for name, drafter in drafters.items()}
        self.max_nodes = max_nodes

    def pace_of(self, request: Request, client: ClientMemory) -> Pace:
        """What the engine keeps of a new sequence.

        Raises:
            DataError: clients cannot run the drafter, or not with this N, or have memory of more tokens than there are.
        """
        observer = self._observers.get(request.drafter or "")
        if observer is None:
            known = ", ".join(self._observers) or "none"
            raise DataError(f"drafter is '{request.drafter}', which clients cannot run here; they can run {known}")
        most = len(request.prompt) + len(request.generated)
        if not 0 <= client.num_known <= most:
            raise DataError(
                f"memory_from is {client.num_known}; the request has {most} tokens, so 0 to {most} are accepted"
            )
        layer_counts = self._layer_counts[request.drafter or ""]
        _check_layers(client.num_target_layers, layer_counts)
        in_layers = client.num_known_in_layers
        if len(in_layers) > max(layer_counts) or not all(0 <= known <= client.num_known for known in in_layers):
            raise DataError(
                f"tail_from is {list(in_layers)}; up to {max(layer_counts)} numbers from 0 to memory_from, "
                f"{client.num_known}, are accepted"
            )
        in_layers = *in_layers, *[0] * (max(layer_counts) - len(in_layers))
        return Pace(observer, client.num_known, client.num_target_layers, [*in_layers])

    def offer(self, sequences: Sequence[EngineSequence], number: int, offer: Offer) -> None:
        """Take a client's offer for one of these sequences.

        Raises:
            DataError: the sequence is not there or not paced, or the offer cannot be verified.
        """
        for sequence in sequences:
            if sequence.number == number and sequence.pace is not None:
                _check_layers(offer.num_target_layers, self._layer_counts[sequence.request.drafter or ""])
                sequence.pace.add(offer, sequence.tokens, self.max_nodes)
                return
        raise DataError(f"sequence {number} takes no drafts: it has ended, has not been read yet, or is not paced")

    def void_offers(self, sequence: EngineSequence) -> list[RequestOutput]:
        """Drop the offers that do not continue a sequence, and say so."""
        pace = sequence.pace
        if pace is None or sequence.stop_checker.finish_reason is not None:
            return []
        return [
            RequestOutput(sequence.number, [], paced=PacedOutput(pace.num_sent, 0, seq=offer.seq, is_void=True))
            for offer in pace.take_void(sequence.tokens)
        ]

    def after_reading(self, first_row: int, reading: Sequence[EngineSequence]) -> list[RequestOutput]:
        """The memory of the prompt tokens that were read since the last time."""
        paced = {first_row + index: s for index, s in enumerate(reading) if s.pace is not None}
        for sequence in paced.values():
            _drop_known(sequence)
        found = _memory_of(paced, {row: s.num_read for row, s in paced.items()})
        outputs: list[RequestOutput] = []
        for row, output in found.items():
            pace = paced[row].pace
            assert pace is not None
            if output.num_new:
                paced_output = replace(output, tail=_tail_of(row, pace, output.num_new))
                outputs.append(RequestOutput(paced[row].number, [], paced=paced_output))
        return outputs

    def after_cycle(
        self, first_row: int, running: Sequence[EngineSequence], lengths: Sequence[int], seconds: float
    ) -> dict[int, PacedOutput]:
        """What the clients get after a cycle, by index in `running`. Their offers count as answered then.

        Args:
            first_row: row of the first of the sequences.
            running: the sequences of the cycle.
            lengths: how many tokens of each are in the cache now.
            seconds: time of the pass.
        """
        paced = {first_row + index: s for index, s in enumerate(running) if s.pace is not None}
        found = _memory_of(paced, {row: lengths[row - first_row] for row in paced})
        outputs: dict[int, PacedOutput] = {}
        for row, output in found.items():
            pace = paced[row].pace
            assert pace is not None
            offer, is_last = pace.begin_cycle()
            tail = _tail_of(row, pace, output.num_new)  # of as many layers as the offer says
            outputs[row - first_row] = replace(output, tail=tail, seq=offer.seq, is_last=is_last, seconds=seconds)
        return outputs


def _check_layers(num_target_layers: int, layer_counts: tuple[int, ...]) -> None:
    if num_target_layers not in layer_counts:
        known = ", ".join(map(str, layer_counts))
        raise DataError(f"num_target_layers is {num_target_layers}; this drafter drafts with {known}")


def _tail_of(row: int, pace: Pace, num_new: int) -> tuple[TailPiece, ...]:
    """The next keys and values that the client lacks of the layers that its drafts run, oldest first: at most
    `MAX_RECALLED` tokens of a layer, or as many as have new memory."""
    pieces: list[TailPiece] = []
    for layer in range(1, pace.num_target_layers + 1):
        begin = pace.num_sent_in_layers[layer - 1]
        count = min(pace.num_sent - begin, max(MAX_RECALLED, num_new))
        if count:
            pieces.append(TailPiece(layer, begin, pace.observer.keys_values_of(row, begin, count, layer)))
            pace.num_sent_in_layers[layer - 1] += count
    return tuple(pieces)


def can_join(sequence: EngineSequence) -> bool:
    """Whether a paced sequence takes part in the next cycle."""
    return sequence.pace is not None and bool(sequence.pace.offers or sequence.stop_checker.finish_reason)


def _drop_known(sequence: EngineSequence) -> None:
    """Drop the hidden states of prompt tokens whose memory the client had from the start."""
    pace = sequence.pace
    assert pace is not None
    count = min(pace.memory_from, sequence.num_read) - pace.num_dropped
    if count > 0:
        for depth in pace.observer.needs.hidden_depths:
            sequence.take_hidden(depth, count)
        pace.num_dropped += count


def _memory_of(sequences: Mapping[int, EngineSequence], lengths: Mapping[int, int]) -> dict[int, PacedOutput]:
    """The memory that clients do not have yet of their sequences, by row of the cache.

    Args:
        sequences: paced ones, by row.
        lengths: how many tokens of each are in the cache.
    """
    outputs: dict[int, PacedOutput] = {}
    together: dict[int, dict[int, EngineSequence]] = {}
    for row, sequence in sequences.items():
        pace = sequence.pace
        assert pace is not None
        if lengths[row] - pace.num_sent > MAX_TOKENS:
            outputs[row] = _in_pieces(row, sequence, pace, lengths[row])
        elif lengths[row] > pace.num_sent:
            together.setdefault(id(pace.observer), {})[row] = sequence
        else:
            outputs[row] = PacedOutput(begin=pace.num_sent, num_new=0)
    for group in together.values():
        paces = {row: sequence.pace for row, sequence in group.items() if sequence.pace is not None}
        begins = {row: pace.num_sent for row, pace in paces.items()}
        counts = {row: lengths[row] - begins[row] for row in paces}
        found = next(iter(paces.values())).observer.memory_of(group, begins, counts)
        for row, pace in paces.items():
            outputs[row] = PacedOutput(begin=begins[row], num_new=counts[row], memory=(_without_tail(found[row]),))
            pace.num_sent = lengths[row]
    return outputs


def _in_pieces(row: int, sequence: EngineSequence, pace: Pace, length: int) -> PacedOutput:
    """Memory of many tokens, as of a prompt."""
    begin, pieces = pace.num_sent, list[Mapping[str, Tensor]]()
    while pace.num_sent < length:
        count = min(MAX_TOKENS, length - pace.num_sent)
        found = pace.observer.memory_of({row: sequence}, {row: pace.num_sent}, {row: count})
        pieces.append(_without_tail(found[row]))
        pace.num_sent += count
    return PacedOutput(begin=begin, num_new=length - begin, memory=tuple(pieces))


def _without_tail(memory: Memory) -> Memory:
    return {name: tensor for name, tensor in memory.items() if name != TAIL}
