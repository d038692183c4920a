"""GLIDE against its definition: a layer whose queries, turned as the target turns its own, read the target's real
last keys and values up to the start of the block."""

import math

import pytest
import torch
from one_step import gradients_of
from reference import Reference, attention, scrambled
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.masks import verified_start
from moray.drafters.glide import Glide
from moray.drafters.learner import DraftView
from moray.errors import ConfigError

LENGTH = 14
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROTARY = {"plain": {"rope_type": "default", "rope_theta": 10_000.0}, "llama3": LLAMA3}


@pytest.fixture(scope="module", params=ROTARY)
def tiny(request, tmp_path_factory) -> TinyTarget:
    folder = tmp_path_factory.mktemp(f"glide-{request.param}")
    return load_target(folder, num_hidden_layers=2, hidden_size=32, rope_parameters=ROTARY[request.param])


@pytest.fixture
def drafter(tiny) -> Glide:
    drafter = scrambled(build(tiny, VARIANTS["glide-0"]))
    assert isinstance(drafter, Glide)
    return drafter


@pytest.fixture
def batch(tiny, drafter):
    return batch_of(tiny.target, [tiny.prompt(3, LENGTH)], 4, drafter.needs)


def frequencies(rope: dict, head_dim: int) -> list[float]:
    """Angle per position of each pair. Llama 3 slows down long waves by `factor`, keeps short ones, and blends
    linearly in the number of turns between."""
    plain = [rope["rope_theta"] ** (-2 * k / head_dim) for k in range(head_dim // 2)]
    if rope["rope_type"] == "default":
        return plain
    slowed = []
    for frequency in plain:
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        slowed.append(frequency * (share + (1 - share) / rope["factor"]))
    return slowed


def rotated_in_halves(x: Tensor, position: int, angles: list[float]) -> Tensor:
    """Element k of a head is paired with element k + d/2."""
    out, half = x.clone(), len(x) // 2
    for k, angle in enumerate(angles):
        turn = position * angle
        out[k] = x[k] * math.cos(turn) - x[k + half] * math.sin(turn)
        out[k + half] = x[k + half] * math.cos(turn) + x[k] * math.sin(turn)
    return out


class GlideReference(Reference):
    """The formulas of GLIDE for one sequence; keys and values are asked of an unmodified model."""

    def __init__(self, drafter: Glide, tiny: TinyTarget) -> None:
        super().__init__(drafter, fused=("self_attention",))
        self.head_dim = drafter.spec.head_dim
        self.stock = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager")
        self.angles = frequencies(self.stock.config.rope_parameters, self.head_dim)

    def predict(self, tokens: list[int], start: int, shift: int = 0) -> Tensor:
        """The hidden state at the last of `tokens`, with the target's keys and values up to `start`."""
        with torch.no_grad():
            last = self.stock(torch.tensor([tokens]), use_cache=True).past_key_values.layers[-1]
        target = [(last.keys[0, :, j].double(), last.values[0, :, j].double()) for j in range(start + 1)]
        position = len(tokens) - 1
        embedded = [self.embedding[token] for token in tokens]
        own = [
            self.source("self_attention", self.norm("self_norm", x), i, self.head_dim, self.rope_theta)
            for i, x in enumerate(embedded)
        ]
        x = embedded[-1]
        x = x + self.attend("self_attention", self.norm("self_norm", x), position, own, self.rope_theta)
        queries = self.linear("cross_query", self.norm("cross_norm", x)).view(-1, self.head_dim)
        turned = [rotated_in_halves(query, position + shift, self.angles) for query in queries]
        x = x + self.linear("cross_out", attention(turned, target))
        return self.norm("out_norm", x + self.mlp("mlp", self.norm("mlp_norm", x)))


def test_hidden_states_are_those_of_the_definition(tiny, drafter, batch):
    start = verified_start(batch.response_mask, torch.tensor([5]), torch.tensor([2]))
    assert len(set(start[0].tolist())) == 6
    with torch.no_grad():
        predicted = drafter(batch, DraftView(start, torch.zeros(1, dtype=torch.bool))).predictions[0].hidden[0]
    reference, tokens = GlideReference(drafter, tiny), batch.tokens[0].tolist()
    for i in range(LENGTH):
        wanted = reference.predict(tokens[: i + 1], int(start[0, i]))
        torch.testing.assert_close(predicted[i].double(), wanted, rtol=2e-4, atol=2e-4)
    wrong = reference.predict(tokens, int(start[0, -1]), shift=1)
    assert float((wrong - wanted).abs().max()) > 1e-3, "a query turned otherwise gives the same: nothing was tested"


def test_training_sees_the_target_up_to_the_start_of_the_block_and_no_further(drafter, batch):
    """Damage to the target's keys and values behind start(i) must not reach position i; damage at it must."""
    start = verified_start(batch.response_mask, torch.tensor([5]), torch.tensor([0]))
    view = DraftView(start, torch.ones(1, dtype=torch.bool))
    with torch.no_grad():
        before = drafter(batch, view).predictions[0].hidden[0]
        for damaged in range(LENGTH):
            kv = batch.taps.kv.clone()
            batch.taps.kv[:, damaged] += 1.0
            after = drafter(batch, view).predictions[0].hidden[0]
            batch.taps.kv.copy_(kv)
            changed = (after - before).abs().amax(dim=-1) > 1e-6
            assert torch.equal(changed, start[0] >= damaged)


@pytest.mark.parametrize("known", [1, 6])
def test_drafts_read_the_verified_tokens_alone(tiny, drafter, batch, known):
    reference, tokens = GlideReference(drafter, tiny), batch.tokens[0].tolist()
    state = drafter.new_state(32, 16)
    drafter.extend(state, batch.tokens[0, :known], {"last_layer": batch.taps.kv[:, :known, 0]})
    for depth in range(4):
        with torch.no_grad():
            logits = drafter.step(state, batch.tokens[0, known + depth : known + depth + 1], None, depth)
        wanted = reference.lm_head @ reference.predict(tokens[: known + depth + 1], known - 1)
        torch.testing.assert_close(logits[0].double(), wanted, rtol=1e-3, atol=1e-3)


def test_training_goes_on_after_decoding_has_filled_the_target_s_tables(tiny, drafter, batch):
    """Tables made in inference mode may not be saved for a backward pass."""
    with torch.inference_mode():
        state = drafter.new_state(32, 16)
        drafter.extend(state, batch.tokens[0, :5], {"last_layer": batch.taps.kv[:, :5, 0]})
        drafter.step(state, batch.tokens[0, 5:6], None, 0)
    losses, config = LossConfig(feature=0.0, kl=1.0), TrainConfig(max_grad_norm=1e9)
    result = gradients_of(drafter, [batch], losses, config)
    assert float(result.grad_norm) > 0
    assert float(drafter.cross_query.weight.grad.abs().max()) > 0


def test_heads_that_do_not_share_the_target_s_keys_are_refused_with_both_numbers(tiny):
    with pytest.raises(ConfigError, match=r"num_cross_heads is 3; a multiple of .* 2, is needed"):
        build(tiny, VARIANTS["glide-0"].model_copy(update={"num_cross_heads": 3}))
