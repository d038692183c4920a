"""Configuration of every drafter, and the tagged union that is the registry.

Torch-free, so that a misspelt key is answered before torch is loaded; each configuration names the module
that builds it. A variant costs its class here, one module, one YAML.
"""

import importlib
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, model_validator

from moray.config import Config

if TYPE_CHECKING:
    from moray.drafters.base import Drafter
    from moray.targets.head import TargetHead


class BlockConfig(Config):
    """Sizes of one decoder layer of a drafter."""

    num_heads: int = Field(ge=1)
    """Number of query heads."""
    num_kv_heads: int = Field(ge=1)
    """Number of key/value heads; must divide num_heads."""
    intermediate_size: int = Field(ge=1)
    """Inner width of the MLP, in elements."""

    @model_validator(mode="after")
    def _check(self) -> "BlockConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class DrafterConfigBase(Config):
    """What all drafters' configurations have in common."""

    has_weights: ClassVar[bool] = True
    """Whether there is anything to hold and to compute that would be worth a process of its own."""

    def build(self, head: "TargetHead") -> "Drafter":
        """A freshly initialised drafter for the target that `head` belongs to."""
        module_name, class_name = self.implementation()
        return getattr(importlib.import_module(module_name), class_name)(self, head)

    def implementation(self) -> tuple[str, str]:
        """Module and class of the drafter."""
        raise NotImplementedError

    @property
    def num_target_layers(self) -> int:
        """How many of the target's last layers the drafter runs itself."""
        return 0

    @property
    def efforts(self) -> tuple[int, ...]:
        """How many of them in a draft step, cheapest first: what is chosen from in every cycle. Most know one way."""
        return (self.num_target_layers,)

    @property
    def max_depth(self) -> int | None:
        """Most levels that the drafter can draft; None for any number."""
        return None

    @property
    def verified_period(self) -> tuple[int, int] | None:
        """T-step training: a response position counts as verified every P tokens, P uniform over low..high-1.
        None: every position is predicted from the one before it."""
        return None

    @property
    def num_draft_tokens(self) -> int | None:
        """How many of the target's tokens the drafter may propose; None for all."""
        return None

    @property
    def predicts_features(self) -> bool:
        """Whether it predicts hidden states of the target, for `losses.feature` to compare."""
        return False


class TrainableBase(DrafterConfigBase):
    """Drafters that are distilled and score tokens with a vocabulary projection."""

    draft_vocab_size: int | None = Field(default=None, ge=2)
    """Number of tokens that may be proposed, the most frequent in the cache's responses; null for all. With a large
    vocabulary the projection is most of the cost of a draft step."""

    @property
    def num_draft_tokens(self) -> int | None:
        return self.draft_vocab_size


class LayeredBase(TrainableBase):
    """Trainable drafters made of decoder layers."""

    norm_init: Literal["ones", "normal"] = "ones"
    """Initial RMSNorm weights: ones, or normal, drawn from N(0, 0.02) as MoA's code does, at a cost in tau."""


class MoABase(LayeredBase):
    """What is the same for one N of Target Layer Inference and for several."""

    mask_width: tuple[int, int] = (5, 15)
    """Bounds low, high of P: in training a position is verified every P tokens, low <= P < high. The paper calls P T.
    P is drawn uniformly from low to high - 1."""
    staircase: bool = True
    """Curriculum on self-attention: early on, some sequences see no token before the last verified one."""
    layer_stride: int = Field(default=1, ge=1)
    """Layer self-attention reads every n-th layer of the target, counted from the last; 1 for all."""
    layer_self_attention: BlockConfig
    """Sizes of the layer that attends over the target's layers, at every token."""
    self_attention: BlockConfig
    """Sizes of the layer in which drafted tokens attend to the tokens before them."""
    cross_attention: BlockConfig
    """Sizes of the layer that attends to what the target computed of verified tokens."""

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
    """Target layers, the last ones, that the drafter runs itself: N of Target Layer Inference; 0 for none."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.moa.moa", "MoA"

    @property
    def num_target_layers(self) -> int:
        return self.target_layers


class DynamicMoAConfig(MoABase):
    """Mixture of Attentions trained for several N at once (arXiv 2410.03804 leaves it to future work)."""

    type: Literal["dynamic-moa"]
    target_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    """Every number of last target layers that the drafter can run itself, ascending. N of Target Layer Inference: one
    of them is drawn per training sequence, and one chosen per cycle while decoding."""

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
    def efforts(self) -> tuple[int, ...]:
        return self.target_layers


class EagleConfig(LayeredBase):
    """EAGLE (arXiv 2401.15077); with a dynamic tree it is EAGLE-2 (arXiv 2406.16858)."""

    type: Literal["eagle"]
    layer: BlockConfig
    """Sizes of each decoder layer of the drafter."""
    feature_noise: float = Field(default=0.2, ge=0)
    """Width of the uniform noise on the target's features in training, in their own unit; 0 for none. U(-noise / 2,
    noise / 2). The released code also multiplies by 512 / length, which would drown the features of short chats."""
    ttt_steps: int = Field(default=1, ge=1, le=16)
    """Draft steps that training unrolls on the drafter's own features; 1 for none, as published. Training-time test
    (arXiv 2503.01840, section 3.1; arXiv 2408.15766): a step costs about as much as the first."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.eagle", "Eagle"

    @property
    def predicts_features(self) -> bool:
        return True


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

    @property
    def verified_period(self) -> tuple[int, int]:
        return self.block_size + 1, self.block_size + 2  # the verified position, then a block to predict


class MedusaConfig(TrainableBase):
    """Medusa (arXiv 2401.10774): one head per step ahead, all on the last hidden state."""

    type: Literal["medusa"]
    num_heads: int = Field(default=5, ge=1, le=16)
    """Number of heads, one for each token ahead."""
    num_blocks: int = Field(default=1, ge=1)
    """Residual SiLU blocks of a head."""
    projections: Literal["own", "frozen"] = "own"
    """Vocabulary projections: own, one trained per head from the target's lm_head, or frozen, all share it. "own" is as
    published."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Base of the heads' weights: the loss of head k counts in proportion to decay^k. All heads together count 1."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.medusa", "Medusa"

    @property
    def max_depth(self) -> int:
        return self.num_heads


class IndependentConfig(LayeredBase):
    """A small causal LM of its own on the target's vocabulary, distilled from it; knows nothing of the target."""

    type: Literal["independent"]
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
    copied need the target's hidden size."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.independent", "Independent"


class ReadyBase(DrafterConfigBase):
    """Drafters that need no training."""

    name: str | None = Field(default=None, min_length=1)
    """Name in tables; null for the type. Needed to measure two of one type."""


class PretrainedConfig(ReadyBase):
    """Any Hugging Face causal LM with the target's tokenizer, as it is."""

    type: Literal["pretrained"]
    model: str
    """Folder of a Hugging Face model with the target's tokenizer, or its hub name."""

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.pretrained", "Pretrained"


class NgramConfig(ReadyBase):
    """Prompt lookup: what followed the last tokens earlier in the text. No training; the floor for all others."""

    has_weights: ClassVar[bool] = False
    type: Literal["ngram"]
    max_ngram: int = Field(default=4, ge=1, le=16)
    """Most tokens that are looked up together."""
    min_ngram: int = Field(default=1, ge=1, le=16)
    """Fewest tokens that must match; below that nothing is proposed."""

    @model_validator(mode="after")
    def _check(self) -> "NgramConfig":
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} must not exceed max_ngram {self.max_ngram}")
        return self

    def implementation(self) -> tuple[str, str]:
        return "moray.drafters.ngram", "Ngram"


class TrainedConfig(Config):
    """A trained drafter where more is to be said of it than its folder."""

    has_weights: ClassVar[bool] = True

    type: Literal["trained"]
    folder: str
    """Folder of the trained drafter."""
    effort: int | None = Field(default=None, ge=0)
    """Target layers that it runs in a draft step, one of those it knows; null lets decoding choose."""
    name: str | None = Field(default=None, min_length=1)
    """Name in tables; null for that of the folder. Needed to measure one drafter in two ways."""


TrainableConfig = Annotated[
    MoAConfig | DynamicMoAConfig | EagleConfig | GlideConfig | MedusaConfig | IndependentConfig,
    Field(discriminator="type"),
]
"""What `pipelines.distill` trains."""

ReadyConfig = Annotated[PretrainedConfig | NgramConfig, Field(discriminator="type")]
"""What needs no training."""

UsableConfig = Annotated[PretrainedConfig | NgramConfig | TrainedConfig, Field(discriminator="type")]
"""What can be evaluated; a trained drafter of which nothing else is to be said is named by its folder alone."""

DrafterConfig = Annotated[TrainableConfig | ReadyConfig, Field(discriminator="type")]
"""The tagged union of all drafters."""

DRAFTER_CONFIG: TypeAdapter[DrafterConfig] = TypeAdapter(DrafterConfig)
