"""Configuration of `pipelines.export`. Torch-free."""

from typing import Literal

from pydantic import Field

from moray.config import Config
from moray.targets.spec import TargetConfig


class ExportConfig(Config):
    """A trained drafter, and the folder to export it to."""

    drafter: str
    """Folder of a finished run, or of one of its checkpoints."""
    target: TargetConfig
    """The target that the drafter was trained for; its dtype is that of the head."""
    output: str
    """Folder to write; an existing export of the same drafter is replaced."""
    format: Literal["moray", "hf"] = "moray"
    """Layout: moray for drafter replicas, hf for other engines (eagle3, eagle, medusa, independent)."""
    include_head: bool = True
    """Also write the target's frozen parts: embeddings, the last layers, norm and lm_head. A drafter replica needs
    them; other engines (format hf) have the target."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of all weights; null keeps the drafter's as trained, the head's as target.dtype."""
    license: str | None = Field(default=None, min_length=1)
    """Licence for the model card, as the hub names it; null for none. The target's licence may apply to you, because
    the head is part of it."""
    base_model: str | None = Field(default=None, min_length=1)
    """Hub name of the target for the model card; null for target.model if that is a hub name."""
    report: str | None = None
    """File report.json of an evaluation, for the model card; null looks next to the drafter. It must be of these
    weights."""


class ImportDrafterConfig(Config):
    """A drafter that others have published, and the target that it was trained for."""

    source: str
    """Folder with a config.json and weights: EAGLE, EAGLE-3, Medusa, MoA, or a Llama model."""
    target_layers: int | None = Field(default=None, ge=0)
    """N of a MoA drafter, the number of the target's last layers that it runs; null for other drafters. Its folder does
    not say it."""
    target: TargetConfig
    """The target that it drafts for; it must have the target's sizes."""
    output: str
    """Folder of the drafter to write."""
