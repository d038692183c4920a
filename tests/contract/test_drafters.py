"""What every drafter of the union must keep: one model for training and drafting, memory token by token, sound trees,
and nothing of the target in its weights."""

import pytest
import torch
from safetensors.torch import load_file
from support import (
    DRAFTERS,
    SHAPES,
    T_STEP,
    TARGETS,
    TRAINED,
    UNTRAINED,
    VARIANTS,
    batch_of,
    build,
    load_target,
    losses_for,
    overfit,
    taps_of,
    union_members,
)

from moray.batch import Taps
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import Sampler
from moray.distill.checkpoint import load_drafter, read_drafter_config, save_drafter
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.masks import verified_start
from moray.distill.optim import Optimiser
from moray.distill.step import train_step
from moray.drafters.base import Drafter, DraftView
from moray.errors import ConfigError, DataError, MismatchError
from moray.targets.head import TargetHead
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, SparseShape
from moray.trees.tree import TokenTree

PROMPT = 6


def test_every_member_of_the_union_is_under_this_contract():
    assert union_members() == set(DRAFTERS)
    for kind, configs in DRAFTERS.items():
        assert configs
        assert all(config.model_dump()["type"] == kind for config in configs)


@pytest.fixture
def drafter(tiny, variant) -> Drafter:
    return build(tiny("llama"), VARIANTS[variant])


@pytest.fixture(params=TRAINED)
def trained(request, tiny) -> Drafter:
    """A random drafter of every kind that can be trained."""
    return build(tiny("llama"), VARIANTS[request.param])


@pytest.fixture
def trained_batch(tiny, trained):
    target = tiny("llama")
    return batch_of(target.target, [target.prompt(0, 24), target.prompt(1, 19)], PROMPT, trained.needs)


@pytest.fixture
def batch(tiny, drafter):
    """Two chats of different lengths whose responses begin after PROMPT tokens."""
    target = tiny("llama")
    return batch_of(target.target, [target.prompt(0, 24), target.prompt(1, 19)], PROMPT, drafter.needs)


def view_of(batch, drafter: Drafter, period: int = 5, phase: int = 0) -> DraftView:
    """What counts as verified: every `period`-th response token, or each position's predecessor."""
    size, seq = batch.tokens.shape
    start = verified_start(batch.response_mask, torch.full((size,), period), torch.full((size,), phase))
    if drafter.config.verified_period is None:
        start = torch.arange(-1, seq - 1).clamp(min=0).expand(size, seq)
    return DraftView(start, torch.zeros(size, dtype=torch.bool))


def pieces_of(taps: Taps, begin: int, end: int) -> Taps:
    kv = None if taps.kv is None else taps.kv[:1, begin:end]
    return Taps(kv, {depth: hidden[:1, begin:end] for depth, hidden in taps.hidden.items()})


def state_at(drafter: Drafter, tokens: torch.Tensor, taps: Taps, length: int):
    """A state that knows the first `length` tokens of sequence 0."""
    state = drafter.new_state(64, 64)
    drafter.extend(state, tokens[0, :length], drafter.observe(pieces_of(taps, 0, length)))
    return state


# --- Training and drafting are one model ---


def largest_difference(drafter: Drafter, batch, view: DraftView, spoil=lambda state: None) -> float:
    """Between training's forward pass and step-by-step drafting along the true text, over all drafted positions.

    `spoil` may damage a state before it drafts.
    """
    worst, compared = 0.0, 0
    length = int(batch.lengths[0])
    with torch.no_grad():
        by_start: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for prediction in drafter(batch, view).predictions:
            logits = drafter.vocabulary.expand(prediction.score(prediction.hidden[0]))
            for i, begin in enumerate(prediction.start[0, :length].tolist()):
                if 0 <= begin < i:
                    by_start.setdefault(begin, []).append((i, logits[i]))
        for begin, wanted in by_start.items():
            state = state_at(drafter, batch.tokens, batch.taps, begin + 1)
            drafter.step(state, batch.tokens[0, begin + 1 : begin + 2], None, 0)  # along with what has waited for it
            spoil(state)
            for i, expected in sorted(wanted, key=lambda pair: pair[0]):
                drafted = drafter.step(state, batch.tokens[0, i : i + 1], None, i - begin - 1)
                assert torch.equal(drafted[0].isfinite(), expected.isfinite()), "another draft vocabulary"
                known = expected.isfinite()
                worst = max(worst, float((drafted[0] - expected)[known].abs().max()))
                compared += 1
    assert compared >= 8, "the view drafts too little to compare"
    return worst


def is_one_model(drafter: Drafter, batch, view: DraftView) -> bool:
    return largest_difference(drafter, batch, view) < 1e-5


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


STATE_OF = {
    "moa-0": ("memory", "own"),
    "moa-1": ("memory", "own"),
    "moa-2": ("memory", "own"),
    "eagle-0": ("cache", "before"),
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


def test_a_branch_of_a_tree_scores_as_if_it_were_alone(drafter, batch, variant):
    """The true text as one branch among decoys: same logits, whatever stands beside it."""
    if variant.startswith("ngram"):  # something to find: the text twice
        batch.tokens[0, 12:24] = batch.tokens[0, :12].clone()
    text, known = batch.tokens[0], 10 if not variant.startswith("ngram") else 15
    with torch.no_grad():
        alone = state_at(drafter, batch.tokens, batch.taps, known)
        expected = [drafter.step(alone, text[known + d : known + d + 1], None, d)[0] for d in range(3)]
        state = state_at(drafter, batch.tokens, batch.taps, known)
        #  0 root; 1 decoy, 2 truth below it; 3 below the decoy, 4 truth, 5 decoy below the truth
        levels = [[text[known]], [11, text[known + 1]], [text[known + 2], text[known + 2], 13]]
        parents = [-1, 0, 0, 1, 2, 2]
        ancestors = torch.eye(6, dtype=torch.bool)
        for node in range(1, 6):
            ancestors[node] |= ancestors[parents[node]]
        scores, begin = [], 0
        for depth, level in enumerate(levels):
            end = begin + len(level)
            tokens = torch.tensor([int(token) for token in level])
            scores.append(drafter.step(state, tokens, ancestors[begin:end, :end], depth))
            begin = end
    torch.testing.assert_close(scores[0][0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[1][1], expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[2][1], expected[2], atol=1e-5, rtol=0)
    if not variant.startswith("medusa"):  # whose heads do not see what was drafted before
        finite = expected[2].isfinite()
        assert float((scores[2][0] - expected[2])[finite].abs().max()) > 1e-3, "the decoy's child has another past"


def test_drafting_leaves_the_state_as_it_was(drafter, batch, variant):
    if variant.startswith("ngram"):
        batch.tokens[0, :24] = batch.tokens[0, :5].repeat(5)[:24]
    state = state_at(drafter, batch.tokens, batch.taps, 10)
    with torch.no_grad():
        first = drafter.step(state, batch.tokens[0, 10:11], None, 0)
        drafter.step(state, torch.tensor([3]), None, 1)
        again = drafter.step(state, batch.tokens[0, 10:11], None, 0)
        drafter.extend(state, batch.tokens[0, 10:12], drafter.observe(pieces_of(batch.taps, 10, 12)))
        later = drafter.step(state, batch.tokens[0, 12:13], None, 0)
        fresh = state_at(drafter, batch.tokens, batch.taps, 12)
        expected = drafter.step(fresh, batch.tokens[0, 12:13], None, 0)
    torch.testing.assert_close(again, first, atol=1e-5, rtol=0)
    torch.testing.assert_close(later, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_what_was_drafted_and_accepted_is_as_if_it_had_been_read(drafter, batch, variant, num_accepted):
    """Cycles of a chain of three along the true text, with some of it kept; the next draft is that of a fresh state."""
    if variant.startswith("ngram"):
        batch.tokens[0, :24] = batch.tokens[0, :5].repeat(5)[:24]
    text, depth = batch.tokens[0], min(3, drafter.max_depth or 3)
    num_accepted = min(num_accepted, depth)
    state = state_at(drafter, batch.tokens, batch.taps, 4)
    known = 4
    with torch.no_grad():
        for _ in range(3):
            drafted = text[known : known + depth].clone()
            drafted[1 + num_accepted :] = 3  # refused, and therefore not what is kept
            for level in range(depth):
                drafter.step(state, drafted[level : level + 1], None, level)
            end = known + 1 + num_accepted
            memory = drafter.observe(pieces_of(batch.taps, known, end))
            drafter.extend(state, text[known:end], memory, num_kept=min(1 + num_accepted, depth))
            known = end
        after = [drafter.step(state, text[known + level : known + level + 1], None, level) for level in range(depth)]
        fresh = state_at(drafter, batch.tokens, batch.taps, known)
        wanted = [drafter.step(fresh, text[known + level : known + level + 1], None, level) for level in range(depth)]
    for one, other in zip(after, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


# --- Memory ---


def test_memory_of_a_token_depends_on_its_own_taps_alone(drafter, batch):
    changed = Taps(
        None if batch.taps.kv is None else batch.taps.kv.clone(), {d: h.clone() for d, h in batch.taps.hidden.items()}
    )
    for tensor in [*changed.hidden.values(), *([changed.kv] if changed.kv is not None else [])]:
        tensor[:, 7] += 1.0
    with torch.no_grad():
        before, after = drafter.observe(batch.taps), drafter.observe(changed)
    other = torch.arange(batch.tokens.shape[1]) != 7
    for name, memory in before.items():
        assert memory.shape[:2] == batch.tokens.shape
        assert torch.equal(memory[:, other], after[name][:, other])
        assert not torch.equal(memory[:, 7], after[name][:, 7])


def test_observing_in_pieces_is_observing_at_once(drafter, batch):
    batch.tokens[0, 12:24] = batch.tokens[0, :12].clone()  # something for prompt lookup to find
    with torch.no_grad():
        whole = drafter.observe(pieces_of(batch.taps, 0, 20))
        cuts = [(0, 1), (1, 8), (8, 9), (9, 20)]
        parts = [drafter.observe(pieces_of(batch.taps, begin, end)) for begin, end in cuts]
        for name, memory in whole.items():
            torch.testing.assert_close(torch.cat([part[name] for part in parts], dim=1), memory, atol=1e-6, rtol=0)
        state = drafter.new_state(64, 64)
        for (begin, end), part in zip(cuts, parts, strict=True):
            drafter.extend(state, batch.tokens[0, begin:end], part)
        pieced = drafter.step(state, batch.tokens[0, 20:21], None, 0)
        at_once = drafter.step(state_at(drafter, batch.tokens, batch.taps, 20), batch.tokens[0, 20:21], None, 0)
    torch.testing.assert_close(pieced, at_once, atol=1e-5, rtol=0)


def test_observing_needs_only_the_taps_it_names(tiny, drafter, batch):
    bare = taps_of(tiny("llama").target, batch.tokens, drafter.observed)
    with torch.no_grad():
        for name, memory in drafter.observe(batch.taps).items():
            torch.testing.assert_close(drafter.observe(bare)[name], memory)


# --- Weights ---


def test_shapes_and_finiteness(trained, trained_batch):
    drafter, batch = trained, trained_batch
    output = drafter(batch, view_of(batch, drafter))
    assert set(output.features) <= set(drafter.needs.hidden_depths)
    for feature, scale in output.features.values():
        assert feature.shape == (*batch.tokens.shape, drafter.spec.hidden_size)
        assert scale > 0
    for prediction in output.predictions:
        assert prediction.hidden.shape[:2] == prediction.start.shape == batch.tokens.shape
        assert torch.isfinite(prediction.hidden).all()
        assert prediction.score(prediction.hidden[0]).shape == (batch.tokens.shape[1], drafter.vocabulary.size)
    state = state_at(drafter, batch.tokens, batch.taps, 5)
    assert drafter.step(state, torch.tensor([4]), None, 0).shape == (1, drafter.spec.vocab_size)
    siblings = torch.cat([torch.ones(3, 1, dtype=torch.bool), torch.eye(3, dtype=torch.bool)], dim=1)
    logits = drafter.step(state, torch.tensor([1, 2, 3]), siblings, 1)
    assert logits.shape == (3, drafter.spec.vocab_size)


def test_gradients_reach_every_weight_and_none_of_the_target_s(tiny, trained, trained_batch):
    drafter = trained.train()
    losses, config = losses_for(drafter), TrainConfig(clip=1e9)
    result = train_step(drafter, drafter, trained_batch, 0.5, losses, config, torch.Generator().manual_seed(0))
    assert float(result.grad_norm) > 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    model = tiny("llama").target.model
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_nothing_of_the_target_is_saved_or_counted(tiny, drafter, variant):
    frozen = {tensor.data_ptr() for tensor in tiny("llama").target.model.state_dict().values()}
    assert all(tensor.data_ptr() not in frozen for tensor in drafter.state_dict().values())
    assert drafter.num_parameters == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    if variant not in ("medusa-0", "independent-0", "independent-1"):  # those have projections of their own
        sizes = {drafter.spec.vocab_size, drafter.vocabulary.size}
        assert not any(sizes & set(tensor.shape[:1]) for tensor in drafter.state_dict().values() if tensor.ndim > 1)


@pytest.mark.parametrize("term", ["feature", "kl", "acceptance"])
def test_every_loss_is_lowered_by_training_on_it(tiny, trained, trained_batch, term):
    losses = LossConfig(**({"feature": 0.0, "kl": 0.0} | {term: 1.0}))
    if term == "feature" and not trained.config.predicts_features:
        output = trained(trained_batch, view_of(trained_batch, trained))
        assert output.features == {}
        return
    optimiser = Optimiser(trained, AdamWConfig(type="adamw", lr=3e-3), LinearSchedule(type="linear", warmup_steps=1))
    values = []
    for number in range(25):
        generator = torch.Generator().manual_seed(0)
        result = train_step(trained, trained, trained_batch, 0.0, losses, TrainConfig(), generator)
        values.append(result.metrics(losses)["loss"])
        optimiser.step(number, 25, 50)
    assert values[-1] < 0.9 * values[0]


def test_nothing_to_train_is_said_clearly(tiny, variant):
    drafter = build(tiny("llama"), VARIANTS[variant])
    assert (drafter.num_parameters == 0) == variant.startswith(UNTRAINED)
    if variant.startswith(UNTRAINED):
        batch = batch_of(tiny("llama").target, [tiny("llama").prompt(0, 24)], PROMPT, drafter.needs)
        with pytest.raises(ConfigError, match="nothing to train: evaluate it"):
            drafter(batch, view_of(batch, drafter))


def test_a_saved_drafter_drafts_the_same(tiny, learnt, variant, tmp_path):
    target, drafter = tiny("llama"), learnt("llama", variant)
    save_drafter(tmp_path, drafter, "text-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter.json", "drafter.safetensors"]
    assert read_drafter_config(tmp_path) == (drafter.config, target.target.spec, "text-1")
    head = TargetHead.load(target.config, drafter.config.num_target_layers)
    loaded = load_drafter(tmp_path, head, "text-1")
    assert not loaded.training
    assert set(load_file(tmp_path / "drafter.safetensors")) == set(drafter.state_dict())
    tokens = torch.tensor([target.prompt(0, 20)])
    taps = taps_of(target.target, tokens, drafter.needs)
    trees = [tree_of(d, tokens, taps, SHAPES["dynamic"], SamplingParams()) for d in (drafter, loaded)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    with torch.no_grad():
        steps = [d.step(state_at(d, tokens, taps, 9), tokens[0, 9:10], None, 0) for d in (drafter, loaded)]
    if steps[0] is None:
        assert steps[1] is None
    else:
        assert torch.equal(*steps)


def test_a_drafter_of_another_target_is_refused_with_both_fingerprints(tiny, drafter, tmp_path):
    save_drafter(tmp_path, drafter, "text-1")
    other = tiny("mistral").target
    with pytest.raises(MismatchError) as caught:
        load_drafter(tmp_path, TargetHead.of(other, drafter.config.num_target_layers), "text-1")
    assert drafter.spec.fingerprint in str(caught.value)
    assert other.spec.fingerprint in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_target_trained_further_is_another_target(tmp_path):
    """One weight changed in place: same sizes, same config, another fingerprint."""
    first = load_target(tmp_path / "first", seed=0)
    drafter = build(first, VARIANTS["moa-0"])
    save_drafter(tmp_path / "drafter", drafter, "text-1")
    with torch.no_grad():
        first.target.model.lm_head.weight[0, 0] += 1.0
    first.target.model.save_pretrained(first.folder)
    with pytest.raises(MismatchError, match="another target"):
        load_drafter(tmp_path / "drafter", TargetHead.load(first.config), "text-1")


def test_another_tokenizer_or_template_is_refused_with_both_fingerprints(drafter, tmp_path):
    save_drafter(tmp_path, drafter, "text-1")
    with pytest.raises(MismatchError, match=r"text-1.*text-2"):
        load_drafter(tmp_path, drafter.head, "text-2")


def test_a_missing_or_damaged_drafter_is_refused_by_name(drafter, tmp_path):
    with pytest.raises(DataError, match=r"drafter\.json is missing"):
        load_drafter(tmp_path, drafter.head, "text-1")
    save_drafter(tmp_path, drafter, "text-1")
    weights = tmp_path / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"drafter\.safetensors"):
        load_drafter(tmp_path, drafter.head, "text-1")


def test_more_target_layers_than_there_are_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"target_layers is 4; .* 0 to 3"):
        TargetHead.of(tiny("llama").target, 4)
    with pytest.raises(ConfigError, match="target_layers is 2 but the head has 1"):
        VARIANTS["moa-2"].build(TargetHead.of(tiny("llama").target, 1))


# --- The head from disk ---


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_head_read_from_disk_is_the_target_s_own(tiny, target_name, layers):
    target = tiny(target_name)
    shared, read = TargetHead.of(target.target, layers), TargetHead.load(target.config, layers)
    tokens = torch.tensor([target.prompt(0, 12)])
    hidden = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    outputs = []
    with torch.no_grad():
        for head in (shared, read):
            last = head.run_last_layers(hidden, torch.arange(12)[None], mask, head.new_cache(12))
            outputs.append((head.embed(tokens), head.logits(hidden), last))
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert read.spec == shared.spec
    assert not read.weight.requires_grad


def test_the_head_s_layers_are_the_target_s_last(tiny, target_name):
    """Run on the real residual stream and the real K/V, they give the target's own last hidden state."""
    target = tiny(target_name).target
    tokens = torch.tensor([tiny(target_name).prompt(0, 12)])
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    for layers in (1, 2):
        head = TargetHead.of(target, layers)
        cache = target.new_cache(12)
        output = target.forward(tokens, torch.arange(12)[None], mask, cache, (-1 - layers,))
        with torch.no_grad():
            hidden = output.hidden[-1 - layers].clone()
            last = head.run_last_layers(hidden, torch.arange(12)[None], mask, head.new_cache(12))
        torch.testing.assert_close(last, output.last, atol=1e-5, rtol=0)


# --- Trees ---

TREE_SHAPES = [
    *SHAPES.values(),
    ChainShape(type="chain", depth=1),
    FixedShape(type="fixed", branching=(1, 1, 1)),
    FixedShape(type="fixed", branching=(2, 3, 2)),
    SparseShape(type="sparse", paths=((0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 2))),
    DynamicShape(type="dynamic", depth=1, breadth=5, nodes=5),
    DynamicShape(type="dynamic", depth=6, breadth=8, nodes=62),
]
ALL_PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=1, rule="rejection"),
    SamplingParams(temperature=1.0, seed=1, rule="rejection", top_k=5),
]


def tree_of(drafter: Drafter, tokens: torch.Tensor, taps: Taps, shape, params: SamplingParams) -> TokenTree:
    """The tree drafted below token 10."""
    select = Sampler(params, drafter.spec.vocab_size, torch.device("cpu")).selector(
        10, shape.depth, isinstance(shape, ChainShape)
    )
    with torch.no_grad():
        return drafter.propose(state_at(drafter, tokens, taps, 10), tokens[0, 10:11], shape, select)


@pytest.mark.parametrize("shape", TREE_SHAPES, ids=lambda shape: shape.name)
def test_every_drafted_tree_is_sound(drafter, batch, shape, variant):
    batch.tokens[0, 9:18] = batch.tokens[0, :9].clone()  # something for prompt lookup to find
    for params in ALL_PARAMS:
        tree = tree_of(drafter, batch.tokens, batch.taps, shape, params)
        parents, depths, tokens = tree.parents.tolist(), tree.depths.tolist(), tree.tokens.tolist()
        whole = not variant.startswith("ngram")  # which ends where nothing matches
        assert tree.num_nodes == shape.num_nodes + 1 if whole else 1 <= tree.num_nodes <= shape.num_nodes + 1
        assert (parents[0], depths[0], tokens[0]) == (-1, 0, int(batch.tokens[0, 10]))
        assert shape.depth >= tree.max_depth >= max(depths)
        assert tree.max_depth == shape.depth or not whole
        ancestors = torch.eye(tree.num_nodes, dtype=torch.bool)
        for node in range(1, tree.num_nodes):
            assert 0 <= parents[node] < node, "a parent stands before its children"
            assert depths[node] == depths[parents[node]] + 1
            ancestors[node] |= ancestors[parents[node]]
        assert torch.equal(tree.ancestors, ancestors)
        assert len(set(zip(parents, tokens, strict=True))) == tree.num_nodes, "siblings differ"
        assert all(0 <= token < drafter.spec.vocab_size for token in tokens)
        sampled = params.rule == "rejection" and isinstance(shape, ChainShape) and not params.is_greedy and depths[1:]
        assert (tree.draft_probs is not None) == bool(sampled)
        if tree.draft_probs is not None:
            torch.testing.assert_close(tree.draft_probs.sum(dim=-1), torch.ones(tree.num_nodes))
            assert all(float(tree.draft_probs[node, tokens[node]]) > 0 for node in range(1, tree.num_nodes))


def test_targets_of_this_suite_differ(tiny):
    fingerprints = {tiny(name).target.spec.fingerprint for name in TARGETS}
    assert len(fingerprints) == len(TARGETS)
