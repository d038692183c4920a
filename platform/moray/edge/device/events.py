"""What happens while a device answers: what a user interface shows. Torch-free."""

from dataclasses import dataclass
from enum import Enum


class LinkState(Enum):
    """The connection to the server."""

    CONNECTING = "connecting"
    ONLINE = "online"
    SUSPECT = "suspect"
    """Nothing has been heard of the server for some time; the drafter goes on alone."""
    OFFLINE = "offline"
    """The drafter goes on alone; its tokens are not verified."""


@dataclass(frozen=True)
class VerifiedTokens:
    """Tokens of the target's own text; they never change."""

    index: int
    """Of the first one in the answer."""
    tokens: tuple[int, ...]
    num_drafted: int = 0
    """How many of them, from the first one on, were drafted here."""


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens that the drafter expects to follow; they may be retracted."""

    index: int
    """Of the first one in the answer."""
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Retracted:
    """Drafted tokens from this index of the answer on were wrong."""

    index: int


@dataclass(frozen=True)
class LocalText:
    """Text that the drafter wrote alone between marks, and that stays on the device (see `edge.device.local_spans`)."""

    index: int
    """Of the token of the answer that it begins at, or that follows the target's first tokens of it."""
    text: str
    """With the closing mark. It is never verified."""
    tokens: tuple[int, ...]
    """What stands for it in the answer: from `index` on, nothing else does."""


@dataclass(frozen=True)
class LinkChanged:
    """The connection is in another state."""

    state: LinkState
    reason: str = ""


@dataclass(frozen=True)
class Finished:
    """The answer has ended."""

    finish_reason: str


EdgeEvent = VerifiedTokens | DraftedTokens | Retracted | LocalText | LinkChanged | Finished
