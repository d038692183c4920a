"""Training and drafting are one model: the same logits at every drafted position, from the same state."""

import pytest
import torch
from drafting import PROMPT, is_one_model, largest_difference, view_of
from tiny_batches import batch_of
from tiny_drafters import SEVERAL_LAYER_COUNTS, T_STEP, TRAINED, VARIANTS, build, overfit

from moray.drafters.learner import DraftView


@pytest.mark.parametrize("period", [2, 5, 14])
def test_training_sees_what_drafting_sees(trained, trained_batch, period):
    for phase in (0, 1):
        assert is_one_model(trained, trained_batch, view_of(trained_batch, trained, period, phase))


@pytest.mark.parametrize("name", TRAINED)
def test_training_sees_what_drafting_sees_on_every_target(tiny, target_name, name):
    target = tiny(target_name)
    drafter = build(target, VARIANTS[name])
    batch = batch_of(target.target, [target.prompt(2, 20)], PROMPT, drafter.needs)
    assert is_one_model(drafter, batch, view_of(batch, drafter))


@pytest.mark.parametrize("name", ["moa-1", "glide-0"])
def test_training_sees_what_drafting_sees_with_a_reduced_vocabulary(tiny, name):
    """Of those whose variants all have the whole one."""
    target = tiny("llama")
    drafter = build(target, VARIANTS[name].model_copy(update={"draft_vocab_size": 60}))
    batch = batch_of(target.target, [target.prompt(2, 20)], PROMPT, drafter.needs)
    assert is_one_model(drafter, batch, view_of(batch, drafter))


@pytest.mark.parametrize("name", TRAINED)
def test_training_sees_what_drafting_sees_after_training(tiny, learnt, name):
    """Norms and biases have left their initial values; a random drafter's large attention weights are even."""
    target, drafter = tiny("qwen3"), learnt("qwen3", name)
    batch = batch_of(target.target, [target.prompt(2, 20)], PROMPT, drafter.needs)
    assert is_one_model(drafter, batch, view_of(batch, drafter))


@pytest.mark.parametrize("name", T_STEP)
def test_a_wrong_start_is_noticed(tiny, name):
    """The comparison can fail: training that may see one token more differs visibly."""
    target = tiny("llama")
    drafter = build(target, VARIANTS[name])
    batch = batch_of(target.target, [target.prompt(0, 24), target.prompt(1, 19)], PROMPT, drafter.needs)
    view = view_of(batch, drafter)
    late = DraftView(torch.minimum(view.start + 1, torch.arange(batch.tokens.shape[1])), view.staircase)
    with torch.no_grad():
        seen, more = (drafter(batch, v).predictions[0].hidden for v in (view, late))
    position = int((view.start[0] != late.start[0]).nonzero()[0])
    assert float((seen[0, position] - more[0, position]).abs().max()) > 1e-4


@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_target_layers_attend_to_the_real_keys_and_values(tiny, layers):
    """Target Layer Inference without the target's own K/V of the verified tokens is another function."""
    target = tiny("llama")
    drafter = build(target, VARIANTS[f"moa-{layers}"])
    batch = batch_of(target.target, [target.prompt(0, 24)], PROMPT, drafter.needs)
    view = view_of(batch, drafter)

    def zero(state):
        state.tail.data.zero_()

    def keep_only_values(state):
        state.tail.data[:, 0].zero_()

    assert largest_difference(drafter, batch, view) < 1e-5
    assert largest_difference(drafter, batch, view, zero) > 0.05
    assert largest_difference(drafter, batch, view, keep_only_values) > 0.05


@pytest.mark.parametrize("name", SEVERAL_LAYER_COUNTS)
def test_training_sees_what_drafting_sees_with_every_n(tiny, name):
    target = tiny("llama")
    drafter = build(target, VARIANTS[name])
    batch = batch_of(target.target, [target.prompt(2, 20)], PROMPT, drafter.needs)
    for num_target_layers in drafter.config.layer_counts:
        drafter.fix_num_target_layers(num_target_layers)
        assert is_one_model(drafter, batch, view_of(batch, drafter))


STATE_OF = {
    "moa-0": ("memory", "own"),
    "moa-1": ("memory", "own"),
    "moa-2": ("memory", "own"),
    "dynamic-moa-0": ("memory", "own"),
    "eagle-0": ("cache", "before"),
    "eagle3-0": ("cache", "before"),
    "glide-0": ("own", "target"),
    "medusa-0": ("last",),
    "independent-0": ("caches",),
}


@pytest.mark.parametrize("name", STATE_OF)
def test_drafts_depend_on_everything_in_the_state(tiny, name):
    target = tiny("llama")
    drafter = build(target, VARIANTS[name])
    if name == "medusa-0":  # heads begin as the identity
        overfit(target, drafter, target.prompt(0, 24), PROMPT, steps=3)
    batch = batch_of(target.target, [target.prompt(0, 24)], PROMPT, drafter.needs)
    for part in STATE_OF[name]:

        def zero(state, part=part):
            tensors = getattr(state, part)
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                tensor.zero_()

        assert largest_difference(drafter, batch, view_of(batch, drafter), zero) > 1e-3, part
