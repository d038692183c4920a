"""The target driven with our masks, positions and cache gives the stock model's own numbers, in every family."""

import json

import pytest
import torch
from tiny_targets import MAX_POSITIONS, TARGETS, load_target, save_target
from transformers import AutoModelForCausalLM

from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.model import Target, read_eos_ids
from moray.targets.spec import TargetConfig, read_spec

LENGTH = 14
DEPTHS = (-1, -2, -3, -4, -5)


@pytest.fixture(scope="module", params=TARGETS)
def tiny(request, tmp_path_factory):
    return load_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def stock(tiny):
    """The same weights in a model of transformers that our code never touches."""
    return AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager").eval()


def causal(new: int, past: int = 0) -> torch.Tensor:
    return torch.ones(new, past + new, dtype=torch.bool).tril(past)[None, None]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_one_pass_gives_the_model_s_logits_and_every_hidden_depth(tiny, stock):
    tokens = torch.tensor([tiny.prompt(0, LENGTH), tiny.prompt(1, LENGTH)])
    cache = tiny.target.new_cache(LENGTH, batch=2)
    output = tiny.target.forward(tokens, torch.arange(LENGTH).expand(2, -1), causal(LENGTH), cache, DEPTHS)
    with torch.no_grad():
        expected = stock(tokens, output_hidden_states=True)
    close(tiny.target.logits(output.last), expected.logits)
    assert set(output.hidden) == set(DEPTHS)
    for depth in DEPTHS:  # transformers lists embeddings first and the normed last state last
        close(output.hidden[depth], expected.hidden_states[depth])
    assert not torch.allclose(output.hidden[-1], output.hidden[-2]), "depths differ"


def test_cached_keys_and_values_are_the_model_s(tiny, stock):
    tokens = torch.tensor([tiny.prompt(0, LENGTH)])
    cache = tiny.target.new_cache(LENGTH)
    tiny.target.forward(tokens, torch.arange(LENGTH)[None], causal(LENGTH), cache)
    with torch.no_grad():
        past = stock(tokens, use_cache=True).past_key_values
    for layer in range(tiny.target.spec.num_layers):
        close(cache.data[layer, 0], past.layers[layer].keys)
        close(cache.data[layer, 1], past.layers[layer].values)


def test_passes_in_pieces_equal_one_pass(tiny, stock):
    prompt = tiny.prompt(0, LENGTH)
    with torch.no_grad():
        expected = stock(torch.tensor([prompt])).logits[0]
    cache = tiny.target.new_cache(LENGTH)
    for begin, end in ((0, 5), (5, 6), (6, 13), (13, 14)):
        mask = causal(end - begin, begin) if end - begin > 1 else None
        tokens = torch.tensor([prompt[begin:end]])
        output = tiny.target.forward(tokens, torch.arange(begin, end)[None], mask, cache)
        cache.commit(end - begin)
        close(tiny.target.logits(output.last[0]), expected[begin:end])


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_a_tree_scores_each_branch_as_if_it_were_alone(tiny, stock, additive):
    """Two branches side by side in one pass, with masks and positions that do not follow the slots."""
    prompt = tiny.prompt(0, 8)
    tokens, parents, depths = [3, 10, 20, 11, 21], [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2]
    seen = torch.eye(5, dtype=torch.bool)
    for node in range(1, 5):
        seen[node] |= seen[parents[node]]
    cache = tiny.target.new_cache(13)
    tiny.target.forward(torch.tensor([prompt]), torch.arange(8)[None], causal(8), cache)
    cache.commit(8)
    mask = torch.cat([torch.ones(5, 8, dtype=torch.bool), seen], dim=1)[None, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    output = tiny.target.forward(torch.tensor([tokens]), 8 + torch.tensor([depths]), mask, cache)
    logits = tiny.target.logits(output.last[0])
    for path in ([0, 1, 3], [0, 2, 4]):
        with torch.no_grad():
            alone = stock(torch.tensor([prompt + [tokens[node] for node in path]])).logits[0, 8:]
        close(logits[path], alone)


def test_nothing_of_a_target_trains(tiny):
    assert not any(parameter.requires_grad for parameter in tiny.target.model.parameters())
    assert not tiny.target.model.training


def test_positions_past_the_context_are_there_for_drafts(tiny, stock):
    """Rotary tables reach beyond the last position, where a tree's deepest nodes may lie."""
    position = torch.tensor([[MAX_POSITIONS + 10]])
    like = torch.zeros(1, 1, tiny.target.spec.hidden_size)
    for ours, theirs in zip(
        tiny.target._rotary.at(like, position), stock.model.rotary_emb(like, position), strict=True
    ):
        close(ours, theirs)


# --- What is read from disk ---


def test_sizes_come_from_the_config(tmp_path):
    spec = read_spec(str(save_target(tmp_path, "qwen3", num_hidden_layers=3, head_dim=8)))
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.num_heads) == ("qwen3", 3, 64, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.kv_width) == (2, 8, 32)
    assert (spec.vocab_size, spec.max_positions) == (97, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(7, None, (7,)), ([7, 8], None, (7, 8)), (7, [9, 10, 11], (9, 10, 11)), (None, None, ()), (0, 3, (3,))],
)
def test_every_end_token_is_found(tmp_path, in_config, in_generation, expected):
    save_target(tmp_path, num_hidden_layers=1)
    for name, eos in (("config.json", in_config), ("generation_config.json", in_generation)):
        path = tmp_path / name
        values = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(values | {"eos_token_id": eos}))
    assert read_eos_ids(str(tmp_path)) == expected
    assert Target.load(TargetConfig(model=str(tmp_path), device="cpu")).eos_ids == expected


def test_unsupported_and_missing_targets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        read_spec(str(tmp_path))
    folder = save_target(tmp_path / "gpt", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    with pytest.raises(ConfigError, match=r"of type 'gpt_neox'; supported are llama, mistral, qwen2, qwen3"):
        read_spec(str(folder))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
PER_LAYER = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_parameters": LONGROPE}, r"rope_type is 'longrope' .*accepted are default, linear, dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, r"rope_type is 'spiral'"),
        ("qwen2", {"rope_parameters": PER_LAYER, "layer_types": MIXED}, r"rope_type is None .*one for all layers"),
        ("mistral", {"sliding_window": 0}, r"layer 0 has sliding attention and sliding_window is 0; a number from 1"),
        ("qwen3", {"layer_types": MIXED}, r"layer 1 has sliding attention and sliding_window is None; .*use_sliding"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types has 'chunked_attention'"),
    ],
)
def test_rotary_types_and_layers_that_are_not_handled_are_refused(tmp_path, family, changes, message):
    path = save_target(tmp_path, family, num_hidden_layers=2) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for load in (Target.load, TargetHead.load):
        with pytest.raises(ConfigError, match=message) as caught:
            load(TargetConfig(model=str(tmp_path), device="cpu"))
        assert "\n" not in str(caught.value)


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    """So that no mask is made for it; a cache's plan says nothing of windows then."""
    long = read_spec(str(save_target(tmp_path / "long", "mistral", sliding_window=MAX_POSITIONS)))
    short = read_spec(str(save_target(tmp_path / "short", "mistral", sliding_window=MAX_POSITIONS - 1)))
    assert (long.sliding_window, long.sliding_layers, long.max_positions) == (None, (), MAX_POSITIONS)
    assert (short.sliding_window, short.sliding_layers, short.max_positions) == (511, (0, 1, 2, 3), MAX_POSITIONS)
    assert short.for_plan == long.for_plan | {
        "sliding_window": 511,
        "sliding_layers": [0, 1, 2, 3],
        "fingerprint": short.fingerprint,
    }


def test_a_damaged_weight_file_is_named(tmp_path):
    folder = save_target(tmp_path, num_hidden_layers=1)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    for load in (Target.load, TargetHead.load):
        with pytest.raises(ConfigError, match=r"target\.model.*(cannot be|could not be)"):
            load(TargetConfig(model=str(folder), device="cpu"))
