"""Configuration of `pipelines.regenerate`. Imports neither ray nor torch."""

from typing import Any

from pydantic import Field, model_validator

from moray.activations.ultrachat import ChatsConfig
from moray.cluster.configs import RayConfig
from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.targets.spec import TargetConfig


class AnswerSampling(Config):
    """How the target's answers are drawn. A text depends on the seed and its source row, on nothing else."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        """As decoding reads it."""
        return SamplingParams(**self.model_dump())


class RegenerateConfig(Config):
    """Which chats the target answers anew, and how."""

    target: TargetConfig
    chats: ChatsConfig
    output: str
    """Folder or URI of JSON Lines parts; give a folder to pipelines.cache_activations as chats.path."""
    sampling: AnswerSampling = AnswerSampling()
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer."""
    max_length: int = Field(default=2048, ge=2)
    """Most tokens of a prompt and max_new_tokens together: a chat ends before the question that is too long for it,
    and is dropped if that is its first."""
    max_turns: int | None = Field(default=None, ge=1)
    """Questions of a chat that are answered, from the first on; None for all."""
    keep_truncated: bool = True
    """Keep answers that max_new_tokens cut off. Such an answer has no end-of-sequence token of the target's, but a chat
    template closes it as any other. False ends the chat before that question, or drops it if that is its first,
    which leaves the shorter answers."""
    batch_tokens: int = Field(default=16384, ge=64)
    """Cache slots of a target replica: as many chats are answered at a time as fit, each with its prompt and
    max_new_tokens."""
    chats_per_part: int = Field(default=512, ge=1)
    """Chats that are answered and written together: what a kill costs at most."""
    num_targets: int = Field(default=1, ge=1)
    """Target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    gpus_per_target: float = Field(default=0.0, ge=0)
    threads_per_target: int = Field(default=1, ge=1)
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> "RegenerateConfig":
        if self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_length {self.max_length}, which leaves no room for a "
                "prompt: give a larger max_length"
            )
        if self.batch_tokens < self.max_length:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens} and max_length {self.max_length}; one chat must fit: give a "
                "larger batch_tokens or a smaller max_length"
            )
        return self

    @property
    def text_settings(self) -> dict[str, Any]:
        """What decides the text and its parts; everything else may differ when a run goes on."""
        others = {"target", "output", "batch_tokens", "ray"}
        places = {"num_targets", "cpus_per_target", "gpus_per_target", "threads_per_target"}
        settings = self.model_dump(mode="json", exclude=others | places)
        del settings["chats"]["max_bad_rows"]
        return settings | {"dtype": self.target.dtype}
