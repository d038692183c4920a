"""What a network is like: delay, jitter, rate and loss. Torch-free."""

from typing import Literal

from pydantic import Field

from moray.config import Config

Applies = Literal["each_way", "round_trip"]
"""Whether a delay holds for each direction, or for both together."""


class LinkProfile(Config):
    """One network."""

    name: str = Field(min_length=1)
    """Name in tables."""
    delay_ms: float = Field(ge=0)
    """Mean delay, in milliseconds."""
    jitter_ms: float = Field(default=0.0, ge=0)
    """Standard deviation of the delay, in milliseconds; delays are never negative."""
    rate_mbit: float = Field(gt=0)
    """Rate of each direction, in megabits per second."""
    loss: float = Field(default=0.0, ge=0, le=1)
    """Share of packets that are lost, in each direction."""
    applies: Applies = "each_way"
    """Whether delay and jitter hold for each direction (each_way) or for the round trip (round_trip)."""

    @property
    def one_way(self) -> tuple[float, float]:
        """Mean and standard deviation of one direction's delay, in seconds. The variances of two directions add up."""
        if self.applies == "each_way":
            return self.delay_ms / 1e3, self.jitter_ms / 1e3
        return self.delay_ms / 2e3, self.jitter_ms / 2**0.5 / 1e3


PROFILES = {
    profile.name: profile
    for profile in (
        LinkProfile(name="wan", delay_ms=9.0, rate_mbit=50, applies="round_trip"),
        LinkProfile(name="4g", delay_ms=21.0, jitter_ms=19.0, rate_mbit=20, loss=0.001),
        LinkProfile(name="5g", delay_ms=10.0, jitter_ms=10.0, rate_mbit=100, loss=0.001),
    )
}
"""The networks of MoA's client-server setting (arXiv 2410.03804): wan is a ping of 9 ms. The paper gives no rate for
5g, so 100 Mbit/s is assumed, and does not say whether delays are one way or both."""
