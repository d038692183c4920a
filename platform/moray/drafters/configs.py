"""Configuration of every drafter, and the tagged union that is the registry.

Torch-free. A new variant needs a class here, one module and one YAML file; drafters of other packages are found by
`drafters.installed`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Union, get_args

from pydantic import Field, TypeAdapter, model_validator

from moray.config import Config
from moray.drafters.config_base import BlockConfig, LayeredBase, ReadyBase, TrainableBase
from moray.drafters.installed import installed_drafters
from moray.errors import ConfigError

if TYPE_CHECKING:
    from moray.targets.spec import TargetSpec


class MoABase(LayeredBase):
    """Settings shared by MoA with one N of Target Layer Inference and with several."""

    mask_width: tuple[int, int] = (5, 15)
    """Bounds low, high of P: in training, every P-th position is verified, low <= P < high. P is drawn uniformly; the
    paper calls it T."""
    staircase: bool = True
    """Curriculum on self-attention: early on, some sequences see no token before the last verified one."""
    layer_stride: int = Field(default=1, ge=1)
    """Layer self-attention reads every n-th layer of the target, counted from the last; 1 for all."""
    layer_rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding that numbers the target's layers in layer self-attention."""
    layer_self_attention: BlockConfig
    """Sizes of the layer that attends over the target's layers, at every token."""
    self_attention: BlockConfig
    """Sizes of the layer in which drafted tokens attend to the tokens before them."""
    cross_attention: BlockConfig
    """Sizes of the layer that attends to what the target computed for verified tokens."""

    @model_validator(mode="after")
    def _check_width(self) -> "MoABase":
        low, high = self.mask_width
        if not 2 <= low < high:
            raise ValueError(f"mask_width is {list(self.mask_width)}; needed are two numbers with 2 <= low < high")
        return self

    @property
    def verified_period(self) -> tuple[int, int]:
        return self.mask_width

    @property
    def predicts_features(self) -> bool:
        return True


class MoAConfig(MoABase):
    """Mixture of Attentions (arXiv 2410.03804)."""

    type: Literal["moa"]
    target_layers: int = Field(default=0, ge=0)
    """Number of last target layers that the drafter runs itself: N of Target Layer Inference; 0 for none."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.moa.moa", "MoA"

    @property
    def num_target_layers(self) -> int:
        return self.target_layers


class DynamicMoAConfig(MoABase):
    """Mixture of Attentions trained for several N at once (arXiv 2410.03804 leaves it to future work)."""

    type: Literal["dynamic-moa"]
    target_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    """The numbers of last target layers that the drafter can run itself, ascending. They are the N of Target Layer
    Inference: one is drawn per training sequence, and one chosen per cycle in decoding."""

    @model_validator(mode="after")
    def _check_layers(self) -> "DynamicMoAConfig":
        if list(self.target_layers) != sorted(set(self.target_layers)):
            raise ValueError(
                f"target_layers is {list(self.target_layers)}; name each N once, in ascending order, such as [0, 1, 2]"
            )
        return self

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.moa.dynamic_moa", "DynamicMoA"

    @property
    def num_target_layers(self) -> int:
        return self.target_layers[-1]

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return self.target_layers


class EagleConfig(LayeredBase):
    """EAGLE (arXiv 2401.15077); with a dynamic tree it is EAGLE-2 (arXiv 2406.16858)."""

    type: Literal["eagle"]
    layer: BlockConfig
    """Sizes of each decoder layer of the drafter."""
    feature_noise: float = Field(default=0.2, ge=0)
    """Width of the uniform noise on the target's features in training, in the features' unit; 0 for none. U(-noise / 2,
    noise / 2). The released code also multiplies by 512 / length, which would drown the features of short chats."""
    ttt_steps: int = Field(default=1, ge=1, le=16)
    """Draft steps that training unrolls on the drafter's own features; 1 for none, as published. Training-time test
    (arXiv 2503.01840, section 3.1; arXiv 2408.15766): each further step costs about as much as the first."""
    bias: bool = True
    """Whether the layer that joins embedding and feature has a bias. Other engines need false."""
    reads_first_token: bool = True
    """Whether it reads the first token, with zeros for a feature. Other engines need false."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.eagle", "Eagle"

    @property
    def predicts_features(self) -> bool:
        return True


class Eagle3Config(LayeredBase):
    """EAGLE-3 (arXiv 2503.01840): one decoder layer over three hidden states of the target."""

    type: Literal["eagle3"]
    layer: BlockConfig
    """Sizes of the decoder layer, whose attention reads twice the hidden size."""
    hidden_layers: tuple[int, int, int] | None = None
    """After how many of the target's layers it reads hidden states; null for the published numbers. Three ascending
    ones; published are 2, half of the layers, and all but 3. For number k of L, the cache needs the depth k - L - 1 in
    `cache.hidden_depths`."""
    ttt_steps: int = Field(default=7, ge=1, le=16)
    """Draft steps that training unrolls on the drafter's own hidden states (training-time test). Each step costs about
    as much as the first."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.eagle3", "Eagle3"

    def layers_of(self, num_layers: int) -> tuple[int, int, int]:
        """After how many layers it reads hidden states of a target with this many layers.

        Raises:
            ConfigError: the target has too few layers.
        """
        first, middle, last = sorted((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, num_layers // 2)))
        chosen = self.hidden_layers or (first, middle, last)
        if not 0 <= chosen[0] <= chosen[1] <= chosen[2] < num_layers:
            raise ConfigError(
                f"drafter.hidden_layers is {list(chosen)}; give three ascending numbers from 0 to {num_layers - 1} for "
                f"this target of {num_layers} layers"
            )
        return chosen


class GlideConfig(LayeredBase):
    """GLIDE (arXiv 2402.02082): a decoder layer that also attends to the target's last keys and values."""

    type: Literal["glide"]
    layer: BlockConfig
    """Sizes of each decoder layer of the drafter."""
    num_cross_heads: int = Field(ge=1)
    """Query heads of the cross-attention; a multiple of the target's key/value heads."""
    block_size: int = Field(default=5, ge=1)
    """Tokens that training predicts from what the target knew before the first of them."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.glide", "Glide"

    def sizes_for_target_layers(self, spec: "TargetSpec", num_layers: int) -> dict[str, tuple[int, int]]:
        return {**self.layer.sizes_for(spec), "num_cross_heads": (self.num_cross_heads, spec.num_heads)}

    @property
    def verified_period(self) -> tuple[int, int]:
        return self.block_size + 1, self.block_size + 2  # the verified position, then a block to predict


class MedusaConfig(TrainableBase):
    """Medusa (arXiv 2401.10774): one head per step ahead, all on the last hidden state."""

    type: Literal["medusa"]
    num_heads: int = Field(default=5, ge=1, le=16)
    """Number of heads, one for each token ahead."""
    num_blocks: int = Field(default=1, ge=1)
    """Residual SiLU blocks per head."""
    projections: Literal["own", "frozen"] = "own"
    """Vocabulary projections: own, one per head, trained from the target's lm_head, or frozen, shared. "own" is as
    published."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Base of the heads' weights: the loss of head k has a weight in proportion to decay^k. The weights add up to 1."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.medusa", "Medusa"

    @property
    def max_depth(self) -> int:
        return self.num_heads


class IndependentConfig(LayeredBase):
    """A small causal LM on the target's vocabulary, distilled from the target; reads nothing but the text."""

    type: Literal["independent"]
    """Type of drafter: always independent."""
    num_layers: int = Field(default=1, ge=1)
    """Number of decoder layers."""
    hidden_size: int = Field(ge=2)
    """Width of the hidden states, in elements."""
    head_dim: int = Field(ge=2)
    """Width of one attention head, in elements."""
    layer: BlockConfig
    """Sizes of each decoder layer of the drafter."""
    embeddings: Literal["frozen", "copied", "random"] = "random"
    """Token embeddings and lm_head: the target's (frozen), trained from them (copied), or from random. Frozen and
    copied require the target's hidden size."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.independent", "Independent"

    def sizes_for_target_layers(self, spec: "TargetSpec", num_layers: int) -> dict[str, tuple[int, int]]:
        return {
            "num_layers": (self.num_layers, num_layers),
            "hidden_size": (self.hidden_size, spec.hidden_size),
            "head_dim": (self.head_dim, spec.head_dim),
            **self.layer.sizes_for(spec),
        }


class PretrainedConfig(ReadyBase):
    """Any Hugging Face causal LM with the target's tokenizer, unmodified."""

    type: Literal["pretrained"]
    model: str
    """Folder of a Hugging Face model with the target's tokenizer, or its hub name."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.pretrained", "Pretrained"


class NgramConfig(ReadyBase):
    """Prompt lookup: proposes what followed the last tokens earlier in the text. No training; the baseline for all
    others."""

    has_weights: ClassVar[bool] = False
    type: Literal["ngram"]
    max_ngram: int = Field(default=4, ge=1, le=16)
    """Maximum number of tokens that are looked up together."""
    min_ngram: int = Field(default=1, ge=1, le=16)
    """Minimum number of tokens that must match; below that nothing is proposed."""

    @model_validator(mode="after")
    def _check(self) -> "NgramConfig":
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} must not exceed max_ngram {self.max_ngram}")
        return self

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.ngram", "Ngram"


class TrainedConfig(Config):
    """A trained drafter, for when more than its folder has to be given."""

    has_weights: ClassVar[bool] = True

    type: Literal["trained"]
    folder: str
    """Folder of the trained drafter."""
    num_target_layers: int | None = Field(default=None, ge=0)
    """Target layers to run in a draft step, one of those it was trained for; null lets decoding choose."""
    name: str | None = Field(default=None, min_length=1)
    """Name in tables; null for that of the folder. Required to measure one drafter in two ways."""

    renamed: ClassVar[Mapping[str, str]] = {"effort": "num_target_layers"}


if TYPE_CHECKING:
    Trainable = (
        MoAConfig | DynamicMoAConfig | EagleConfig | Eagle3Config | GlideConfig | MedusaConfig | IndependentConfig
    )
    Ready = PretrainedConfig | NgramConfig
else:
    _TRAINABLE = (MoAConfig, DynamicMoAConfig, EagleConfig, Eagle3Config, GlideConfig, MedusaConfig, IndependentConfig)
    _OWN = (*_TRAINABLE, PretrainedConfig, NgramConfig, TrainedConfig)
    _INSTALLED = installed_drafters([get_args(own.model_fields["type"].annotation)[0] for own in _OWN])
    Trainable = Union[(*_TRAINABLE, *(own for own in _INSTALLED if issubclass(own, TrainableBase)))]
    Ready = Union[(PretrainedConfig, NgramConfig, *(own for own in _INSTALLED if issubclass(own, ReadyBase)))]

TrainableConfig = Annotated[Trainable, Field(discriminator="type")]
"""What `pipelines.distill` trains."""

ReadyConfig = Annotated[Ready, Field(discriminator="type")]
"""Drafters that need no training."""

UsableConfig = Annotated[Ready | TrainedConfig, Field(discriminator="type")]
"""What can be evaluated; a trained drafter that needs no other settings is given by its folder alone."""

DrafterConfig = Annotated[TrainableConfig | ReadyConfig, Field(discriminator="type")]
"""The tagged union of all drafters."""

DRAFTER_CONFIG: TypeAdapter[DrafterConfig] = TypeAdapter(DrafterConfig)


def drafter_name(entry: str | UsableConfig) -> str:
    """The drafter's name in tables: the one given, else that of its folder or its type."""
    if isinstance(entry, str):
        return Path(entry).name
    return entry.name or (Path(entry.folder).name if isinstance(entry, TrainedConfig) else entry.type)
