"""What is counted of the channels to drafters."""

from dataclasses import dataclass


@dataclass
class RemoteStats:
    """What the channels have carried so far."""

    num_cycles: int = 0
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_misses: int = 0
    num_late: int = 0
    num_lost: int = 0
    """Drafter processes that were given up."""
    waiting_seconds: float = 0.0
    drafting_seconds: float = 0.0
    """What the drafters say that they needed."""
    channel_seconds: float = 0.0
    """Waiting beyond drafting: the way there and back, and standing in line."""
