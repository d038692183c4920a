"""Configuration of `pipelines.benchmark peers`. Torch-free."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from moray.config import Config

Engine = Literal["moray", "transformers", "llama-cpp", "vllm", "openvino"]
INSTALLED: tuple[Engine, ...] = ("moray", "transformers")
"""Engines that are installed in Moray's own environment; they load a target once for all rows of a dtype."""
PROMPT_LOOKUP = "prompt-lookup"


class PeerConfig(Config):
    """One row of the comparison: an engine, a number format and a way to draft."""

    engine: Engine
    """Engine that decodes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations; with bfloat16, llama.cpp's KV cache is float16."""
    drafter: str | None = None
    """null for none, prompt-lookup, or the folder of a drafter. For moray a trained one, for the others an exported
    one or a small model."""
    depth: int = Field(default=8, ge=1, le=64)
    """Maximum number of tokens drafted per pass; moray picks the actual number in each cycle if `adaptive`."""
    adaptive: bool = True
    """Whether moray chooses how many tokens to draft; false always drafts `depth`, as the other engines do. Only moray
    reads it."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the way to draft, for tables; null for plain, or the drafter's last part and its depth."""

    @property
    def label(self) -> str:
        """Name of the row, for tables and messages."""
        return f"{self.engine} {self.dtype}, {self.drafting}"

    @property
    def drafting(self) -> str:
        """Name of the way to draft."""
        return self.name or ("plain" if self.drafter is None else f"{Path(self.drafter).name}-{self.depth}")


class PeerTargetConfig(Config):
    """The target of all rows; each row has its own number format."""

    model: str
    """Folder of a Hugging Face model, its hub name, or a GGUF file of the Llama family."""
    template: str | None = None
    """Chat template: a jinja file, or plain for no template; null for the tokenizer's own."""


class PeersBenchmarkConfig(Config):
    """The engines to compare, on which questions, and where they are installed."""

    target: PeerTargetConfig
    peers: tuple[PeerConfig, ...] = Field(min_length=1)
    """Rows of the table. Texts are compared with the first plain row of engine transformers with the same dtype."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=80, ge=1)
    """Maximum number of tokens per answer."""
    threads: int = Field(default=2, ge=1)
    """Number of threads per engine."""
    environments: str = "runs/peers"
    """Folder of virtual environments, one per engine and named after it; make peers installs them."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Time limit for an engine to load, in seconds; the first start also converts the target."""
    answer_seconds: float = Field(default=300.0, gt=0)
    """Time limit for one answer, in seconds."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""
    html: str | None = None
    """HTML page to write, with a plot; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "PeersBenchmarkConfig":
        labels = [peer.label for peer in self.peers]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice:
            raise ValueError(f"peers holds '{twice}' twice; leave one out, or give them a `name`")
        for peer in self.peers:
            if peer.engine != "moray" and not peer.adaptive:
                raise ValueError(f"peers: {peer.label}: adaptive is false, which only moray reads; leave it out")
            if peer.engine == "llama-cpp" and peer.drafter not in (None, PROMPT_LOOKUP):
                raise ValueError(
                    f"peers: {peer.label}: llama-cpp-python drafts by {PROMPT_LOOKUP} alone; leave out drafter, or "
                    "write that"
                )
        return self
