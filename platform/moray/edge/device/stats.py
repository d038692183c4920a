"""Counts and times of one answer on a device. Torch-free."""

from dataclasses import dataclass, fields


@dataclass
class EdgeStats:
    """What one answer has cost so far."""

    num_tokens: int = 0
    """Verified tokens of the answer."""
    num_accepted: int = 0
    """How many of them were drafted here."""
    num_calls: int = 0
    """Drafts sent to the server."""
    num_cycles: int = 0
    """Drafts that were verified."""
    num_planned: int = 0
    """Drafts whose shape and N were chosen and that were verified: not those that were written alone or ahead."""
    num_levels: int = 0
    """Their levels."""
    num_layers: int = 0
    """Sum of their N."""
    num_void: int = 0
    """Drafts that were sent ahead and turned out not to continue the text."""
    num_cuts: int = 0
    """Connections that were lost."""
    num_reopened: int = 0
    """Sessions that the server had lost."""
    num_bytes_up: int = 0
    num_bytes_down: int = 0
    seconds: float = 0.0
    """From the request to the end of the answer."""

    def add(self, other: "EdgeStats") -> None:
        """Add what another part of the same answer has cost."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def record(self, num_accepted: int) -> None:
        """Count one verified draft."""
        self.num_cycles += 1
        self.num_accepted += num_accepted

    def record_draft(self, num_levels: int, num_target_layers: int) -> None:
        """Count a verified draft whose shape and N were chosen."""
        self.num_planned += 1
        self.num_levels += num_levels
        self.num_layers += num_target_layers

    @property
    def tau(self) -> float:
        """Mean tokens per verified draft; 0 without one."""
        return (self.num_accepted + self.num_cycles) / self.num_cycles if self.num_cycles else 0.0

    @property
    def summary(self) -> str:
        """One line for a log."""
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        tokens = max(1, self.num_tokens)
        events = {
            "discarded drafts sent ahead": self.num_void,
            "lost connections": self.num_cuts,
            "lost sessions": self.num_reopened,
        }
        happened = "".join(f", {count} {name}" for name, count in events.items() if count)
        return (
            f"{self.num_tokens} tokens in {self.seconds:.1f} s ({rate:.1f} tokens/s), tau {self.tau:.2f}, "
            f"{self.num_calls / tokens:.2f} calls, {self.num_bytes_up / tokens:.0f} bytes up and "
            f"{self.num_bytes_down / tokens:.0f} down per token{happened}"
        )
