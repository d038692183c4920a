"""EAGLE against its definition: FC over [embedding of token i ; feature i-1], then a layer without input norm."""

import pytest
import torch
from reference import Reference, scrambled
from tiny_batches import batch_of, taps_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from torch import Tensor

from moray.drafters.eagle import Eagle
from moray.drafters.learner import DraftView

LENGTH = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("eagle"), num_hidden_layers=2, hidden_size=32)


@pytest.fixture
def drafter(tiny) -> Eagle:
    drafter = scrambled(build(tiny, VARIANTS["eagle-0"]))
    assert isinstance(drafter, Eagle)
    return drafter


@pytest.fixture
def batch(tiny, drafter):
    return batch_of(tiny.target, [tiny.prompt(3, LENGTH)], 4, drafter.needs)


class EagleReference(Reference):
    """The formulas of EAGLE for one sequence."""

    def __init__(self, drafter: Eagle) -> None:
        super().__init__(drafter, fused=("layer.attention",))
        self.head_dim = drafter.spec.head_dim

    def predict(self, tokens: list[int], features: list[Tensor]) -> Tensor:
        """The feature at the last of `tokens`; `features` are those of all tokens but the last."""
        before = [torch.zeros_like(self.embedding[0]), *features]
        inputs = [
            self.linear("fc", torch.cat([self.embedding[token], feature]))
            for token, feature in zip(tokens, before, strict=True)
        ]
        sources = [self.source("layer.attention", x, i, self.head_dim, self.rope_theta) for i, x in enumerate(inputs)]
        x = inputs[-1] + self.attend("layer.attention", inputs[-1], len(inputs) - 1, sources, self.rope_theta)
        return x + self.mlp("layer.mlp", self.norm("layer.mlp_norm", x))

    def draft(self, tokens: list[int], features: list[Tensor]) -> Tensor:
        """Logits after the last of `tokens`, where features past those given are its own predictions."""
        own = list(features)
        while len(own) < len(tokens):
            own.append(self.predict(tokens[: len(own) + 1], own))
        return self.lm_head @ own[-1]


def view_of(batch, seed: int = 0) -> DraftView:
    before = torch.arange(-1, batch.tokens.shape[1] - 1).clamp(min=0)[None]
    return DraftView(before, torch.zeros(1, dtype=torch.bool), seed)


def begun(drafter: Eagle, batch, length: int):
    """A state that knows the first `length` tokens and their real features."""
    taps = batch.taps.hidden[-1][:, :length]
    state = drafter.new_state(32, 16)
    drafter.extend(state, batch.tokens[0, :length], {"feature": taps})
    return state


def test_features_are_those_of_the_definition(drafter, batch):
    with torch.no_grad():
        output = drafter(batch, view_of(batch))
    predicted, scale, weight = output.features[-1]
    assert scale == weight == 1.0
    assert predicted is output.predictions[0].hidden, "one output serves both losses"
    reference, features = EagleReference(drafter), list(batch.taps.hidden[-1][0].double())
    tokens = batch.tokens[0].tolist()
    for i in range(LENGTH):
        wanted = reference.predict(tokens[: i + 1], features[:i])
        torch.testing.assert_close(predicted[0, i].double(), wanted, rtol=2e-4, atol=2e-4)
    logits = output.predictions[0].score(predicted[0]).double()
    torch.testing.assert_close(logits[-1], reference.lm_head @ wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("known", [1, 5])
def test_several_steps_feed_on_the_drafter_s_own_features(drafter, batch, known):
    reference, features = EagleReference(drafter), list(batch.taps.hidden[-1][0].double())
    tokens = batch.tokens[0].tolist()
    state = begun(drafter, batch, known)
    for depth in range(4):
        with torch.no_grad():
            logits = drafter.step(state, batch.tokens[0, known + depth : known + depth + 1], None, depth)
        path = tokens[: known + depth + 1]
        torch.testing.assert_close(logits[0].double(), reference.draft(path, features[:known]), rtol=1e-3, atol=1e-3)
        if depth:
            real = reference.draft(path, features[: known + depth])
            assert float((logits[0] - real).abs().max()) > 0.01, "the target's features would give the same"


def test_a_node_reads_its_parent_s_feature(drafter, batch):
    """Children out of their parents' order, so that neither place nor neighbourhood can stand for parentage.

    0 root;  1, 2, 3 its children;  4 below 3, 5 below 1, 6 below 1;  7 below 5, 8 below 4
    """
    parents, levels = [-1, 0, 0, 0, 3, 1, 1, 5, 4], [(0, 1), (1, 4), (4, 7), (7, 9)]
    tokens, known = [21, 5, 6, 7, 8, 9, 10, 8, 9], 6
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node in range(1, len(parents)):
        ancestors[node] |= ancestors[parents[node]]
    reference, features = EagleReference(drafter), list(batch.taps.hidden[-1][0, :known].double())
    state = begun(drafter, batch, known)
    for depth, (begin, end) in enumerate(levels):
        with torch.no_grad():
            logits = drafter.step(state, torch.tensor(tokens[begin:end]), ancestors[begin:end, :end], depth)
        for node in range(begin, end):
            path = [tokens[above] for above in range(node + 1) if ancestors[node, above]]
            wanted = reference.draft([*batch.tokens[0, :known].tolist(), *path], features)
            torch.testing.assert_close(logits[node - begin].double(), wanted, rtol=1e-3, atol=1e-3)


def test_a_state_extended_after_a_draft_reads_the_target_s_features_again(drafter, batch):
    reference, features = EagleReference(drafter), list(batch.taps.hidden[-1][0].double())
    state = begun(drafter, batch, 4)
    with torch.no_grad():
        for depth in range(3):
            drafter.step(state, torch.tensor([depth]), None, depth)
        drafter.extend(state, batch.tokens[0, 4:6], {"feature": batch.taps.hidden[-1][:, 4:6]})
        logits = drafter.step(state, batch.tokens[0, 6:7], None, 0)
    wanted = reference.draft(batch.tokens[0, :7].tolist(), features[:6])
    torch.testing.assert_close(logits[0].double(), wanted, rtol=1e-3, atol=1e-3)


def inputs_of(drafter: Eagle, batch, seed: int = 0) -> Tensor:
    """What the FC reads in one forward pass: [seq, embedding ; feature]."""
    seen = []
    handle = drafter.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].detach()))
    drafter(batch, view_of(batch, seed))
    handle.remove()
    return seen[0]


def test_noise_is_uniform_on_features_in_training_alone(tiny):
    drafter = build(tiny, VARIANTS["eagle-0"].model_copy(update={"feature_noise": 0.5}))
    batch = batch_of(tiny.target, [tiny.prompt(3, 100)], 4, drafter.needs)
    clean = inputs_of(drafter, batch)
    width = drafter.spec.hidden_size
    assert torch.equal(clean[1:, width:], batch.taps.hidden[-1][0, :-1])
    assert torch.equal(clean[0, width:], torch.zeros(width))
    noise = (inputs_of(drafter.train(), batch, seed=3) - clean)[1:]
    assert not noise[:, :width].any(), "embeddings are exact"
    noise = noise[:, width:]
    assert -0.2501 < float(noise.min()) < -0.24
    assert 0.24 < float(noise.max()) < 0.2501
    assert abs(float(noise.mean())) < 0.01
    assert float(noise.std()) == pytest.approx(0.5 / 12**0.5, rel=0.02)
    quiet = build(tiny, VARIANTS["eagle-0"].model_copy(update={"feature_noise": 0.0})).train()
    assert torch.equal(inputs_of(quiet, batch), clean)


def test_noise_is_a_function_of_the_view_s_seed(drafter, batch):
    drafter.train()
    torch.manual_seed(1)
    first = inputs_of(drafter, batch, seed=7)
    torch.manual_seed(2)
    assert torch.equal(inputs_of(drafter, batch, seed=7), first)
    assert not torch.equal(inputs_of(drafter, batch, seed=8), first)


def test_only_the_last_hidden_state_is_needed(tiny, drafter):
    assert drafter.needs.kv_layers == ()
    assert drafter.needs.hidden_depths == (-1,)
    taps = taps_of(tiny.target, torch.tensor([tiny.prompt(0, 5)]), drafter.needs)
    assert torch.equal(drafter.observe(taps)["feature"], taps.hidden[-1])
