"""The target: a Hugging Face causal LM with its own weights, run with our masks, positions and cache.

On a CPU, the layers of a large model compute in fused operations (see `targets.fused_layer`).

Everything that a drafter may read leaves this module as taps. It does not know drafters, trees or sampling.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from moray.errors import ConfigError
from moray.targets.attention import attention_backend
from moray.targets.fused_layer import fuse_layers, pack_layers
from moray.targets.huge_pages import move_to_huge_pages
from moray.targets.kernels.choice import choose_kernels, memory_shortage, stay_in_cache
from moray.targets.kernels.kinds import PLAIN, Kernels
from moray.targets.kernels.weights import PackedLinear, linear_weights
from moray.targets.kv_cache import KVCache
from moray.targets.loading import load_causal_lm
from moray.targets.rotary import RotaryCache
from moray.targets.sliding import LayerMasks
from moray.targets.spec import TargetConfig, TargetSpec, read_spec, resolve_folder

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetOutput:
    """Hidden states of one forward pass: `last` after the final norm, `hidden` by depth (-1-N)."""

    last: Float[Tensor, "batch new hidden"]
    hidden: dict[int, Float[Tensor, "batch new hidden"]]
    routes: Bool[Tensor, "layers batch new"] | None = None
    """Of a sparse target: which tokens have run through which layer."""
    selected: list[int] | None = None
    """Which of the new tokens went on at the layer where some were dropped; None if none could be."""


class Target:
    """A frozen LLM whose output must not change."""

    def __init__(
        self, model: nn.Module, spec: TargetSpec, eos_ids: tuple[int, ...], config: TargetConfig | None = None
    ) -> None:
        """
        Args:
            model: a causal LM of transformers.
            spec: sizes of the model.
            eos_ids: token ids that end an answer.
            config: the settings it was loaded with; None for a model built in memory.
        """
        self.model: Any = model.eval().requires_grad_(False)
        self.spec = spec
        self.num_kv_heads = spec.num_kv_heads
        """Key/value heads in this process."""
        self._config = config
        self.heads: dict[int, Any] = {}
        """Of a split target: the parts that drafters read, by the number of layers (see `TargetHead.of`)."""
        self.eos_ids = eos_ids
        self.device: torch.device = self.model.lm_head.weight.device
        self.dtype: torch.dtype = self.model.lm_head.weight.dtype
        self._rotary = RotaryCache(self.model.model.rotary_emb)
        self._masks = LayerMasks(spec)
        self.kernels: Kernels | None = None
        """Which kernels compute its linear layers; None if that was not chosen."""
        self._read_in_full: list[Tensor] = []
        """The weights of fused layers and of lm_head; empty until they are fused."""

    @classmethod
    def load(cls, config: TargetConfig, field: str = "target.model", *, packs: bool = True) -> "Target":
        """Load the weights in `config.dtype` onto `config.device`; errors call the model `field`.

        `packs` makes small passes faster on a CPU: layers are fused, weights move to huge pages, and those for which it
        pays are packed (see `targets.kernels`). It takes seconds and gains nothing in passes of hundreds of
        tokens: caching does without.

        Raises:
            ConfigError: the model does not exist, its family is not supported, the device is not there, or the weights
                are not the model's (see `targets.loading`).
        """
        if config.tensor_parallel > 1:
            from moray.targets.parallel.loading import load_parallel

            return load_parallel(config, packs=packs)
        spec = read_spec(config.model, field=field)
        device = pick_device(config.device)
        dtype, attention = getattr(torch, config.dtype), attention_backend(device.type)
        model = load_causal_lm(config.model, dtype, device, attention, field)
        eos_ids = read_eos_ids(config.model, field)
        if spec.routing is None:
            target = cls(model, spec, eos_ids, config)
        else:
            from moray.targets.sparse.routing import load_routers
            from moray.targets.sparse.target import SparseTarget

            folder = resolve_folder(config.model)
            target = SparseTarget(model, spec, eos_ids, load_routers(folder, spec, field), folder)
        if packs and device.type == "cpu" and (kernels := target.fastest_kernels()) is not None:
            target.pack(kernels)
            target.log_kernels()
        return target

    def fastest_kernels(self, num_processes: int = 1) -> Kernels | None:
        """Fuse the layers and measure which kernels are faster for them; None for a small model, which is left as it
        is. Each of `num_processes` processes on this machine will hold as much."""
        weights = linear_weights(self.model)
        if stay_in_cache(weights):
            return None
        if shortage := memory_shortage(weights, num_processes):
            return Kernels(None, f"linear layers: as transformers computes them, because {shortage}")
        return choose_kernels(self.fuse(), num_processes=num_processes)

    def fuse(self) -> list[Tensor]:
        """Fuse the layers and move their weights to huge pages, once; returns the weights that a pass reads in full."""
        if not self._read_in_full:
            head = self.model.lm_head
            head.weight.data = head.weight.data.clone()  # not pages of the model's file
            self._read_in_full = [*fuse_layers(self.model), head.weight.data]
            self.model.lm_head = PackedLinear(head, PLAIN)
            move_to_huge_pages()
        return self._read_in_full

    def pack(self, kernels: Kernels) -> None:
        """Compute with these kernels, if the layers are fused (see `fuse`)."""
        self.kernels = kernels
        if self.is_fused:
            pack_layers(self.model, kernels)
            self.model.lm_head.pack(kernels)
        if kernels.are_packed:
            move_to_huge_pages()

    @property
    def is_fused(self) -> bool:
        """Whether its layers compute in joined operations."""
        return bool(self._read_in_full)

    def log_kernels(self) -> None:
        """Log one line that says which kernels were chosen; nothing for a small model, for which nothing is measured.
        A command prints the line only for targets that it loads in its own process."""
        if self.kernels is not None and self.kernels.reason:
            _LOGGER.info("target %s: %s", self.config.model, self.kernels.reason)

    @property
    def config(self) -> TargetConfig:
        """What it was loaded from."""
        assert self._config is not None, "this target was not loaded from a configuration"
        return self._config

    @property
    def is_split(self) -> bool:
        """Whether other processes hold parts of its layers; its modules must then not be called directly."""
        return False

    def check_ranks(self) -> None:
        """Raise `RankError` if a process that holds a part of this target has ended."""

    def make_cache(self, kind: type[Any], *args: Any) -> Any:
        """Build a cache, `kind(target, *args)`. On a split target every rank builds one, and calls on the result reach
        all of them."""
        return kind(self, *args)

    def new_cache(self, capacity: int, batch: int = 1) -> Any:
        """An empty `KVCache` for `capacity` slots per sequence."""
        return self.make_cache(_WholeCache, capacity, batch)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        mask: Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None,
        cache: Cache,
        hidden_depths: Sequence[int] = (),
    ) -> TargetOutput:
        """Run `new` tokens after the cache's committed slots; their keys and values stay uncommitted.

        Args:
            tokens: token ids.
            positions: rotary positions, which need not match the slots.
            mask: True (or 0 in an additive mask) where a token (row) sees a slot (column); slots = cache.length + new.
                None: a single new token sees every slot; if there are several, the cache must be empty, and each sees
                itself and those before it, without a mask in memory. Layers with a sliding window see only the last
                part of it.
            cache: a `KVCache`, or another that receives the keys and values of the new tokens and, for a target with
                sliding windows, knows their positions (see `targets.sliding`).
            hidden_depths: negative depths to return as well (-1 = after the final norm).
        """
        return self.run_layers(self.model.model.embed_tokens(tokens), positions, mask, cache, hidden_depths)

    def run_layers(
        self,
        hidden: Float[Tensor, "batch new hidden"],
        positions: Int[Tensor, "batch new"],
        mask: Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None,
        cache: Cache,
        hidden_depths: Sequence[int] = (),
    ) -> TargetOutput:
        """`forward` from embeddings on."""
        model = self.model.model
        rotary = self._rotary.at(hidden, positions)
        masks = self._masks.of_pass(range(self.spec.num_layers), mask, positions, cache)
        kept: dict[int, Tensor] = {}
        for index, (layer, own_mask) in enumerate(zip(model.layers, masks, strict=True)):
            if index - self.spec.num_layers - 1 in hidden_depths:
                kept[index - self.spec.num_layers - 1] = hidden
            hidden = layer.forward(  # not layer(...): calling a module costs 20 us, and there are no hooks
                hidden,
                attention_mask=own_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        last = model.norm(hidden)
        if -1 in hidden_depths:
            kept[-1] = last
        return TargetOutput(last, kept)

    def logits(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any vocab"]:
        """Logits of final-norm hidden states."""
        return self.model.lm_head(hidden)


class _WholeCache(KVCache):
    """A cache of all layers of a target."""

    def __init__(self, target: Target, capacity: int, batch: int) -> None:
        spec, like = target.spec, target.model.lm_head.weight
        super().__init__(range(spec.num_layers), target.num_kv_heads, spec.head_dim, capacity, batch, like)


def rank_device(config: TargetConfig, rank: int) -> torch.device:
    """The device of a rank of a tensor-parallel target: each has a GPU of its own.

    Raises:
        ConfigError: there are too few.
    """
    device = pick_device(config.device)
    if device.type == "cpu":
        return device
    if torch.cuda.device_count() < config.tensor_parallel:
        raise ConfigError(
            f"target.tensor_parallel is {config.tensor_parallel}, but this process sees {torch.cuda.device_count()} "
            f"GPUs: reserve {config.tensor_parallel} (capture.gpus_per_target, or num_gpus in Serve), or lower "
            "target.tensor_parallel"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def pick_device(name: str) -> torch.device:
    """Resolve "auto"; reject a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("target.device is 'cuda' but torch sees no GPU; use 'auto' or 'cpu'")
    return torch.device(name)


def read_eos_ids(model: str, field: str = "target.model") -> tuple[int, ...]:
    """Every id that ends a generation, from generation_config.json, else from config.json."""
    folder = resolve_folder(model, field=field)
    eos = (
        GenerationConfig.from_pretrained(folder).eos_token_id if (folder / "generation_config.json").is_file() else None
    )
    if eos is None:
        from transformers import AutoConfig

        eos = AutoConfig.from_pretrained(folder).eos_token_id
    return tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),)
