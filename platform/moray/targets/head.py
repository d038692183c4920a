"""The parts of a target that a drafter replica needs: embeddings, the last N layers, final norm, lm_head.

They are shared with a loaded target in the same process, or read from its safetensors: a drafter replica never loads
the whole target. All of it is frozen. Checkpoints never contain it; an export may (see `distill.export.export`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moray.errors import ConfigError, DataError
from moray.targets.kv_cache import KVCache, KVCaches, PastAndPredicted
from moray.targets.loading import (
    TIED,
    UNTIED,
    WeightSource,
    check_stored,
    describe_difference,
    describe_nonfinite,
    hollow_model,
    refuse_target,
)
from moray.targets.model import Target, pick_device
from moray.targets.rotary import RotaryCache, Rotation
from moray.targets.sliding import LayerMasks
from moray.targets.spec import TargetConfig, TargetSpec, read_spec, resolve_folder
from moray.targets.stored import StoredTensor, read_model_config, stored_tensors
from moray.targets.visibility import Visible


def _run(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    return layer(hidden)


class TargetHead:
    """Frozen embeddings, last `num_layers` layers, norm and lm_head of a target."""

    def __init__(self, model: nn.Module, spec: TargetSpec, num_layers: int) -> None:
        if not 0 <= num_layers <= spec.num_layers:
            raise ConfigError(
                f"drafter.target_layers is {num_layers}; the target has {spec.num_layers} layers, so 0 to "
                f"{spec.num_layers} are accepted"
            )
        spec.need_last_layers(num_layers, f"drafter.target_layers {num_layers}")
        whole: Any = model
        self.spec = spec
        self.num_layers = num_layers
        self._embed_tokens = whole.model.embed_tokens
        self._rotary = RotaryCache(whole.model.rotary_emb)
        self._masks = LayerMasks(spec)
        self._layers = list(whole.model.layers)[spec.num_layers - num_layers : spec.num_layers]
        self._norm = whole.model.norm
        self._lm_head = whole.lm_head

    @classmethod
    def of(cls, target: Target, num_layers: int = 0) -> "TargetHead":
        """Share the modules of a loaded target; read those of a tensor-parallel one, whose own are parts, from disk."""
        if target.is_split:
            if num_layers not in target.heads:
                target.heads[num_layers] = cls.load(target.config, num_layers)
            return target.heads[num_layers]
        return cls(target.model, target.spec, num_layers)

    @classmethod
    def load(cls, config: TargetConfig, num_layers: int = 0) -> "TargetHead":
        """Read only the needed tensors of a target from disk.

        Raises:
            ConfigError: a tensor of the target, needed or not, is missing, unexpected or of the wrong shape, or a
                needed one is not finite.
        """
        spec = read_spec(config.model)
        folder = resolve_folder(config.model)
        model_config = read_model_config(folder, config.model)
        stored = stored_tensors(folder)
        device = pick_device(config.device)
        refuse = partial(refuse_target, config.model)
        source = WeightSource(partial(_read, stored, device), getattr(torch, config.dtype), device, refuse)
        model = hollow_model(model_config, source)
        check_stored(stored, model, f"target.model '{config.model}'")
        if model_config.tie_word_embeddings and stored.keys() >= TIED:
            first, second = (source.read(name) for name in TIED)
            if not torch.equal(first, second):
                raise refuse(UNTIED)
        return cls._fill(model, spec, num_layers, source)

    @classmethod
    def outline(cls, config: TargetConfig, num_layers: int = 0) -> "TargetHead":
        """Only shapes, on torch's meta device: enough to build a drafter (also there) and find out what it needs."""
        spec = read_spec(config.model)
        model_config = read_model_config(resolve_folder(config.model), config.model)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, config.dtype))
        return cls(model.eval(), spec, num_layers)

    @classmethod
    def restore(
        cls, model_config: dict[str, Any], spec: TargetSpec, num_layers: int, tensors: dict[str, Tensor]
    ) -> "TargetHead":
        """Rebuild a head from the output of `tensors` and the target's config.json.

        Raises:
            DataError: a tensor is missing, not finite or of the wrong shape.
        """
        others = {key: value for key, value in model_config.items() if key != "model_type"}
        config = AutoConfig.for_model(model_config["model_type"], **others)

        def refuse(problem: str) -> DataError:
            return DataError(f"the target's head in the exported drafter: {problem}; export the drafter again")

        def read(name: str) -> Tensor:
            if name not in tensors:
                raise refuse(f"tensor '{name}' is missing")
            return tensors[name]

        like = read("model.embed_tokens.weight")
        source = WeightSource(read, like.dtype, like.device, refuse)
        return cls._fill(hollow_model(config, source), spec, num_layers, source)

    def tensors(self) -> dict[str, Tensor]:
        """All weights by their names in the target; a tied lm_head is not listed again."""
        is_tied = self._lm_head.weight is self._embed_tokens.weight
        return {
            f"{prefix}.{name}": tensor.detach()
            for prefix, module in self._parts()
            if prefix != "lm_head" or not is_tied
            for name, tensor in module.state_dict().items()
        }

    @classmethod
    def _fill(cls, model: Any, spec: TargetSpec, num_layers: int, source: WeightSource) -> "TargetHead":
        """Fill a model without weights; `source` gives tensors by their names in the target."""
        head = cls(model.eval(), spec, num_layers)
        is_tied = model.config.tie_word_embeddings
        for prefix, module in head._parts():
            if prefix != "lm_head" or not is_tied:
                wanted = {name: tensor.shape for name, tensor in module.state_dict(prefix=f"{prefix}.").items()}
                state = {name: source.read(name).to(source.dtype) for name in wanted}
                found = {name: tensor.shape for name, tensor in state.items()}
                problem = describe_difference(found, wanted) or describe_nonfinite(state.items())
                if problem:
                    raise source.refuse(problem)
                module.load_state_dict({name[len(prefix) + 1 :]: t for name, t in state.items()}, assign=True)
        if is_tied:
            head._lm_head.weight = head._embed_tokens.weight
        for _, module in head._parts():
            module.requires_grad_(False)
        return head

    @property
    def layers(self) -> list[nn.Module]:
        """The target's last `num_layers` layers."""
        return self._layers

    @property
    def norm(self) -> nn.Module:
        """The target's final norm."""
        return self._norm

    @property
    def weight(self) -> Tensor:
        """A frozen weight, for reading device and dtype."""
        return self._lm_head.weight

    def last_layer_weights(self, num_layers: int) -> list[Tensor]:
        """Weights that `run_last_layers` reads for this many layers; none for 0 layers."""
        modules = [*self._last(num_layers), self._norm] if num_layers else []
        return [parameter for module in modules for parameter in module.parameters()]

    def embed(self, tokens: Int[Tensor, "*any"]) -> Float[Tensor, "*any hidden"]:
        """Token embeddings as the target's first layer receives them."""
        return self._embed_tokens(tokens)

    def logits(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any vocab"]:
        """Logits of final-norm hidden states."""
        return self._lm_head(hidden)

    def rotate(
        self, query: Float[Tensor, "batch heads new head_dim"], positions: Int[Tensor, "batch new"]
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Rotate queries as the target rotates its own, so that they match the keys in its cache."""
        return self._rotary.at(query, positions).turn(query)

    def rotation(self, like: Float[Tensor, "batch new hidden"], positions: Int[Tensor, "batch new"]) -> Rotation:
        """The target's rotary tables at these positions, in the dtype of `like`."""
        return self._rotary.at(like, positions)

    def new_cache(self, capacity: int, batch: int = 1, num_layers: int | None = None) -> KVCache:
        """An empty cache for the last `num_layers` layers, or for all layers of the head."""
        spec = self.spec
        layers = range(spec.num_layers - (self.num_layers if num_layers is None else num_layers), spec.num_layers)
        return KVCache(layers, spec.num_kv_heads, spec.head_dim, capacity, batch, self.weight)

    def run_last_layers(
        self,
        hidden: Float[Tensor, "batch new hidden"],
        positions: Int[Tensor, "batch new"],
        mask: Visible | Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None,
        cache: KVCache | KVCaches | PastAndPredicted,
        run: Callable[..., Tensor] = _run,
        num_layers: int | None = None,
    ) -> Float[Tensor, "batch new hidden"]:
        """Target Layer Inference (MoA, section 3.3): the target's last N layers and its final norm.

        As in the target, layers with a sliding window see only the part of `mask` inside it. `run(layer, hidden)` runs
        one layer (see `Drafter.run_block`). N is `num_layers`, or all layers of the head.
        """
        rotary = self._rotary.at(hidden, positions)
        last = self._last(self.num_layers if num_layers is None else num_layers)
        numbers = range(self.spec.num_layers - len(last), self.spec.num_layers)
        for layer, own_mask in zip(last, self._masks.of_pass(numbers, mask, positions, cache), strict=True):
            ready = partial(
                layer,
                attention_mask=own_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
            hidden = run(ready, hidden)
        return self._norm(hidden)

    def _last(self, num_layers: int) -> list[nn.Module]:
        return self._layers[self.num_layers - num_layers :]

    def _parts(self) -> list[tuple[str, nn.Module]]:
        first = self.spec.num_layers - self.num_layers
        parts = [("model.embed_tokens", self._embed_tokens), ("model.norm", self._norm), ("lm_head", self._lm_head)]
        return parts + [(f"model.layers.{first + i}", layer) for i, layer in enumerate(self._layers)]


def _read(stored: Mapping[str, StoredTensor], device: torch.device, name: str) -> Tensor:
    """Read a tensor of a checked checkpoint; tied embeddings may be stored only as the lm_head."""
    there = name if name in stored else "lm_head.weight"
    with safe_open(stored[there].path, framework="pt", device=str(device)) as file:
        return file.get_tensor(there)
