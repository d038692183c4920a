"""Pruning: the result has the asked shape, computes what the target computes without the parts that are cut away, and
keeps what matters."""

import numpy as np
import pytest
import torch
from tiny_targets import load_target
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moray.config import validate
from moray.distill.pruning.config import PruneConfig
from moray.distill.pruning.importance import measure_importance
from moray.distill.pruning.prune import check_prunable, prune
from moray.drafters.checkpoint import load_drafter
from moray.drafters.published.independent import write
from moray.errors import ConfigError
from moray.targets.head import TargetHead

WHOLE = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chats(tiny):
    return [tiny.prompt(seed, 24) for seed in range(3)]


def config(tiny, output, layer=WHOLE, num_layers=4, hidden_size=64, **others) -> PruneConfig:
    shape = {"type": "independent", "num_layers": num_layers, "hidden_size": hidden_size, "head_dim": 16}
    drafter = shape | {"layer": layer, "embeddings": "random"} | others.pop("drafter", {})
    target = {"model": str(tiny.folder), "device": "cpu"}
    return validate(
        PruneConfig, {"target": target, "drafter": drafter, "activations": "-", "output": str(output)} | others
    )


def pruned(tiny, chats, tmp_path, **shape):
    """The drafter, as an ordinary Llama model that our code does not run."""
    settings = config(tiny, tmp_path / "pruned", **shape)
    check_prunable(settings)
    layers = prune(settings, chats, torch.ones(97, dtype=torch.long), "text")
    drafter = load_drafter(tmp_path / "pruned", TargetHead.of(tiny.target), "text")
    published = write(drafter)
    model = LlamaForCausalLM(LlamaConfig(**published.config)).eval()
    model.load_state_dict(published.tensors)
    return layers, drafter, model


def logits(model, chats) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(chats)).logits


def test_nothing_cut_away_is_the_target(tiny, chats, tmp_path):
    layers, _, model = pruned(tiny, chats, tmp_path)
    assert layers == (0, 1, 2, 3)
    torch.testing.assert_close(logits(model, chats), logits(AutoModelForCausalLM.from_pretrained(tiny.folder), chats))


def test_what_is_cut_away_is_as_if_it_were_zero(tiny, chats, tmp_path):
    shape = {"num_heads": 1, "num_kv_heads": 1, "intermediate_size": 40}
    layers, _, model = pruned(tiny, chats, tmp_path, layer=shape, num_layers=3)
    masked = AutoModelForCausalLM.from_pretrained(tiny.folder).eval()
    importance = measure_importance(tiny.target, chats)
    masked.model.layers = torch.nn.ModuleList(masked.model.layers[number] for number in layers)
    for index, number in enumerate(layers):
        layer = masked.model.layers[index]
        layer.self_attn.layer_idx = index
        channels = importance.channels[number].argsort(descending=True)[40:]
        head = int(importance.heads[number].argmax())
        others = [slice(16 * other, 16 * other + 16) for other in range(4) if other != head]
        with torch.no_grad():
            layer.mlp.down_proj.weight[:, channels] = 0
            for other in others:
                layer.self_attn.o_proj.weight[:, other] = 0
    masked.config.num_hidden_layers = 3
    torch.testing.assert_close(logits(model, chats), logits(masked, chats), atol=1e-5, rtol=1e-5)


def test_the_shape_is_exactly_what_was_asked_for(tiny, chats, tmp_path):
    shape = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 24}
    _, drafter, model = pruned(
        tiny, chats, tmp_path, layer=shape, num_layers=2, hidden_size=48, drafter={"draft_vocab_size": None}
    )
    assert model.model.embed_tokens.weight.shape == (97, 48)
    assert drafter.blocks[0].mlp.down.weight.shape == (48, 24)
    assert drafter.blocks[0].attention.qkv_proj.weight.shape == ((2 + 2 * 2) * 16, 48)
    assert np.isfinite(logits(model, chats).numpy()).all()


def test_a_dead_channel_head_and_layer_are_cut_away_first(tmp_path, chats):
    tiny = load_target(tmp_path / "target")
    layers = tiny.target.model.model.layers
    with torch.no_grad():
        layers[1].mlp.down_proj.weight[:, 7] = 0
        layers[1].self_attn.o_proj.weight[:, 32:48] = 0
        layers[2].mlp.down_proj.weight.zero_()
        layers[2].self_attn.o_proj.weight.zero_()
    found = measure_importance(tiny.target, chats)
    assert int(found.channels[1].argmin()) == 7
    assert int(found.heads[1].argmin()) == 2
    assert int(found.layers.argmin()) == 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_layers": 5}, r"drafter.num_layers is 5, and the target's is 4"),
        ({"hidden_size": 80}, r"drafter.hidden_size is 80, and the target's is 64"),
        ({"layer": WHOLE | {"num_heads": 3, "num_kv_heads": 1}}, r"drafter.layer has 3 query heads for each .* 2"),
        ({"layer": WHOLE | {"intermediate_size": 97}}, r"drafter.layer.intermediate_size is 97"),
        ({"drafter": {"head_dim": 8}}, r"drafter.head_dim is 8; heads are kept whole, so 16"),
        ({"hidden_size": 48, "drafter": {"embeddings": "frozen"}}, r"drafter.embeddings is frozen"),
        ({"layers": [0, 1, 2, 4]}, r"layers has 4; the target's are 0 to 3"),
    ],
)
def test_what_cannot_be_cut_out_is_refused(tiny, tmp_path, shape, message):
    with pytest.raises(ConfigError, match=message):
        check_prunable(config(tiny, tmp_path / "pruned", **shape))


@pytest.mark.parametrize(("layers", "message"), [([2, 1, 0, 3], "ascending order"), ([0, 1], "layers has 2 numbers")])
def test_layers_are_given_once_and_in_order(tiny, tmp_path, layers, message):
    with pytest.raises(ConfigError, match=message):
        config(tiny, tmp_path, layers=layers)
