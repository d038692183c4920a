"""What `pipelines.benchmark peers` measures. Torch-free."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from moray.config import Config

Engine = Literal["moray", "transformers", "llama-cpp", "vllm", "openvino"]
INSTALLED: tuple[Engine, ...] = ("moray", "transformers")
"""Engines that Moray's own environment has; they load a target once for all rows of a dtype."""
PROMPT_LOOKUP = "prompt-lookup"


class PeerConfig(Config):
    """One row: an engine, a number format, and how it drafts."""

    engine: Engine
    """Engine that decodes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations; llama.cpp keeps keys and values in float16 beside bfloat16."""
    drafter: str | None = None
    """null for none, prompt-lookup, or a folder: a trained drafter for moray, a small model for the others."""
    depth: int = Field(default=8, ge=1, le=64)
    """Most tokens drafted per pass; moray decides from cycle to cycle how many of them are worth it."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the way to draft, in tables; null for plain, or the drafter's last part and its depth."""

    @property
    def label(self) -> str:
        """The whole row, for tables and messages."""
        return f"{self.engine} {self.dtype}, {self.drafting}"

    @property
    def drafting(self) -> str:
        """How it drafts."""
        return self.name or ("plain" if self.drafter is None else f"{Path(self.drafter).name}-{self.depth}")


class PeerTargetConfig(Config):
    """The target of all rows; their number formats are their own."""

    model: str
    """Folder of a Hugging Face model, its hub name, or a GGUF file of the Llama family."""
    template: str | None = None
    """Chat template: a jinja file, or plain for none at all; null for the tokenizer's own."""


class PeersBenchmarkConfig(Config):
    """Which engines to measure side by side, on what, and where they are installed."""

    target: PeerTargetConfig
    peers: tuple[PeerConfig, ...] = Field(min_length=1)
    """Rows of the table. Text is compared with that of the first row of engine transformers, plain, of its dtype."""
    questions: str
    """File of questions, as for pipelines.evaluate; of several turns the first is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of questions to ask, one of each category in turn; null for all."""
    max_new_tokens: int = Field(default=80, ge=1)
    """Most tokens of an answer."""
    threads: int = Field(default=2, ge=1)
    """Number of threads of every engine."""
    environments: str = "runs/peers"
    """Folder of virtual environments named after their engines; make peers installs them."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Longest time an engine may take to load, in seconds; the first start converts the target."""
    answer_seconds: float = Field(default=300.0, gt=0)
    """Longest time an engine may take for one answer, in seconds."""
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
            if peer.engine == "llama-cpp" and peer.drafter not in (None, PROMPT_LOOKUP):
                raise ValueError(
                    f"peers: {peer.label}: llama-cpp-python drafts by {PROMPT_LOOKUP} alone; leave out drafter, or "
                    "write that"
                )
        return self
