"""Settings of a device's client. Torch-free."""

from pydantic import Field

from moray.config import Config
from moray.edge.messages import CodecName
from moray.trees.shapes import MAX_DEPTH, ChainShape, Shape


class EdgeConfig(Config):
    """How a device drafts and how it bears a bad connection."""

    tree: Shape = ChainShape(type="chain", depth=4)
    """Shape of the draft trees."""
    codec: CodecName = "bfloat16"
    """How the drafter's memory crosses the network: float32, bfloat16, int8 or int4. It can change speed only."""
    in_flight: int = Field(default=1, ge=1, le=2)
    """Drafts that may be under way at once; with 2, the next chain is sent before the one before it is verified."""
    suspect_after_seconds: float = Field(default=1.0, gt=0)
    """Seconds without a sign of the server after which the drafter goes on alone, on the same connection."""
    offline_after_seconds: float = Field(default=2.0, gt=0)
    """Seconds without a sign of the server after which the connection counts as lost."""
    max_offline_tokens: int = Field(default=MAX_DEPTH - 1, ge=0, le=MAX_DEPTH - 1)
    """Maximum number of unverified tokens that the drafter writes alone; 0 to wait for the server."""
    retry_seconds: float = Field(default=1.0, gt=0)
    """Seconds between attempts to reach the server again."""
    give_up_seconds: float | None = Field(default=None, gt=0)
    """Seconds without a server after which the answer fails; null to try for ever."""
