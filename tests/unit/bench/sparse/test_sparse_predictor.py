"""The predictor of accepted nodes: what it learns from, and what it learns."""

import pytest
import torch
from shape_checks import unchecked
from side_by_side import GREEDY, SHAPES
from tiny_drafters import VARIANTS, build, overfit
from tiny_targets import MAX_POSITIONS, load_sparse_target, save_chat_target

from moray.bench.sparse.configs import PredictorConfig
from moray.bench.sparse.node_pairs import DraftPairs, Pairs, collect_pairs, on_path
from moray.bench.sparse.predictor import auc, fit, train_predictor
from moray.config import validate
from moray.decoding.engine.node_selection import selector_of
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import PlainDecoder
from moray.errors import ConfigError, DataError
from moray.trees.tree import TokenTree, structure_of


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


def test_pairs_are_nodes_of_drafts_and_whether_they_came_true(tmp_path):
    tiny = load_sparse_target(tmp_path, 4, 2, num_hidden_layers=6)
    prompts = [tiny.prompt(seed, 9) for seed in range(4)]
    texts = [PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, GREEDY, 24, ()).tokens for prompt in prompts]
    drafter = overfit(tiny, build(tiny, VARIANTS["eagle-0"]), texts[0], 4)
    pairs = collect_pairs(tiny.target, drafter, SHAPES["dynamic"], 2, prompts, 24, 10_000, ())
    decoder = SpeculativeDecoder(tiny.target, drafter, SHAPES["dynamic"])
    accepted = [sum(decoder.generate(prompt, GREEDY, 24, ()).accepted) for prompt in prompts]
    for index, count in enumerate(accepted):
        own = [sum(labels) for labels, at in zip(pairs.is_accepted, pairs.prompts, strict=True) if at == index]
        assert count <= sum(own) <= count + SHAPES["dynamic"].depth, "the last draft may reach past the answer's end"
    assert all(hidden.shape[0] == len(own) for hidden, own in zip(pairs.hidden, pairs.is_accepted, strict=True))
    few = collect_pairs(tiny.target, drafter, SHAPES["dynamic"], 2, prompts, 24, 20, ())
    assert set(few.prompts) == {0}, "enough nodes: no more prompts"
    train, test = pairs.split(0.3)
    assert len(train.is_accepted) + len(test.is_accepted) == pairs.num_nodes
    predictor = fit(train, 2, tiny.target.spec.fingerprint)
    assert predictor.layer == 2
    predictor.save(tiny.target.folder)
    for select in ("path", "budget"):
        selector = selector_of(tiny.target, select, SHAPES["dynamic"])
        selected = SpeculativeDecoder(tiny.target, drafter, SHAPES["dynamic"], selector=selector)
        assert [selected.generate(prompt, GREEDY, 24, ()).tokens for prompt in prompts] == texts


def test_labels_follow_the_emitted_tokens():
    structure = structure_of([-1, 0, 0, 1, 1, 3], [0, 1, 1, 2, 2, 3], torch.device("cpu"))
    tree = TokenTree(torch.tensor([5, 6, 7, 8, 9, 6]), structure.parents, structure.depths, structure.ancestors, 3)
    assert on_path(tree, [6, 8, 1]) == [True, True, False, True, False, False]
    assert on_path(tree, [6, 8, 6, 2]) == [True, True, False, True, False, True]
    assert on_path(tree, [1]) == [True, *[False] * 5]


def test_what_can_be_told_apart_is_and_hidden_states_may_have_any_scale():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(800, 12, generator=generator) * torch.logspace(-2, 3, 12) + 5
    labels = (hidden[:, 3] - hidden[:, 3].mean()) / hidden[:, 3].std() + 0.3 * torch.randn(
        800, generator=generator
    ) > 0.5
    predictor = fit(Pairs(hidden[:600], labels[:600]), 3, "")
    probabilities = torch.tensor(predictor.probabilities(hidden[600:]))
    assert auc(probabilities, labels[600:]) > 0.95
    assert float(probabilities.mean()) == pytest.approx(float(labels[600:].float().mean()), abs=0.08)


def test_auc_is_the_share_of_pairs_in_the_right_order():
    accepted = torch.tensor([True, True, False, False, False])
    assert auc(torch.tensor([0.9, 0.5, 0.5, 0.1, 0.7]), accepted) == pytest.approx((3 + 1.5) / 6)
    assert auc(torch.ones(5), accepted) == 0.5


def test_drafts_that_teach_nothing_are_refused():
    pairs = DraftPairs([torch.zeros(2, 3), torch.zeros(2, 3)], [[True, True], [True, False]], [0, 1])
    with pytest.raises(DataError, match="2 training nodes are all accepted, or all refused"):
        pairs.split(0.5)


def test_a_dense_target_has_nothing_to_predict(tmp_path):
    save_chat_target(tmp_path / "dense")
    settings = {"target": {"model": str(tmp_path / "dense")}, "drafter": {"type": "ngram"}, "chats": "none.jsonl"}
    with pytest.raises(ConfigError, match=r"is dense: give a target made by pipelines\.sparsify"):
        train_predictor(validate(PredictorConfig, settings))
