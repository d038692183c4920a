"""Other models as drafters: with a context or a vocabulary of another size, and the target itself."""

import pytest
import torch
from rehearsed import Rehearsed
from side_by_side import SHAPES, is_lossless, plainly, speculate
from tiny_drafters import noisy_copy
from tiny_targets import MAX_POSITIONS, VOCABULARY, TinyTarget, load_target, save_target
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, MambaConfig, Phi3Config

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.drafters.common.slots import EXTEND_CHUNK
from moray.drafters.configs import PretrainedConfig
from moray.drafters.pretrained import Pretrained
from moray.errors import ConfigError
from moray.targets.head import TargetHead

GREEDY, COUPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=7)
CONTEXT = 40
SMALL = {"num_hidden_layers": 2, "hidden_size": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("pretrained") / "target", **SMALL)


def made(tiny: TinyTarget, folder) -> Pretrained:
    drafter = PretrainedConfig(type="pretrained", model=str(folder)).build(TargetHead.of(tiny.target))
    assert isinstance(drafter, Pretrained)
    return drafter.eval()


@pytest.fixture(scope="module")
def short(tiny, tmp_path_factory) -> Pretrained:
    """The target's own weights, cut to a context of CONTEXT tokens."""
    folder = tmp_path_factory.mktemp("short")
    model = AutoModelForCausalLM.from_pretrained(tiny.folder)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)
    return made(tiny, folder)


# --- The target itself ---


def assert_scores_paths(drafter: Pretrained, stock, state, text: list[int], tolerance: float) -> None:
    """A tree behind the text scores as the stock model does along each of its paths."""
    # 0 root; 1, 2 its children; 3 below 2, 4 below 1
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[1:, 0] = ancestors[3, 2] = ancestors[4, 1] = True
    tokens = [5, 6, 7, 8, 8]
    for _ in range(2):  # a draft leaves nothing behind
        for depth, (begin, end) in enumerate([(0, 1), (1, 3), (3, 5)]):
            drafted = drafter.step(state, torch.tensor(tokens[begin:end]), ancestors[begin:end, :end], depth)
            for node in range(begin, end):
                path = [tokens[above] for above in range(node + 1) if ancestors[node, above]]
                with torch.no_grad():
                    wanted = stock(torch.tensor([[*text, *path]])).logits[0, -1]
                torch.testing.assert_close(drafted[node - begin], wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, SamplingParams(temperature=0.8, acceptance_method="rejection")])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_target_as_its_own_drafter_drafts_as_if_rehearsed(tiny, shape, params):
    itself = made(tiny, tiny.folder)
    for prompt in (tiny.prompt(), tiny.prompt(1, 2 * EXTEND_CHUNK + 3)):
        generation = speculate(tiny, itself, shape, prompt, params, 21)
        rehearsed = speculate(tiny, Rehearsed(tiny.target), shape, prompt, params, 21)
        assert generation.tokens == rehearsed.tokens
        assert generation.accepted == rehearsed.accepted
        if shape is SHAPES["chain"]:
            assert generation.accepted == [4] * 4
        elif shape is SHAPES["fixed"] and params.acceptance_method != "rejection":
            assert generation.accepted == [3] * 5


def test_a_tree_scores_as_an_unmodified_model_along_each_path(tiny):
    folder = noisy_copy(tiny)
    drafter, stock = made(tiny, folder), AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    text = tiny.prompt(4, EXTEND_CHUNK + 5)
    state = drafter.new_state(128, 16)
    for piece in torch.tensor(text).split(30):
        drafter.extend(state, piece, {})
    assert_scores_paths(drafter, stock, state, text, 1e-4)


# --- Another context ---


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_is_proposed_beyond_its_own_context(tiny, short, shape):
    """Position by position: no node stands where the drafter cannot read its parent."""
    decoder = SpeculativeDecoder(tiny.target, short, shape, MAX_POSITIONS)
    prompt = tiny.prompt()
    generation = decoder.generate(prompt, GREEDY, 50, ())
    assert generation.tokens == plainly(tiny, prompt, GREEDY, 50)
    root_position = len(prompt)
    for drafted, accepted, emitted in zip(generation.drafted, generation.accepted, generation.emitted, strict=True):
        assert drafted == max(0, min(shape.depth, CONTEXT - root_position))
        assert accepted <= drafted
        root_position += emitted
    assert generation.drafted[0] == shape.depth
    assert generation.drafted[-1] == 0
    assert max(generation.accepted) >= 3, "right while it may speak"


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 300])
def test_prompts_about_its_context_are_answered_and_forgotten(tiny, short, length):
    """299 tokens arrive in several pieces, of which only the first would fit."""
    decoder = SpeculativeDecoder(tiny.target, short, SHAPES["chain"], MAX_POSITIONS)
    prompt = tiny.prompt(2, length)
    generation = decoder.generate(prompt, GREEDY, 8, ())
    assert generation.tokens == plainly(tiny, prompt, GREEDY, 8)
    assert generation.drafted[0] == max(0, CONTEXT - length)
    again = decoder.generate(tiny.prompt(), GREEDY, 11, ())
    assert again.accepted == [4, 4], "the next text begins anew"


def test_a_longer_context_than_the_target_s_changes_nothing(tiny, tmp_path):
    folder = save_target(tmp_path, **SMALL, max_position_embeddings=2 * MAX_POSITIONS)
    prompt = tiny.prompt(5, MAX_POSITIONS - 8)
    generation = speculate(tiny, made(tiny, folder), SHAPES["chain"], prompt, GREEDY, 40)
    assert generation.tokens == plainly(tiny, prompt, GREEDY, 40)
    assert len(generation.tokens) == 8
    assert generation.accepted[0] == 4, "the same weights"


# --- Another vocabulary ---


@pytest.mark.parametrize("size", [VOCABULARY - 17, VOCABULARY + 31])
def test_padding_to_another_size_costs_only_the_ids_that_are_not_there(tiny, tmp_path, size):
    """Embeddings cut off or padded: elsewhere the scores are the model's own."""
    folder = save_target(tmp_path, **SMALL, vocab_size=size, seed=3)
    drafter, stock = made(tiny, folder), AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    text = [token for token in tiny.prompt(0, 30) if token < VOCABULARY - 17]
    state = drafter.new_state(64, 4)
    drafter.extend(state, torch.tensor(text[:-1]), {})
    scores = drafter.step(state, torch.tensor(text[-1:]), None, 0)
    with torch.no_grad():
        wanted = stock(torch.tensor([text])).logits[0, -1]
    common = min(size, VOCABULARY)
    assert scores.shape == (1, VOCABULARY)
    torch.testing.assert_close(scores[0, :common], wanted[:common], rtol=1e-4, atol=1e-4)
    assert bool((scores[0, common:] == -torch.inf).all())
    for shape in SHAPES.values():
        for params in (GREEDY, COUPLED):
            assert is_lossless(tiny, drafter, shape, params, [[*tiny.prompt(), VOCABULARY - 1]], 12)


def test_a_model_that_is_not_there_is_refused_by_name(tiny, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        made(tiny, tmp_path / "nowhere")


# --- Other families ---


OTHERS = {
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=256,
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "phi3": lambda: Phi3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256, original_max_position_embeddings=256, pad_token_id=0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=OTHERS)
def other(request, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(OTHERS[request.param]()).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(3.0)  # far from even
    stock.save_pretrained(folder)
    return made(tiny, folder), stock


def test_a_model_of_another_family_scores_trees_as_it_would_by_itself(tiny, other):
    drafter, stock = other
    text = tiny.prompt(4, EXTEND_CHUNK + 5)
    state = drafter.new_state(128, 16)
    drafter.extend(state, torch.tensor(text), {})
    assert_scores_paths(drafter, stock, state, text, 1e-3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_model_of_another_family_drafts_losslessly(tiny, other, shape):
    drafter, _ = other
    prompts = [tiny.prompt(), tiny.prompt(1, 2 * EXTEND_CHUNK + 3)]
    assert is_lossless(tiny, drafter, shape, GREEDY, prompts, 20)


def test_a_model_without_keys_and_values_is_refused(tiny, tmp_path):
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"drafter.model .* of type 'mamba', which does not draft here"):
        made(tiny, tmp_path)
