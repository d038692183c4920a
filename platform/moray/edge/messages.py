"""Messages between a device, which drafts, and a server, which verifies: WebSocket subprotocol `moray.edge.2`.

    device                                              server
    Hello(versions, fingerprints, codec)         ->
    Open(request, memory_from)                   ->
                                                 <-     Welcome(session, resume token, limits)
                                                 <-     Verified(seq 0, memory of the prompt), in pieces
                                                 <-     Verified(seq 0, first token)
    Verify(seq 1, at, tokens, parents)           ->
                                                 <-     Verified(seq 1, accepted tokens, next root, memory)
    Resume(session, token, received)             ->     on another connection, after a cut
                                                 <-     Resumed(last seq), then all Verified that were not received
    Open(request)                                ->     the next answer, over the same connection
                                                 <-     Welcome(another session, ...), and so on

What the device sends is JSON; what the server sends is a frame of `decoding.remote.frames`, which may hold tensors. The
server numbers its `Verified` messages, and keeps each until the device says that it has received it, so that a cut
loses nothing. Positions are absolute: the number of tokens of prompt and answer before a token. Torch-free.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from moray.config import Config
from moray.decoding.request import Request
from moray.errors import DataError

VERSION = 2
SUBPROTOCOL = "moray.edge.2"
MAX_UP = 1 << 20
"""Maximum bytes of a message to the server."""
MAX_TAIL = 64
"""Maximum number of the target's last layers that a drafter runs."""

CodecName = Literal["float32", "bfloat16", "int8", "int4"]
"""How memory crosses (see `edge.codec`). Only float32 and, for targets in it, bfloat16 keep every bit; the others can
lower tau, and never change a token."""
RefusalCode = Literal[
    "version", "target", "text", "drafter", "codec", "token", "session", "bad_message", "full", "rate", "failed"
]


class Message(Config):
    """Base of all messages: `type` is written even where defaults are left out."""

    @model_serializer(mode="wrap")
    def _with_type(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"type": type(self).model_fields["type"].default} | fields(self)


class Hello(Message):
    """The first message of a connection."""

    type: Literal["hello"] = "hello"
    versions: tuple[int, ...] = (VERSION,)
    """Versions of this protocol that the device speaks."""
    target: str
    """Fingerprint of the target that the device's drafter was loaded for (see `TargetSpec.fingerprint`)."""
    text: str
    """Fingerprint of tokenizer and chat template (see `ChatTokenizer.fingerprint`)."""
    drafter: str
    """Name that the server has for the drafter."""
    drafter_fingerprint: str
    """Hash of the drafter's files; empty for one without files."""
    codec: CodecName = "bfloat16"


class Open(Message):
    """Begin a sequence, or begin it again after its session was lost."""

    type: Literal["open"] = "open"
    request: Request
    """What to answer; `generated` holds the tokens that the device has verified already."""
    memory_from: int = Field(default=0, ge=0)
    """Tokens, from the first one on, whose memory the device has."""
    num_target_layers: int = Field(default=0, ge=0)
    """N: how many of the target's last layers the device's drafts run, and need keys and values of."""
    tail_from: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), max_length=MAX_TAIL)
    """Tokens whose keys and values the device has in the target's last layer, in the one before it, and so on."""


class Verify(Message):
    """A draft to verify."""

    type: Literal["verify"] = "verify"
    seq: int = Field(ge=1)
    """Number of the message in its session, counted from 1 without gaps."""
    at: int = Field(ge=0)
    """Position of the root."""
    tokens: tuple[int, ...] = ()
    """Tokens of the tree's nodes, the root first; none to let the server decode alone."""
    parents: tuple[int, ...] = ()
    """Parent of each node, -1 for the root; none for a chain."""
    num_target_layers: int = Field(default=0, ge=0)
    """N of the next drafts: the answer brings the keys and values of as many of the target's last layers."""
    num_plain: int = Field(default=1, ge=1)
    """Without tokens: how many the server decodes alone."""
    received: int = Field(default=0, ge=0)
    """Number of the last message that was received: the server may forget it and all before it."""


class Resume(Message):
    """Take up a session on another connection."""

    type: Literal["resume"] = "resume"
    session: str
    token: str
    """The resume token of the session's `Welcome`."""
    received: int = Field(default=0, ge=0)
    """See `Verify.received`."""


class Cancel(Message):
    """End the sequence."""

    type: Literal["cancel"] = "cancel"


class Welcome(Message):
    """The server's answer to `Hello`."""

    type: Literal["welcome"] = "welcome"
    version: int
    session: str
    resume_token: str
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    max_nodes: int
    """Maximum number of nodes of a tree, root included."""
    max_in_flight: int
    """Maximum number of `Verify` that may wait for an answer."""
    idle_seconds: float
    """Seconds after which the server forgets a session that nothing was heard of."""


class Tail(Config):
    """Keys and values of consecutive tokens in one of the target's last layers: the tensor named `name`."""

    layer: int = Field(ge=1, le=MAX_TAIL)
    """1 for the last layer, 2 for the one before it, and so on."""
    begin: int = Field(ge=0)
    """Position of the first of the tokens."""
    num_tokens: int = Field(ge=1)

    @property
    def name(self) -> str:
        """Of the tensor in the frame."""
        return f"tail.{self.layer}"


class Verified(Message):
    """What is new in a sequence. The frame's tensors are the memory of the verified tokens, and `tail`."""

    type: Literal["verified"] = "verified"
    index: int
    """Number of this message in its session, counted from 1 without gaps."""
    seq: int = 0
    """The `Verify` that this answers; 0 while the prompt is read."""
    at: int = 0
    """Position of the first of the new tokens."""
    tokens: tuple[int, ...] = ()
    """New tokens of the answer: the accepted part of the draft, and one more, which is the next root."""
    num_accepted: int = 0
    """How many of them, from the first on, were drafted."""
    finish_reason: str | None = None
    """"stop" or "length" once the answer has ended."""
    begin: int = 0
    """Position of the first token whose memory follows."""
    num_new: int = 0
    """Number of tokens whose memory follows."""
    tail: tuple[Tail, ...] = ()
    """What follows of the target's last layers; it may begin earlier, if the device begins to use a layer."""
    is_void: bool = False
    """Whether the draft did not continue what was verified before it, and was dropped."""
    is_last: bool = True
    """Whether the `Verify` is answered completely."""
    seconds: float = 0.0
    """Time of the target's pass."""
    sent: float = 0.0
    """When this was sent, on the server's clock, in seconds: differences show the transfer time of large messages."""


class Resumed(Message):
    """The session goes on; messages that were not received follow."""

    type: Literal["resumed"] = "resumed"
    last_seq: int
    """The last `Verify` that the server has received."""


class Refused(Message):
    """The server does not go on. The connection is closed after it."""

    type: Literal["refused"] = "refused"
    code: RefusalCode
    """"session": the session is unknown or was lost: open it again. "full" and "rate": try again later."""
    message: str
    retry_ms: int = 0
    """Milliseconds after which to try again; 0 if that does not help."""


UpMessage = Hello | Open | Verify | Resume | Cancel
"""To the server."""
DownMessage = Welcome | Verified | Resumed | Refused
"""To the device."""
_UP: TypeAdapter[UpMessage] = TypeAdapter(Annotated[UpMessage, Field(discriminator="type")])
_DOWN: TypeAdapter[DownMessage] = TypeAdapter(Annotated[DownMessage, Field(discriminator="type")])


def encode_up(message: UpMessage) -> str:
    """A message to the server as JSON; fields that have their default are left out."""
    return message.model_dump_json(exclude_defaults=True)


def decode_up(text: str | bytes) -> UpMessage:
    """Read a message to the server.

    Raises:
        DataError: it is too long, or no such message.
    """
    if len(text) > MAX_UP:
        raise DataError(f"the message has {len(text)} bytes; {MAX_UP} are accepted")
    try:
        return _UP.validate_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the message is not understood: {str(error)[:200]}") from None


def decode_down(words: bytes) -> DownMessage:
    """Read the JSON part of a frame from the server.

    Raises:
        DataError: it is no such message.
    """
    try:
        return _DOWN.validate_json(words)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the server sent a message that is not understood: {str(error)[:200]}") from None
