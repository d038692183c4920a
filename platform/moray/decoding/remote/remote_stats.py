"""Counters of the channels to drafters."""

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
    """Drafting time, as reported by the drafters."""
    channel_seconds: float = 0.0
    """Waiting time minus drafting time: transport and queueing."""
