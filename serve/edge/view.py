"""What devices' sessions look like from here, for the chat page: verified, unverified and retracted text."""

from collections.abc import Callable, Sequence

from moray.decoding.request import Request
from moray.edge.messages import Verify
from moray.edge.server.replies import Reply
from serve.api.documents import EdgeSession

_MAX_TOKENS = 1000
"""Tokens of an answer, from its end, that are shown."""


class SessionView:
    """One session's answer so far."""

    def __init__(self, name: str, owner: str, request: Request) -> None:
        """
        Args:
            name: of the session.
            owner: who may see it.
            request: what it answers.
        """
        self.owner = owner
        self._name = name
        self._drafter = request.drafter or ""
        self._begin = len(request.prompt)
        self._tokens = list(request.generated)
        self._unverified: list[int] = []
        self._retracted: list[int] = []
        self.is_finished = False

    def draft(self, verify: Verify) -> None:
        """Note what the device has drafted. Of a tree, the first child of each node counts."""
        if verify.at == self._begin + len(self._tokens) - 1:
            self._unverified = _first_path(verify.tokens, verify.parents)

    def verify(self, reply: Reply) -> None:
        """Note what was verified."""
        if reply.tokens:
            self._retracted = self._unverified[reply.num_accepted :]
            self._unverified = []
            self._tokens += reply.tokens
        self.is_finished |= reply.is_finished

    def describe(self, decode: Callable[[Sequence[int]], str]) -> EdgeSession:
        """The session as the page shows it."""
        shown = self._tokens[-_MAX_TOKENS:]
        verified = decode(shown)
        return EdgeSession(
            id=self._name[:8],
            drafter=self._drafter,
            num_tokens=len(self._tokens),
            verified=verified,
            unverified=_after(verified, decode([*shown, *self._unverified])),
            retracted=decode(self._retracted),
            is_finished=self.is_finished,
        )


def _first_path(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes below the root on the path that always takes the first child."""
    if not parents:
        return [*tokens[1:]]
    path, node = [], 0
    while (child := next((i for i, parent in enumerate(parents) if parent == node and i), None)) is not None:
        path.append(tokens[child])
        node = child
    return path


def _after(text: str, longer: str) -> str:
    """What a longer text adds to a text; nothing while its last character is not complete."""
    return longer[len(text) :] if longer.startswith(text) else ""
