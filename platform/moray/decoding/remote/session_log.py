"""What the drafter process of one sequence was sent, and what it still has to be sent."""

from dataclasses import dataclass, field

from torch import Tensor

from moray.decoding.remote.channel import Endpoint
from moray.decoding.remote.messages import last_rows
from moray.drafters.base import Memory


@dataclass
class SessionLog:
    """Everything verified of one sequence, so that another process can take over at any time."""

    session: str
    tokens: list[int] = field(default_factory=list)
    memory: dict[str, list[Tensor]] = field(default_factory=dict)
    """Pieces [tokens, width] of each part of the drafter's memory, on the CPU."""
    num_sent: int = 0
    """Tokens that were sent to its drafter process."""
    num_kept: int = 0
    """`num_kept` of the first `extend` call whose tokens have not been sent yet (see `Drafter.extend`)."""
    endpoint: Endpoint | None = None
    """Its drafter process; None while it has none."""
    request: int | None = None
    """Number of the unanswered request for its draft."""

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of memory that were not sent to its drafter process."""
        count = len(self.tokens) - self.num_sent
        return sum(count * pieces[0][0].numel() * pieces[0].element_size() for pieces in self.memory.values())

    def extend(self, tokens: list[int], memory: Memory, num_kept: int) -> None:
        """Add verified tokens and their memory."""
        if self.num_sent == len(self.tokens):
            self.num_kept = num_kept
        self.tokens += tokens
        for name, rows in memory.items():
            self.memory.setdefault(name, []).append(rows[0].cpu())

    def unsent_memory(self) -> Memory:
        """Rows [unsent tokens, width] of each part of the memory."""
        count = len(self.tokens) - self.num_sent
        return {name: last_rows(pieces, count) for name, pieces in self.memory.items()}

    def mark_sent(self, request: int) -> None:
        """Note that everything was sent with this request, which asks for a draft."""
        self.num_sent, self.num_kept, self.request = len(self.tokens), 0, request

    def move_to(self, endpoint: Endpoint | None) -> None:
        """Change the drafter process: the new one knows nothing of the sequence yet."""
        self.endpoint, self.num_sent = endpoint, 0
