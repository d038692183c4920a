"""What a new drafter starts from: layers of the target, or another drafter."""

import logging

import pytest
import torch
from tiny_drafters import build
from tiny_targets import TinyTarget, load_target
from transformers import AutoModelForCausalLM

from moray.config import validate
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.distill.configs import InitialWeights
from moray.distill.initial import check_initial, initial_fingerprint, initialise
from moray.drafters.checkpoint import save_drafter
from moray.drafters.common.attention import attend
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import Eagle3Config, EagleConfig, GlideConfig, IndependentConfig
from moray.drafters.glide import Glide
from moray.drafters.independent import Independent
from moray.errors import ConfigError, DataError, MismatchError
from moray.trees.shapes import ChainShape

BLOCK = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96)
TEXT = "tokenizer.other.template"


def config_of(num_layers: int = 4, **others) -> IndependentConfig:
    sizes = {"num_layers": num_layers, "hidden_size": 64, "head_dim": 16, "layer": BLOCK, "embeddings": "frozen"}
    return IndependentConfig(type="independent", **sizes | others)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("initial"))


@pytest.mark.parametrize("embeddings", ["frozen", "copied"])
def test_a_drafter_of_all_layers_drafts_what_the_target_says(tiny, embeddings):
    init = InitialWeights(layers=(0, 1, 2, 3))
    config = config_of(embeddings=embeddings)
    check_initial(init, config, str(tiny.folder), TEXT)
    drafter = build(tiny, config)
    initialise(drafter, init, str(tiny.folder))
    made = SpeculativeDecoder(tiny.target, drafter, ChainShape(type="chain", depth=3)).generate(
        tiny.prompt(), SamplingParams(), 41, ()
    )
    assert made.tokens == tiny.hugging_face(tiny.prompt(), 41)
    assert made.accepted == [3] * 10, "after the first token, each cycle accepts its whole draft"


def test_layers_come_in_the_order_given(tiny):
    init = InitialWeights(layers=(2, 0))
    drafter = build(tiny, config_of(2))
    initialise(drafter, init, str(tiny.folder))
    assert isinstance(drafter, Independent)
    layers = tiny.target.model.model.layers
    for own, layer in zip(drafter.blocks, (layers[2], layers[0]), strict=True):
        assert torch.equal(own.mlp.down.weight, layer.mlp.down_proj.weight)
        assert torch.equal(own.attention.qkv_proj.weight[-32:], layer.self_attn.v_proj.weight)
    assert torch.equal(drafter.norm.weight, tiny.target.model.model.norm.weight)


@pytest.mark.parametrize(
    ("layers", "changed", "message"),
    [
        ((0, 4), {"num_layers": 2}, r"init.layers has 4; the target's layers are 0 to 3"),
        ((0, 3), {}, r"drafter.num_layers is 4, but with init.layers=\[0, 3\] of this target it is 2"),
        ((0,), {"num_layers": 1, "hidden_size": 32}, r"drafter.hidden_size is 32, .* it is 64"),
        ((0,), {"num_layers": 1, "head_dim": 8}, r"drafter.head_dim is 8, .* it is 16"),
        ((0,), {"num_layers": 1, "embeddings": "random"}, r"drafter.embeddings is random, .* give frozen or copied"),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_what_would(tiny, layers, changed, message):
    with pytest.raises(ConfigError, match=message):
        check_initial(InitialWeights(layers=layers), config_of(**changed), str(tiny.folder), TEXT)


@torch.no_grad()
def test_glide_of_the_last_layer_finishes_the_target_s_pass(tiny):
    init = InitialWeights(layers=(3,))
    config = GlideConfig(type="glide", layer=BLOCK, num_cross_heads=4)
    check_initial(init, config, str(tiny.folder), TEXT)
    drafter = build(tiny, config)
    initialise(drafter, init, str(tiny.folder))
    assert isinstance(drafter, Glide)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder)
    out = model(torch.tensor([tiny.prompt()]), output_hidden_states=True, use_cache=True)
    last, positions = out.past_key_values.layers[3], torch.arange(len(tiny.prompt()))[None]
    finished = drafter._finish(
        out.hidden_states[-2], positions, lambda query: attend(query, last.keys, last.values, "causal")
    )
    torch.testing.assert_close(finished, out.hidden_states[-1], atol=1e-5, rtol=1e-5)
    layer, x = tiny.target.model.model.layers[3], torch.randn(1, 9, 64)
    rotary = model.model.rotary_emb(x, torch.arange(9)[None])
    attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=None)
    own = drafter._attend_to_itself(x, drafter.rotary.rows(0, 9))
    torch.testing.assert_close(own, x + attended, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("drafter", "layers", "message"),
    [
        (EagleConfig(type="eagle", layer=BLOCK), (3,), r"only drafter.type independent or glide can be"),
        (
            GlideConfig(type="glide", layer=BLOCK, num_cross_heads=4),
            (0, 3),
            r"is \[0, 3\], but this drafter has a single layer: .*\[3\]$",
        ),
        (
            GlideConfig(type="glide", layer=BLOCK.model_copy(update={"intermediate_size": 64}), num_cross_heads=4),
            (3,),
            r"drafter.layer.intermediate_size is 64, .* it is 96",
        ),
        (
            GlideConfig(type="glide", layer=BLOCK, num_cross_heads=2),
            (3,),
            r"drafter.num_cross_heads is 2, .* it is 4",
        ),
    ],
)
def test_drafters_that_cannot_be_made_of_these_layers_are_refused(tiny, drafter, layers, message):
    with pytest.raises(ConfigError, match=message):
        check_initial(InitialWeights(layers=layers), drafter, str(tiny.folder), TEXT)


@pytest.mark.parametrize(("family", "name"), [("qwen2", "self_attn.k_proj.bias"), ("qwen3", "self_attn.k_norm.weight")])
def test_layers_with_tensors_that_a_drafter_has_not_are_refused(tmp_path, family, name):
    other = load_target(tmp_path, family)
    with pytest.raises(ConfigError, match=rf"init.layers has 1, a layer with '{name}'"):
        check_initial(InitialWeights(layers=(1,)), config_of(1), str(other.folder), TEXT)


def test_a_scaled_rotary_embedding_is_warned_of(tmp_path, caplog):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    other = load_target(tmp_path, rope_parameters=rope)
    with caplog.at_level(logging.WARNING):
        check_initial(InitialWeights(layers=(1,)), config_of(1), str(other.folder), TEXT)
    assert "rotary embedding is scaled, the drafter's is not" in caplog.text


def test_a_drafter_is_trained_further(tiny, tmp_path):
    before, config = build(tiny, config_of(1), seed=1), config_of(1)
    save_drafter(tmp_path, before, TEXT)
    init = InitialWeights(drafter=str(tmp_path))
    check_initial(init, config, str(tiny.folder), TEXT)
    after = build(tiny, config, seed=2)
    initialise(after, init, str(tiny.folder))
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    known = initial_fingerprint(init)
    save_drafter(tmp_path, after.requires_grad_(False), TEXT)
    assert initial_fingerprint(init) == known
    save_drafter(tmp_path, build(tiny, config, seed=3), TEXT)
    assert initial_fingerprint(init) != known


def test_a_drafter_of_other_settings_or_of_another_target_is_not(tiny, tmp_path):
    save_drafter(tmp_path, build(tiny, config_of(1)), TEXT)
    init = InitialWeights(drafter=str(tmp_path))
    with pytest.raises(MismatchError, match=r"has drafter.num_layers = 1, here it is 2: give drafter.num_layers=1"):
        check_initial(init, config_of(2), str(tiny.folder), TEXT)
    with pytest.raises(MismatchError, match="was trained for another"):
        check_initial(init, config_of(1), str(tiny.folder), "tokenizer.other.changed")
    with pytest.raises(DataError, match="holds no drafter"):
        check_initial(InitialWeights(drafter=str(tmp_path / "none")), config_of(1), str(tiny.folder), TEXT)


def test_a_drafter_of_another_type_is_named_by_its_type(tiny, tmp_path):
    save_drafter(tmp_path, build(tiny, EagleConfig(type="eagle", layer=BLOCK)), TEXT)
    init = InitialWeights(drafter=str(tmp_path))
    with pytest.raises(MismatchError, match=r'has drafter.type = "eagle", here it is "eagle3"'):
        check_initial(init, Eagle3Config(type="eagle3", layer=BLOCK), str(tiny.folder), TEXT)


def test_settings_of_training_alone_may_change(tiny, tmp_path):
    before = Eagle3Config(type="eagle3", layer=BLOCK, hidden_layers=(2, 2, 2))
    save_drafter(tmp_path, build(tiny, before), TEXT)
    after = Eagle3Config(type="eagle3", layer=BLOCK, ttt_steps=2)
    check_initial(InitialWeights(drafter=str(tmp_path)), after, str(tiny.folder), TEXT)


def test_a_run_starts_from_one_thing():
    for given in ({}, {"layers": [0], "drafter": "runs/eagle"}):
        with pytest.raises(ConfigError, match=r"give one of the two"):
            validate(InitialWeights, given)
