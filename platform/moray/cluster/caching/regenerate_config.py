"""Configuration of `pipelines.regenerate`. Imports neither ray nor torch."""

from pydantic import Field, JsonValue, model_validator

from moray.cluster.configs import RayConfig
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.decoding.params import SamplingParams
from moray.drafters.configs import UsableConfig
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape, Shape


class AnswerSampling(Config):
    """Sampling of the target's answers. Each text depends only on the seed and its source row."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from; 0 for all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the most likely tokens to sample from; 1 for all tokens."""
    seed: int = 0
    """Seed for sampling."""

    @property
    def params(self) -> SamplingParams:
        """The same settings as decoding parameters."""
        return SamplingParams(**self.model_dump())


class RegenerateConfig(Config):
    """Chats that the target regenerates, and the settings for it."""

    target: TargetConfig
    chats: ChatsConfig
    output: str
    """Folder or URI of the JSON Lines parts; chats.path of pipelines.cache_activations reads it."""
    sampling: AnswerSampling = AnswerSampling()
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum tokens per answer."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum prompt tokens plus max_new_tokens; a chat ends before a question that needs more. A chat whose first
    question needs more is dropped."""
    max_turns: int | None = Field(default=None, ge=1)
    """Number of questions per chat to answer, from the first on; null for all."""
    keep_truncated: bool = True
    """Keep answers that max_new_tokens cut off; false ends the chat before that question. The target wrote no
    end-of-sequence token after such an answer, but a chat template closes it like any other. With false, a chat whose
    first answer is cut off is dropped, which leaves the short answers."""
    batch_tokens: int = Field(default=16384, ge=64)
    """KV cache tokens per target replica; as many chats run at a time as fit with prompt and answer."""
    drafter: str | UsableConfig | None = None
    """Folder of a trained drafter, or a drafter by type, such as {type: ngram}; null for no drafts. On the
    CPUs that were measured, drafts gain nothing here. The text is the same, but for near-ties in bfloat16 and
    float16."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees if there is a drafter; adaptive follows batch size and acceptance."""
    chats_per_part: int = Field(default=512, ge=1)
    """Number of chats answered and written together; a kill loses at most one such part per replica."""
    num_targets: int = Field(default=1, ge=1)
    """Number of target replicas, one actor each."""
    cpus_per_target: float = Field(default=1.0, gt=0)
    """Logical CPUs of each target replica."""
    gpus_per_target: float = Field(default=0.0, ge=0)
    """GPUs of each target replica; 0 runs it on the CPU."""
    threads_per_target: int = Field(default=1, ge=1)
    """Number of torch threads of each target replica."""
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
        if self.drafter is None and "tree" in self.model_fields_set:
            raise ValueError("tree has no effect without a drafter: name a drafter, or leave tree out")
        return self

    @property
    def text_settings(self) -> dict[str, JsonValue]:
        """Settings that determine the text and its parts; all others may differ when a run resumes."""
        others = {"target", "output", "batch_tokens", "drafter", "tree", "ray"}
        places = {"num_targets", "cpus_per_target", "gpus_per_target", "threads_per_target"}
        left_out: dict[str, bool | set[str]] = dict.fromkeys(others | places, True)
        settings = self.model_dump(mode="json", exclude=left_out | {"chats": {"max_bad_rows"}})
        return settings | {"dtype": self.target.dtype}
