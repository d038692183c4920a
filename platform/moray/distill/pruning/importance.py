"""How much each part of a target does to its hidden states, on real text.

Heads and channels: the size of what they add to the residual stream, which is comparable within a layer. Hidden
dimensions: the absolute activations after the norms, as in Minitron (arXiv 2407.14679, section 2.2). Layers: block
influence, 1 - cos(input, output) (ShortGPT, arXiv 2403.03853). All are summed over tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moray.targets.model import Target


@dataclass(frozen=True)
class Importance:
    """Sums over all tokens; only their order means anything."""

    layers: Float[Tensor, " layers"]
    heads: Float[Tensor, "layers heads"]
    channels: Float[Tensor, "layers channels"]
    """Of the MLPs."""
    hidden: Float[Tensor, " hidden"]


@torch.inference_mode()
def measure_importance(
    target: Target, chats: Iterable[Sequence[int]], on_chat: Callable[[], None] = lambda: None
) -> Importance:
    """Run a target, loaded without packed weights, over chats, one after the other."""
    spec = target.spec
    found = Importance(
        torch.zeros(spec.num_layers),
        torch.zeros(spec.num_layers, spec.num_heads),
        torch.zeros(spec.num_layers, spec.intermediate_size),
        torch.zeros(spec.hidden_size),
    )
    hooks = [
        hook
        for number, layer in enumerate(target.model.model.layers)
        for hook in (
            layer.self_attn.o_proj.register_forward_pre_hook(partial(_add_heads, found.heads[number], spec.head_dim)),
            layer.mlp.down_proj.register_forward_pre_hook(partial(_add_channels, found.channels[number])),
            layer.input_layernorm.register_forward_hook(partial(_add_hidden, found.hidden)),
            layer.post_attention_layernorm.register_forward_hook(partial(_add_hidden, found.hidden)),
        )
    ]
    depths = range(-1 - spec.num_layers, 0)
    try:
        for chat in chats:
            tokens = torch.tensor([chat], device=target.device)
            positions = torch.arange(len(chat), device=target.device)[None]
            states = target.forward(tokens, positions, None, target.new_cache(len(chat)), depths).hidden
            for number in range(spec.num_layers - 1):
                last = number - spec.num_layers
                before, after = states[last - 1][0].float(), states[last][0].float()
                found.layers[number] += (1 - torch.cosine_similarity(before, after, dim=-1)).sum().cpu()
            on_chat()
    finally:
        for hook in hooks:
            hook.remove()
    found.layers[-1] = torch.inf  # its output is known only after the final norm; the last layer is always kept
    return found


def _add_heads(total: Tensor, head_dim: int, o_proj: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
    heads = inputs[0][0].float().unflatten(-1, (-1, head_dim)).transpose(0, 1)  # [heads, tokens, head_dim]
    weights = o_proj.weight.float().unflatten(-1, (-1, head_dim)).permute(1, 2, 0)  # [heads, head_dim, hidden]
    total += torch.stack(
        [(head @ weight).norm(dim=-1).sum() for head, weight in zip(heads, weights, strict=True)]
    ).cpu()


def _add_channels(total: Tensor, down_proj: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
    total += (inputs[0][0].float().abs().sum(0) * down_proj.weight.float().norm(dim=0)).cpu()


def _add_hidden(total: Tensor, norm: Any, inputs: Any, normed: Tensor) -> None:
    total += normed[0].float().abs().sum(0).cpu()
