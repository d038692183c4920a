"""Answers prompts on a device: drafts here, lets the server verify, and goes on alone while there is no server.

    cycle = draft + upload + the target's pass + download of tokens and memory

The text is the target's own, whatever was cut when: tokens count as verified only when the server has sent them, each
message is taken once, and a session that was lost is opened again with all verified tokens.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from moray.decoding.planning.fitting import fit_shape
from moray.decoding.remote.ahead import Ahead
from moray.decoding.request import Request
from moray.edge.codec import BYTES, decode
from moray.edge.config import EdgeConfig
from moray.edge.device.answer import EdgeAnswer, TimedDraft
from moray.edge.device.bandwidth import Bandwidth
from moray.edge.device.connection import WAIT_SECONDS, ServerConnection, SessionLostError, TryLaterError
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import (
    EdgeEvent,
    Finished,
    LinkChanged,
    LinkState,
    Retracted,
    VerifiedTokens,
)
from moray.edge.device.offline import DraftingAlone
from moray.edge.device.planner import CyclePlan, CyclePlanner
from moray.edge.device.stats import EdgeStats
from moray.edge.device.transport import Dial, Link
from moray.edge.messages import Cancel, Hello, Open, Resume, Resumed, Verified, Verify, Welcome, encode_up
from moray.errors import DataError, UnreachableError
from moray.trees.shapes import MAX_DEPTH


class EdgeClient:
    """Answers one prompt after the other."""

    def __init__(
        self,
        drafter: DeviceDrafter,
        hello: Hello,
        dial: Dial,
        config: EdgeConfig,
        eos_ids: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            drafter: of this device.
            hello: who this device is; the codec is taken from `config`.
            dial: opens a connection.
            config: settings.
            eos_ids: tokens after which nothing is written alone.
            clock: seconds.
        """
        self._drafter = drafter
        self._hello = hello.model_copy(update={"codec": config.codec})
        self._dial = dial
        self._config = config
        self._alone = DraftingAlone(drafter, config.max_offline_tokens, eos_ids)
        self._clock = clock
        self._idle_link: Link | None = None
        """The connection of the answer before, for the next one."""
        self.stats = EdgeStats()
        self.ends_draft: Callable[[Sequence[int]], bool] | None = None
        """Whether what follows these tokens of an answer must not be sent; None to send every draft whole."""
        shape = fit_shape(config.tree, drafter.name, drafter.drafter.max_depth, drafter.drafter.spec.vocab_size)
        self._bandwidth = Bandwidth()
        layer_bytes = BYTES[config.codec] * drafter.drafter.spec.kv_width
        self._planner = CyclePlanner(shape, drafter.layer_counts, layer_bytes, self._bandwidth)

    def answer(self, request: Request) -> Generator[EdgeEvent]:
        """Answer a request; yield what happens. Closing the iterator cancels the answer.

        Raises:
            MismatchError: the server has another target, tokenizer or drafter.
            DataError: the server refuses the request, or answers something that is not of this protocol.
            UnreachableError: there was no server for `give_up_seconds`.
        """
        answer = EdgeAnswer(request.model_copy(update={"drafter": self._hello.drafter}))
        self._drafter.begin(request.params, request.sequence)
        self.stats, began = EdgeStats(), self._clock()
        with ThreadPoolExecutor(1, "dial") as pool:
            while answer.finish_reason is None:
                link, self._idle_link, is_known = self._idle_link, None, self._idle_link is not None
                if link is None:
                    link = yield from self._connect(answer, pool)
                received, pause = answer.received, 0.0
                try:
                    yield from self._online(answer, self._server_connection(link), is_known=is_known)
                except UnreachableError as error:
                    self.stats.num_cuts += 1
                    yield self._offline(answer, error)
                    if answer.received == received and not is_known:  # refused, or lost before anything came
                        pause = max(
                            self._config.retry_seconds,
                            error.retry_seconds if isinstance(error, TryLaterError) else 0.0,
                        )
                except GeneratorExit:
                    with suppress(UnreachableError):
                        link.send(encode_up(Cancel()))
                    raise
                finally:
                    if answer.finish_reason is None:
                        link.close()
                    else:
                        self._idle_link = link
                if pause:
                    yield from self._pause(answer, pool, pause)
        self.stats.seconds = self._clock() - began
        yield Finished(answer.finish_reason)

    def close(self) -> None:
        """Close the connection that waits for the next answer."""
        if self._idle_link is not None:
            self._idle_link.close()
            self._idle_link = None

    # --- Offline ---

    def _connect(self, answer: EdgeAnswer, pool: ThreadPoolExecutor) -> Generator[EdgeEvent, None, Link]:
        """Connect, and draft alone meanwhile."""
        yield LinkChanged(LinkState.CONNECTING)
        while True:
            dialing = pool.submit(self._dial)
            while not dialing.done():
                yield from self._draft_alone(answer, dialing)
            try:
                return dialing.result()
            except UnreachableError as error:
                yield self._offline(answer, error)
            yield from self._pause(answer, pool, self._config.retry_seconds)

    def _offline(self, answer: EdgeAnswer, error: UnreachableError) -> LinkChanged:
        """Note that there is no server.

        Raises:
            UnreachableError: there has been none for too long.
        """
        now, limit = self._clock(), self._config.give_up_seconds
        answer.lost_at = now if answer.lost_at is None else answer.lost_at
        if limit is not None and now - answer.lost_at > limit:
            raise UnreachableError(f"no server for {limit:g} s: {error}")
        return LinkChanged(LinkState.OFFLINE, str(error))

    def _pause(self, answer: EdgeAnswer, pool: ThreadPoolExecutor, seconds: float) -> Iterator[EdgeEvent]:
        """Draft alone until it is time to try the server again."""
        waiting = pool.submit(time.sleep, seconds)
        while not waiting.done():
            yield from self._draft_alone(answer, waiting)

    def _draft_alone(self, answer: EdgeAnswer, until: Future[Any]) -> Iterator[EdgeEvent]:
        """Write one more token that is not verified, or wait a little if there is none to write."""
        drafted = self._alone.next(answer)
        if drafted is None:
            wait([until], WAIT_SECONDS)
        else:
            yield drafted

    # --- Online ---

    def _server_connection(self, link: Link) -> ServerConnection:
        return ServerConnection(link, self.stats, self._config.offline_after_seconds)

    def _online(self, answer: EdgeAnswer, connection: ServerConnection, *, is_known: bool) -> Iterator[EdgeEvent]:
        """Decode over one connection until the answer ends; `is_known` says whether the server has had our `Hello`."""
        self._begin(answer, connection, is_known=is_known)
        yield LinkChanged(LinkState.ONLINE)
        ahead: Ahead | None = None
        is_suspect = False
        while answer.finish_reason is None:
            is_working = answer.has_root and (ahead is not None or not answer.under_way)
            message = connection.receive(0.0 if is_working else WAIT_SECONDS)
            if message is not None:
                if is_suspect:
                    is_suspect = False
                    yield LinkChanged(LinkState.ONLINE)
                answer.alone = None
                yield from self._take_in(answer, message, connection)
                ahead = self._plan_ahead(answer)
            elif answer.has_root and not answer.under_way:
                self._verify_next(answer, connection)
                ahead = self._plan_ahead(answer)
            elif ahead is not None:
                if not self._drafter.grow(ahead):
                    ahead = None
                    self._send_guess(answer, connection)
            elif connection.check_silence() > self._config.suspect_after_seconds:
                if not is_suspect:
                    is_suspect = True
                    yield LinkChanged(LinkState.SUSPECT)
                drafted = self._alone.next(answer)
                if drafted is not None:
                    yield drafted

    def _begin(self, answer: EdgeAnswer, connection: ServerConnection, *, is_known: bool) -> None:
        """Open the session, or take it up again."""
        answer.timed = None
        if not is_known:
            connection.send(self._hello)
        if answer.welcome is None:  # without waiting for the welcome: a round trip less
            generated = tuple(answer.tokens[len(answer.request.prompt) :])
            request = answer.request.model_copy(update={"generated": generated})
            opened = Open(
                request=request,
                memory_from=self._drafter.num_known,
                num_target_layers=self._plan().next_num_target_layers,
                tail_from=self._drafter.num_known_in_layers,
            )
            connection.send(opened)
        welcome = connection.expect(Welcome)
        if 1 + self._planner.max_nodes > welcome.max_nodes:
            raise DataError(
                f"tree has up to {self._planner.max_nodes} nodes; the server accepts {welcome.max_nodes - 1}: give a "
                "smaller tree"
            )
        if answer.welcome is None:
            answer.welcome = welcome
            self._bandwidth.restart()
            return
        session, token = answer.welcome.session, answer.welcome.resume_token
        connection.send(Resume(session=session, token=token, received=answer.received))
        try:
            resumed = connection.expect(Resumed)
        except SessionLostError as error:
            answer.reopen()
            self.stats.num_reopened += 1
            raise UnreachableError(f"the session is lost: {error}") from None
        answer.last_stale_seq = resumed.last_seq  # what answers these may have waited for this connection
        for verify in answer.under_way:
            if verify.seq > resumed.last_seq:
                connection.send(verify)

    def _verify_next(self, answer: EdgeAnswer, connection: ServerConnection) -> None:
        """Send what follows the last verified token: what was written alone, or a new draft."""
        assert answer.welcome is not None
        if answer.drafted:
            chain = [answer.tokens[-1], *answer.drafted]
            self._verify(answer, connection, chain[: min(answer.welcome.max_nodes, MAX_DEPTH)], ())
            return
        began, plan = self._clock(), self._plan()
        if not self._drafter.can_draft(plan.num_target_layers):  # the server decodes alone until it can
            self._verify(answer, connection, [], ())
            return
        tree = self._drafter.draft(answer.tokens[-1], plan.shape, plan.num_target_layers)
        pruned = self._planner.prune(tree, plan)
        num_levels = tree.num_levels if pruned is None else pruned.tree.max_depth
        tree = tree if pruned is None else pruned.tree
        tokens, parents = tree.tokens.tolist(), () if tree.is_chain else tuple(tree.parents.tolist())
        self._planner.record_draft(plan.shape.depth, self._clock() - began, plan.num_target_layers)
        answer.timed = TimedDraft(answer.next_seq, num_levels, plan.num_target_layers, self._clock(), pruned)
        self._verify(answer, connection, tokens, parents)

    def _plan(self) -> CyclePlan:
        known = self._drafter.num_known
        return self._planner.plan([known - here for here in self._drafter.num_known_in_layers])

    def _plan_ahead(self, answer: EdgeAnswer) -> Ahead | None:
        """What to draft while the only draft under way is verified, if another one may be sent."""
        if answer.welcome is None or min(self._config.in_flight, answer.welcome.max_in_flight) < 2:
            return None
        if len(answer.under_way) != 1 or not answer.has_root or answer.drafted:
            return None
        first = answer.under_way[0]
        if first.parents or first.at != len(answer.tokens) - 1 or first.tokens[0] != answer.tokens[-1]:
            return None
        return self._drafter.ahead_of([*first.tokens], self._plan().shape.depth)

    def _send_guess(self, answer: EdgeAnswer, connection: ServerConnection) -> None:
        """Send what was drafted ahead: the server verifies it if the guess was right, and drops it otherwise."""
        chain = self._drafter.guess
        if chain is not None and len(answer.under_way) == 1:
            first = answer.under_way[0]
            self._verify(answer, connection, [*chain], (), at=first.at + len(first.tokens))

    def _verify(
        self,
        answer: EdgeAnswer,
        connection: ServerConnection,
        tokens: list[int],
        parents: tuple[int, ...],
        at: int | None = None,
    ) -> None:
        at = len(answer.tokens) - 1 if at is None else at
        if self.ends_draft is not None and tokens:
            num_tokens = len(tokens)
            tokens, parents = cut_draft(
                answer.tokens[len(answer.request.prompt) : -1], tokens, parents, self.ends_draft
            )
            answer.timed = answer.timed if len(tokens) == num_tokens else None
        verify = Verify(
            seq=answer.next_seq,
            at=at,
            tokens=tuple(tokens),
            parents=parents,
            num_target_layers=self._plan().next_num_target_layers,
            received=answer.received,
        )
        answer.next_seq += 1
        answer.under_way.append(verify)
        self.stats.num_calls += 1
        connection.send(verify)

    # --- Messages ---

    def _take_in(self, answer: EdgeAnswer, message: Verified, connection: ServerConnection) -> Iterator[EdgeEvent]:
        """Take in what the server has verified."""
        if message.index <= answer.received:
            return
        if message.index != answer.received + 1:
            raise DataError(f"message {message.index} of the server came after {answer.received}")
        answer.received, answer.lost_at = message.index, None
        if message.sent and message.seq > answer.last_stale_seq:
            self._bandwidth.record(message.sent, connection.arrived, connection.num_bytes)
        if message.seq and message.is_last:
            if not answer.under_way or answer.under_way[0].seq != message.seq:
                raise DataError(f"the server answers draft {message.seq}, which is not the next one under way")
            answer.under_way.popleft()
        if message.is_void:
            self.stats.num_void += 1
            return
        if message.at != len(answer.tokens):
            raise DataError(f"the server continues position {message.at}; this device is at {len(answer.tokens)}")
        answer.tokens += message.tokens
        self.stats.num_tokens += len(message.tokens)
        self._learn(answer, message, connection)
        if message.seq:
            self.stats.record(message.num_accepted)
            draft = answer.timed
            if draft is not None and draft.seq == message.seq:
                elapsed, num_tail = self._clock() - draft.sent_at, sum(tail.num_tokens for tail in message.tail)
                self._planner.record_reply(
                    draft.num_levels, message.num_accepted, elapsed, draft.num_target_layers, num_tail, draft.pruned
                )
                self.stats.record_draft(draft.num_levels, draft.num_target_layers)
        if message.tokens:
            answer.has_root = True
            yield from self._compare(answer, message)
        answer.finish_reason = message.finish_reason

    def _learn(self, answer: EdgeAnswer, message: Verified, connection: ServerConnection) -> None:
        end = message.begin + message.num_new
        if message.num_new and (message.begin != self._drafter.num_known or end > len(answer.tokens)):
            if message.finish_reason is not None:
                return
            raise DataError(
                f"the server sent memory of tokens {message.begin} to {end}; this device has {len(answer.tokens)} and "
                f"memory of {self._drafter.num_known}"
            )
        lengths = {tail.name: tail.num_tokens for tail in message.tail}
        found = decode(self._hello.codec, connection.tensors, lengths, message.num_new, self._drafter.dtype)
        memory = {name: rows for name, rows in found.items() if name not in lengths}
        self._drafter.learn(answer.tokens[message.begin : end], memory)
        begins = {tail.layer: tail.begin for tail in message.tail}
        layers = {tail.layer: found[tail.name] for tail in message.tail if tail.name in found}
        if layers.keys() != begins.keys() or not self._drafter.recall(begins, layers):
            raise DataError(f"the server sent keys and values of the last layers that do not follow: {message.tail}")

    def _compare(self, answer: EdgeAnswer, message: Verified) -> Iterator[EdgeEvent]:
        """Say what is verified, and what of the tokens that were written alone was wrong."""
        new, drafted = [*message.tokens], answer.drafted
        index = answer.index - len(new)
        num_equal = 0
        while num_equal < min(len(new), len(drafted)) and new[num_equal] == drafted[num_equal]:
            num_equal += 1
        if drafted and num_equal < len(new) and num_equal < len(drafted):
            yield Retracted(index + num_equal)
            answer.drafted = []
        else:
            answer.drafted = drafted[len(new) :]
        yield VerifiedTokens(index, message.tokens, message.num_accepted)


def cut_draft(
    before: Sequence[int], tokens: list[int], parents: tuple[int, ...], ends: Callable[[Sequence[int]], bool]
) -> tuple[list[int], tuple[int, ...]]:
    """A draft without the nodes below one at which it `ends`.

    Args:
        before: tokens of the answer before the root.
        tokens: of the nodes, the root first.
        parents: of each node, -1 for the root; none for a chain.
        ends: whether nothing may follow these tokens of an answer.
    """
    paths: list[list[int]] = []
    numbers: dict[int, int] = {}
    for node, token in enumerate(tokens):
        parent = node - 1 if not parents else parents[node]
        is_kept = parent < 0 or (parent in numbers and not ends(paths[parent]))
        paths.append([*(paths[parent] if parent >= 0 else before), token])
        if is_kept:
            numbers[node] = len(numbers)
    kept = [tokens[node] for node in numbers]
    return kept, tuple(numbers.get(parents[node], -1) for node in numbers) if parents else ()
