"""The independent drafter against a transformers Llama of the same weights."""

import pytest
import torch
from reference import scrambled
from tiny_batches import batch_of
from tiny_drafters import build
from tiny_targets import TinyTarget, load_target
from transformers import LlamaConfig, LlamaForCausalLM

from moray.drafters.common.slots import EXTEND_CHUNK
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import IndependentConfig
from moray.drafters.independent import Independent
from moray.drafters.learner import DraftView
from moray.errors import ConfigError

WIDTH = 32
LAYER = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=40)


def config_of(embeddings: str, num_layers: int = 2, **others) -> IndependentConfig:
    settings = {"hidden_size": WIDTH, "head_dim": 8, "layer": LAYER, "num_layers": num_layers, "embeddings": embeddings}
    return IndependentConfig(type="independent", **settings | others)


CONFIGS = {
    "frozen": config_of("frozen"),
    "copied": config_of("copied"),
    "copied and reduced": config_of("copied", draft_vocab_size=40),
    "frozen and reduced": config_of("frozen", draft_vocab_size=40),
    "random": config_of("random", 3, hidden_size=24, head_dim=6),
    "one layer": config_of("random", 1, hidden_size=24),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    rope = {"rope_type": "default", "rope_theta": 300.0}
    return load_target(
        tmp_path_factory.mktemp("independent"), num_hidden_layers=2, hidden_size=WIDTH, rope_parameters=rope
    )


def made(tiny: TinyTarget, config: IndependentConfig) -> Independent:
    drafter = build(tiny, config)
    assert isinstance(drafter, Independent)
    return drafter


@pytest.fixture(params=CONFIGS)
def drafter(request, tiny) -> Independent:
    return scrambled(made(tiny, CONFIGS[request.param]), 0.2)


def as_llama(drafter: Independent) -> LlamaForCausalLM:
    """The same weights in transformers' Llama, which pairs elements k and k + d/2 of a head, not 2k and 2k + 1."""
    config, spec = drafter.config, drafter.spec
    head_dim, layer = config.head_dim, config.layer
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=layer.num_heads,
            num_key_value_heads=layer.num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=spec.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            attn_implementation="eager",
        )
    )
    ours = drafter.state_dict()
    every_token = torch.arange(spec.vocab_size)
    state = {
        "model.embed_tokens.weight": ours.get("embedding.weight", drafter.head.embed(every_token)),
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": torch.zeros(spec.vocab_size, config.hidden_size),
    }
    tokens = ours.get("vocabulary.tokens", every_token)
    state["lm_head.weight"][tokens] = ours.get("projection.weight", drafter.head.weight[tokens])

    def in_halves(weight):
        by_pair = weight.unflatten(0, (-1, head_dim // 2, 2))
        return by_pair.transpose(1, 2).flatten(0, 2)

    for i in range(config.num_layers):
        joint = ours[f"layers.{i}.attention.qkv_proj.weight"]
        sizes = [head_dim * heads for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)]
        query, key, value = joint.split(sizes)
        gate, up = ours[f"layers.{i}.mlp.gate_up.weight"].chunk(2)
        theirs = {
            "self_attn.q_proj": in_halves(query),
            "self_attn.k_proj": in_halves(key),
            "self_attn.v_proj": value,
            "self_attn.o_proj": ours[f"layers.{i}.attention.o_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": ours[f"layers.{i}.mlp.down.weight"],
            "input_layernorm": ours[f"layers.{i}.input_norm.weight"],
            "post_attention_layernorm": ours[f"layers.{i}.mlp_norm.weight"],
        }
        state |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in theirs.items()}
    model.load_state_dict(state)
    return model.eval()


def logits_of(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_training_scores_as_a_transformers_llama(tiny, drafter):
    batch = batch_of(tiny.target, [tiny.prompt(0, 24), tiny.prompt(1, 17)], 5, drafter.needs)
    before = torch.arange(-1, 23).clamp(min=0).expand(2, 24)
    with torch.no_grad():
        (prediction,) = drafter(batch, DraftView(before, torch.zeros(2, dtype=torch.bool))).predictions
    model = as_llama(drafter)
    for row, length in enumerate(batch.lengths.tolist()):
        wanted = drafter.vocabulary.select(logits_of(model, batch.tokens[row, :length].tolist()))
        logits = prediction.score(prediction.hidden[row, :length]).detach()
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("known", [1, EXTEND_CHUNK, 2 * EXTEND_CHUNK + 9])
def test_drafting_scores_as_a_transformers_llama(tiny, drafter, known):
    """A chain, then a tree, behind texts that are read in one chunk and in several."""
    text = tiny.prompt(2, known + 4)
    model, state = as_llama(drafter), drafter.new_state(256, 16)
    drafter.extend(state, torch.tensor(text[:known]), {})
    for depth in range(4):
        with torch.no_grad():
            drafted = drafter.step(state, torch.tensor([text[known + depth]]), None, depth)[0]
        wanted = logits_of(model, text[: known + depth + 1])[-1]
        seen = drafted.isfinite()
        assert int(seen.sum()) == drafter.vocabulary.size
        torch.testing.assert_close(drafted[seen], wanted[seen], rtol=1e-4, atol=1e-4)
    # 0 root; 1, 2 its children; 3 below 2, 4 below 1
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[1:, 0] = ancestors[3, 2] = ancestors[4, 1] = True
    tokens = [text[known], 7, 8, 9, 9]
    for depth, (begin, end) in enumerate([(0, 1), (1, 3), (3, 5)]):
        with torch.no_grad():
            drafted = drafter.step(state, torch.tensor(tokens[begin:end]), ancestors[begin:end, :end], depth)
        for node in range(begin, end):
            path = [tokens[above] for above in range(node + 1) if ancestors[node, above]]
            wanted = logits_of(model, [*text[:known], *path])[-1]
            torch.testing.assert_close(drafted[node - begin][seen], wanted[seen], rtol=1e-4, atol=1e-4)


def test_frozen_embeddings_are_the_target_s_and_train_nothing(tiny):
    drafter = made(tiny, CONFIGS["frozen"])
    assert drafter.embedding is None
    assert drafter.projection is None
    other = made(tiny, CONFIGS["copied"])
    assert other.num_parameters - drafter.num_parameters == 2 * 97 * WIDTH


@pytest.mark.parametrize("name", ["copied", "copied and reduced"])
def test_copied_embeddings_start_as_the_target_s_and_leave_them_alone(tiny, name):
    drafter = made(tiny, CONFIGS[name])
    head, tokens = drafter.head, drafter.vocabulary.to_tokens(torch.arange(drafter.vocabulary.size))
    assert torch.equal(drafter.embedding.weight, head.embed(torch.arange(97)))
    assert torch.equal(drafter.projection.weight, head.weight[tokens])
    with torch.no_grad():
        drafter.embedding.weight += 1.0
        drafter.projection.weight += 1.0
    fresh = made(tiny, CONFIGS[name])
    assert torch.equal(fresh.projection.weight, head.weight[tokens])
    assert not torch.equal(fresh.projection.weight, drafter.projection.weight)


def test_random_embeddings_are_not_the_target_s(tiny):
    drafter = made(tiny, config_of("random"))
    assert float(drafter.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(drafter.projection.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("embeddings", ["frozen", "copied"])
def test_the_target_s_embeddings_in_another_width_are_refused_with_both(tiny, embeddings):
    with pytest.raises(ConfigError, match=rf"hidden_size is 24 and the target's 32; embeddings '{embeddings}'"):
        made(tiny, config_of(embeddings, hidden_size=24))


def test_nothing_crosses_from_the_target(tiny, drafter):
    assert drafter.observed.kv_layers == drafter.observed.hidden_depths == ()
    assert drafter.observe(batch_of(tiny.target, [tiny.prompt(0, 5)], 2, drafter.needs).taps) == {}
