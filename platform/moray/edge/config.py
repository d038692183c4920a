"""Settings of a device's client. Torch-free."""

from typing import Literal

from pydantic import Field, model_validator

from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.drafters.configs import UsableConfig
from moray.edge.messages import CodecName
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, AdaptiveShape, Shape


class EdgeConfig(Config):
    """How a device drafts and how it bears a bad connection."""

    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees; adaptive follows acceptance and the measured time of answers."""
    codec: CodecName = "bfloat16"
    """How the drafter's memory crosses the network: float32, bfloat16, int8 or int4. It can change speed only."""
    in_flight: int = Field(default=1, ge=1, le=2)
    """Drafts that may be under way at once; with 2, a chain is sent before the last one is verified."""
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


class EdgeRunConfig(EdgeConfig):
    """One device: its drafter, its server, and what it asks."""

    target: TargetConfig
    """The server's target. Only its tokenizer, embeddings, lm_head and the drafter's last layers are read here."""
    drafter: str | UsableConfig
    """Folder of the server's drafter, copied here, or a drafter by type."""
    drafter_name: str | None = Field(default=None, min_length=1)
    """Name that the server has for the drafter; null for the name of its folder or type."""
    url: str = "ws://127.0.0.1:8000/v1/edge"
    """Address of the server: wss://HOST/v1/edge, or ws:// on this machine."""
    key_file: str | None = None
    """File whose first line is the bearer key for the server; null for no key."""
    ca_file: str | None = None
    """PEM file with the certificates to trust; null for the system's."""
    prompt: str | None = None
    """What to ask; null for a chat on the terminal."""
    system: str | None = None
    """System message of the chat; null for none."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of an answer."""
    sampling: SamplingParams = SamplingParams()
    """How tokens are drawn; greedy by default."""
    private_answers: Literal["target", "drafter"] = "target"
    """Who writes the text between <private> and </private> in an answer: target or drafter. The drafter writes alone,
    unverified; the server gets a placeholder for the text, which never leaves the device."""
    private_request: str = "Put every name between <private> and </private>."
    """What asks the target for such marks: added to the system message with private_answers=drafter."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads; null leaves it to torch."""

    @model_validator(mode="after")
    def _check(self) -> "EdgeRunConfig":
        if self.private_answers == "drafter" and self.in_flight > 1:
            raise ValueError(
                f"in_flight is {self.in_flight} with private_answers=drafter, which could send what follows a mark: "
                "give in_flight=1"
            )
        return self
