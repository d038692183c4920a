"""The parts of a target that a drafter replica holds: embeddings, the last N layers, final norm, lm_head.

Shared with a loaded target in the same process, or read alone from its safetensors: a drafter replica
never loads the whole target. All of it is frozen and none of it is ever saved with a drafter.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moray.errors import ConfigError, DataError
from moray.targets.attention import attention_backend
from moray.targets.kv_cache import KVCache, KVCaches, PastAndPredicted
from moray.targets.model import Target, pick_device
from moray.targets.rotary import RotaryCache
from moray.targets.sliding import LayerMasks
from moray.targets.spec import TargetConfig, TargetSpec, read_spec, resolve_folder
from moray.targets.visibility import Visible


def _run(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    return layer(hidden)


class TargetHead:
    """Frozen embeddings, last `num_layers` layers, norm and lm_head of a target."""

    def __init__(self, model: nn.Module, spec: TargetSpec, num_layers: int) -> None:
        if not 0 <= num_layers < spec.num_layers:
            raise ConfigError(
                f"drafter.target_layers is {num_layers}; the target has {spec.num_layers} layers, so 0 to "
                f"{spec.num_layers - 1} are accepted"
            )
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
        """Share the modules of a loaded target."""
        return cls(target.model, target.spec, num_layers)

    @classmethod
    def load(cls, config: TargetConfig, num_layers: int = 0) -> "TargetHead":
        """Read only the needed tensors of a target from disk."""
        spec = read_spec(config.model)
        folder = resolve_folder(config.model)
        model_config = AutoConfig.from_pretrained(folder)
        dtype = getattr(torch, config.dtype)
        device = pick_device(config.device)
        weight_map = _weight_map(folder)

        def read(name: str) -> Tensor:
            if name not in weight_map:
                raise ConfigError(f"target.model '{folder}': tensor '{name}' is missing from its safetensors files")
            with _open(folder / weight_map[name], device=str(device)) as file:
                return file.get_tensor(name).to(dtype)

        return cls._fill(model_config, spec, num_layers, read, dtype, device)

    @classmethod
    def outline(cls, config: TargetConfig, num_layers: int = 0) -> "TargetHead":
        """Shapes alone, on torch's meta device: enough to build a drafter (there, too) and learn what it needs."""
        spec = read_spec(config.model)
        model_config = AutoConfig.from_pretrained(resolve_folder(config.model))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, config.dtype))
        return cls(model.eval(), spec, num_layers)

    @classmethod
    def restore(
        cls, model_config: dict[str, Any], spec: TargetSpec, num_layers: int, tensors: dict[str, Tensor]
    ) -> "TargetHead":
        """Rebuild a head from what `tensors` gave and the target's config.json.

        Raises:
            DataError: a tensor is missing.
        """
        others = {key: value for key, value in model_config.items() if key != "model_type"}
        config = AutoConfig.for_model(model_config["model_type"], **others)

        def read(name: str) -> Tensor:
            if name not in tensors:
                raise DataError(f"tensor '{name}' of the target's head is missing: export the drafter again")
            return tensors[name]

        like = read("model.embed_tokens.weight")
        return cls._fill(config, spec, num_layers, read, like.dtype, like.device)

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its name in the target, once: a tied lm_head is its embeddings."""
        is_tied = self._lm_head.weight is self._embed_tokens.weight
        return {
            f"{prefix}.{name}": tensor.detach()
            for prefix, module in self._parts()
            if prefix != "lm_head" or not is_tied
            for name, tensor in module.state_dict().items()
        }

    @classmethod
    def _fill(
        cls,
        model_config: Any,
        spec: TargetSpec,
        num_layers: int,
        read: Callable[[str], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "TargetHead":
        """A head whose tensors `read` gives by their names in the target."""
        backend = attention_backend(device.type)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=backend)
        # The rotary tables are no weights: they are computed, and a meta device cannot hold them.
        model.model.rotary_emb = type(model.model.rotary_emb)(model_config).to(device)
        head = cls(model.eval(), spec, num_layers)
        for prefix, module in head._parts():
            if prefix != "lm_head" or not model_config.tie_word_embeddings:
                state = {name: read(f"{prefix}.{name}") for name in module.state_dict()}
                module.load_state_dict(state, assign=True)
        if model_config.tie_word_embeddings:
            head._lm_head.weight = head._embed_tokens.weight
        for _, module in head._parts():
            module.requires_grad_(False)
        return head

    @property
    def weight(self) -> Tensor:
        """A frozen weight, to read device and dtype from."""
        return self._lm_head.weight

    def last_layer_weights(self, num_layers: int) -> list[Tensor]:
        """Weights that `run_last_layers` reads for so many layers; none without layers."""
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
        """Turn queries as the target turns its own, so that they meet the keys in its cache."""
        cos, sin = self._rotary.at(query, positions)
        first, second = query.chunk(2, dim=-1)
        return query * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    def new_cache(self, capacity: int, batch: int = 1, num_layers: int | None = None) -> KVCache:
        """An empty cache for the last `num_layers` layers alone, or for all that are here."""
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

        Layers with a sliding window see of `mask` what lies within it, as they do in the target.
        `run(layer, hidden)` runs one layer (see `Drafter.run_block`). N is `num_layers`, or all that are here.
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


@contextmanager
def _open(path: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"target.model: '{path}' cannot be read: {' '.join(str(error).split())}") from None


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            names.update(dict.fromkeys(file.keys(), path.name))
    return names
