"""Mixture of Attentions as its authors publish it: a folder in their layout drafts what their formulas give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_batches import batch_of
from tiny_targets import TinyTarget, save_chat_target
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from moray.config import validate
from moray.distill.export.config import ImportDrafterConfig
from moray.distill.export.importing import import_drafter
from moray.drafters.base import Drafter
from moray.drafters.checkpoint import load_drafter
from moray.drafters.learner import DraftView
from moray.errors import ConfigError, DataError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

LENGTH = 24
SIZES = {"layer_self_attention": (2, 80), "self_attention": (1, 96), "cross_attention": (2, 112)}
"""Key/value heads and inner width of each layer; all have the target's four heads."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    folder = save_chat_target(tmp_path_factory.mktemp("published") / "target")
    return TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


class Authors(nn.Module):
    """Their drafter: layers of transformers, with the target's base of RoPE everywhere."""

    def __init__(self, config: LlamaConfig, kv_width: int) -> None:
        super().__init__()
        self.layer_self_attention = _layer(config, "layer_self_attention", kv_width, kv_width // 4)
        self.self_attention = _layer(config, "self_attention", config.hidden_size, 16)
        self.cross_attention = _layer(config, "cross_attention", config.hidden_size, 16)
        self.Ekv2E = nn.Linear(kv_width, config.hidden_size)

    def forward(self, kv: Tensor, embedded: Tensor, reach: Tensor) -> Tensor:
        """The hidden states that lm_head reads; position i attends to the memory of tokens up to `reach[i]`."""
        num_layers, seq = kv.shape[1], embedded.shape[1]
        mixed = _run(self.layer_self_attention, kv, torch.zeros(1, 1, num_layers, num_layers))
        memory = self.Ekv2E(mixed.mean(dim=1))[None]
        x = _run(self.self_attention, embedded, torch.full((seq, seq), -torch.inf).triu(1)[None, None])
        layer = self.cross_attention
        attention, normed = layer.self_attn, layer.input_layernorm(memory)
        query = _heads(attention.q_proj(layer.input_layernorm(x)))
        key, value = _heads(attention.k_proj(normed)), _heads(attention.v_proj(normed))
        query, key = apply_rotary_pos_emb(query, key, *_rotation(layer, seq))
        key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
        visible = torch.arange(seq)[None] <= reach[:, None]
        x = x + attention.o_proj(
            F.scaled_dot_product_attention(query, key, value, visible[None, None]).transpose(1, 2).flatten(2)
        )
        return x + layer.mlp(layer.post_attention_layernorm(x))


def _layer(config: LlamaConfig, name: str, width: int, head_dim: int) -> LlamaDecoderLayer:
    num_kv_heads, inner = SIZES[name]
    values = config.to_dict() | {"hidden_size": width, "head_dim": head_dim, "intermediate_size": inner}
    own = LlamaConfig(**values | {"num_key_value_heads": num_kv_heads})
    own._attn_implementation = "eager"
    return LlamaDecoderLayer(own, 0)


def _rotation(layer: LlamaDecoderLayer, length: int) -> tuple[Tensor, Tensor]:
    return LlamaRotaryEmbedding(layer.self_attn.config)(torch.zeros(1), torch.arange(length)[None])


def _run(layer: LlamaDecoderLayer, x: Tensor, mask: Tensor) -> Tensor:
    found = layer(x, attention_mask=mask, position_embeddings=_rotation(layer, x.shape[1]))
    return found if isinstance(found, Tensor) else found[0]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 16)).transpose(1, 2)


def published(tiny: TinyTarget, folder: Path, *, is_converted: bool = False) -> Authors:
    """A drafter with random weights, saved as trained, or as converted for vLLM."""
    config = LlamaConfig.from_pretrained(tiny.folder)
    torch.manual_seed(1)
    drafter = Authors(config, tiny.target.spec.kv_width)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1))
    described: dict[str, Any] = config.to_dict() | {"architectures": ["MOASpec"]}
    if is_converted:
        for key in ("num_hidden_layers", "num_key_value_heads", "intermediate_size", "attention_bias"):
            described.pop(key)
        described |= {"model_type": "moa_spec", "architectures": ["MOASpecModel"], "disable_LSA": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described, default=str))
    save_file(drafter.state_dict(), folder / "model.safetensors")
    return drafter


def imported(tiny: TinyTarget, source: Path, output: Path, target_layers: int | None = 0) -> Drafter:
    values = {"source": str(source), "target": {"model": str(tiny.folder)}, "output": str(output)}
    import_drafter(validate(ImportDrafterConfig, values | {"target_layers": target_layers}))
    fingerprint = ChatTokenizer.load(str(tiny.folder)).fingerprint
    return load_drafter(output, TargetHead.of(tiny.target, target_layers or 0), fingerprint)


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_released_moa_drafts_what_its_formulas_give(tiny, tmp_path, is_converted):
    theirs = published(tiny, tmp_path / "released", is_converted=is_converted)
    ours = imported(tiny, tmp_path / "released", tmp_path / "imported")
    tokens = torch.tensor(tiny.prompt(1, LENGTH))
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager")
    start = (torch.arange(LENGTH) // 6 * 6 - 1).clamp(min=0)
    batch = batch_of(tiny.target, [tokens.tolist()], 6, ours.needs)
    with torch.no_grad():
        cache = model(tokens[None], use_cache=True).past_key_values
        pairs = [torch.cat([layer.keys, layer.values], dim=-1) for layer in cache.layers]
        kv = torch.stack([pair[0].transpose(0, 1).flatten(1) for pair in pairs], dim=1)
        logits = model.get_output_embeddings()(theirs(kv, model.get_input_embeddings()(tokens[None]), start))[0]
        (prediction,) = ours(batch, DraftView(start[None], None)).predictions
        found = prediction.score(prediction.hidden[0])
    torch.testing.assert_close(found, logits, atol=2e-4, rtol=1e-4)


def test_a_released_moa_that_runs_layers_of_the_target_is_read(tiny, tmp_path):
    published(tiny, tmp_path / "released")
    drafter = imported(tiny, tmp_path / "released", tmp_path / "imported", target_layers=1)
    assert drafter.config.target_layers == 1
    assert drafter.feature_scale == 1
    assert drafter.config.layer_rope_theta == tiny.target.spec.rope_theta


def test_a_released_moa_that_does_not_fit_is_refused(tiny, tmp_path):
    drafter = published(tiny, tmp_path / "released")
    with pytest.raises(ConfigError, match=r"does not say how many of .* give target_layers=N, 0 if it runs none"):
        imported(tiny, tmp_path / "released", tmp_path / "out", target_layers=None)
    state = drafter.state_dict()
    for name, change, message in (
        (
            "layer_self_attention.",
            None,
            r"has no tensors layer_self_attention\.\*, and MoA without layer self-attention",
        ),
        ("self_attention.self_attn.q_proj.bias", torch.zeros(64), "has tensor 'self_attention.self_attn.q_proj.bias'"),
        ("self_attention.self_attn.q_proj.weight", torch.zeros(32, 64), r"has q_proj \(32, 64\) and k_proj \(16, 64\)"),
        ("Ekv2E.bias", None, "has no tensor 'Ekv2E.bias'"),
    ):
        changed = {key: tensor for key, tensor in state.items() if change is not None or not key.startswith(name)}
        save_file(changed | ({} if change is None else {name: change}), tmp_path / "released" / "model.safetensors")
        with pytest.raises(DataError, match=message):
            imported(tiny, tmp_path / "released", tmp_path / "out")
