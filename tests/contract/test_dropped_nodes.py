"""SpaDec: dropping nodes of a draft at a layer of the sparse target changes what is read, never the text."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from in_turn import in_turn
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build, taught_by
from tiny_targets import MAX_POSITIONS, TinyTarget, load_sparse_target, load_target

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.node_selection import LikelyNodes, NodeSelector, selector_of
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.targets.sparse.predictor import PREDICTOR, Predictor, load_predictor
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape
from moray.trees.tree import chain_of

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

NEW, CAPACITY, LAYERS, AT = 24, 400, 6, 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    found = load_sparse_target(tmp_path_factory.mktemp("sparse"), 4, 2, num_hidden_layers=LAYERS)
    save_predictor(found.target)
    return found


@pytest.fixture(scope="module")
def taught(tiny) -> Callable[[str], Drafter]:
    """taught(variant): a drafter overfitted on the target's greedy answer to prompt 0."""
    return taught_by(tiny, plain(tiny, tiny.prompt(), GREEDY), 4)


def save_predictor(target) -> Predictor:
    weight = torch.randn(target.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    predictor = Predictor(AT, weight, torch.tensor(0.3), target.spec.fingerprint)
    predictor.save(target.folder)
    return predictor


def plain(tiny: TinyTarget, prompt: list[int], params) -> list[int]:
    return PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, params, NEW, ()).tokens


class _Some(NodeSelector):
    """Keeps a random part of each draft, and notes how many nodes it saw and kept."""

    def __init__(self) -> None:
        super().__init__(AT)
        self._generator = torch.Generator().manual_seed(1)
        self.seen: list[tuple[int, int]] = []

    def choose(self, tree, hidden):
        assert hidden.shape[0] == tree.num_nodes
        parents, kept = tree.parents.tolist(), [0]
        for node in range(1, tree.num_nodes):
            if parents[node] in kept and torch.rand((), generator=self._generator) < 0.6:
                kept.append(node)
        self.seen.append((tree.num_nodes, len(kept)))
        return kept


@in_turn(
    ("variant", "shape"),
    [name for name in VARIANTS if name.endswith("-0")] + ["moa-1"],
    ["chain", "fixed", "dynamic"],
    whole=["eagle-0"],
)
def test_dropping_any_nodes_changes_no_token(tiny, taught, variant, shape):
    drafter = taught(variant)
    selector = _Some()
    decoder = SpeculativeDecoder(tiny.target, drafter, SHAPES[shape], CAPACITY, selector=selector)
    num_accepted = 0
    for seed, params in ((0, GREEDY), (1, COUPLED), (2, COUPLED)):
        prompt = tiny.prompt(seed, 9 if not seed else 70)
        found = decoder.generate(prompt, params, NEW, ())
        assert found.tokens == plain(tiny, prompt, params)
        num_accepted += sum(found.accepted)
    assert num_accepted or variant.startswith(("ngram", "pretrained"))
    if not variant.startswith("ngram"):  # it may have found nothing
        assert any(kept < seen for seen, kept in selector.seen)


class _Nothing(NodeSelector):
    """Drops every node."""

    def choose(self, tree, hidden):
        return [0]


def test_a_draft_that_is_dropped_whole_counts_as_refused(tiny, taught):
    """Otherwise nothing would ever be learnt about it, and drafting would go on."""
    drafter = taught("eagle-0")
    shape = SHAPES["chain"]
    config = EngineConfig(max_num_seqs=1, kv_cache_tokens=512, max_model_len=CAPACITY, tree=shape)
    source = LocalDrafts(drafter, CAPACITY, shape.num_expanded)
    engine = Engine(tiny.target, config, (), drafts={"d": source}, selector=_Nothing(AT))
    recorded = []
    engine.draft_schedulers["d"].controller.record = lambda levels, accepted, *_, **__: recorded.append(accepted)
    engine.submit(Request(prompt=tuple(tiny.prompt()), max_new_tokens=NEW))
    tokens = []
    while engine.is_busy:
        tokens += [token for update in engine.step() for token in update.tokens]
    assert tokens == plain(tiny, tiny.prompt(), GREEDY)
    assert recorded == [0] * (NEW - 1)
    assert engine.stats.num_drafts == NEW - 1
    assert engine.stats.num_draft_tokens >= NEW - 1


def answers(engine: Engine, requests: list[Request]) -> list[tuple[list[int], list]]:
    numbers = [engine.submit(request) for request in requests]
    found = {number: ([], []) for number in numbers}
    while engine.is_busy:
        for update in engine.step():
            found[update.number][0].extend(update.tokens)
            found[update.number][1].extend(update.logprobs or [])
    return [found[number] for number in numbers]


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_penalties_and_logprobs_are_those_of_plain_decoding(tiny, taught, max_num_seqs):
    drafter = taught("eagle-0")
    shape = SHAPES["dynamic"]
    config = EngineConfig(max_num_seqs=max_num_seqs, kv_cache_tokens=3 * 512, max_model_len=CAPACITY, tree=shape)
    requests = [
        Request(
            prompt=tuple(tiny.prompt(seed, 9 + seed)),
            max_new_tokens=NEW,
            params=params,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logprobs=2,
        )
        for seed, params in enumerate((GREEDY, COUPLED, GREEDY))
    ]
    wanted = answers(Engine(tiny.target, config, ()), requests)
    source = LocalDrafts(drafter, CAPACITY, shape.num_expanded)
    selector = _Some()
    found = answers(Engine(tiny.target, config, (), drafts={"d": source}, selector=selector), requests)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, own), (_, other) in zip(found, wanted, strict=True):
        assert [one.token for one in own] == pytest.approx([one.token for one in other], abs=1e-4)
    assert bool(selector.seen), "the last sequence is alone at the end"


@pytest.mark.parametrize("select", ["trie", "path", "budget", "drafter"])
@pytest.mark.parametrize("shape", ["dynamic", "adaptive"])
def test_every_selection_gives_the_target_s_text_and_computes_less(tiny, taught, select, shape, monkeypatch):
    if select == "drafter":
        monkeypatch.setattr(Predictor, "probabilities", None)
    tree = SHAPES["dynamic"] if shape == "dynamic" else AdaptiveShape(type="adaptive", depth=3, breadth=3, nodes=9)
    drafter = taught("eagle-0")
    run = {}
    for name in ("all", select):
        tiny.target.counts.num_rows_run = tiny.target.counts.num_rows = 0
        decoder = SpeculativeDecoder(
            tiny.target, drafter, tree, CAPACITY, selector=selector_of(tiny.target, name, tree)
        )
        for seed in range(2):
            prompt = tiny.prompt(seed, 9)
            assert decoder.generate(prompt, GREEDY, NEW, ()).tokens == plain(tiny, prompt, GREEDY)
        run[name] = tiny.target.counts.rows_run
    if shape == "dynamic":  # an adaptive tree may draft nothing
        assert run[select] < run["all"]


@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_a_rule_that_dropping_would_bend_is_refused(tiny, method):
    shape = SHAPES["chain"]
    decoder = SpeculativeDecoder(tiny.target, build(tiny, VARIANTS["eagle-0"]), shape, selector=_Some())
    params = SamplingParams(temperature=1.0, acceptance_method=method)
    with pytest.raises(DataError, match=rf"acceptance_method is '{method}', but this target drops nodes"):
        decoder.generate([1, 2, 3], params, 4, ())
    plainly = SpeculativeDecoder(tiny.target, None, selector=_Some())
    assert len(plainly.generate([1, 2, 3], params, 4, ()).tokens) == 4, "nothing is dropped where nothing is drafted"


def test_what_cannot_be_selected_is_refused(tiny, tmp_path):
    sparse = load_sparse_target(tmp_path / "sparse", None, 2, num_hidden_layers=LAYERS)
    dense = load_target(tmp_path / "dense", "llama")
    chain = SHAPES["chain"]
    for target, select, message in (
        (sparse.target, "path", r"engine.select needs a predictor, and there is no predictor.safetensors"),
        (dense.target, "path", r"engine.select is 'path', which is for sparse targets; this one is dense"),
        (tiny.target, "drafter", r"engine.select is 'drafter', which needs drafts with scores; 'chain-\d' has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            selector_of(target, select, chain)
    config = EngineConfig(tree=chain, select="path")
    with pytest.raises(ConfigError, match=r"engine.select is 'path', which is for sparse targets"):
        Engine(dense.target, config, ())


def test_a_tree_without_scores_is_kept_whole_where_scores_decide(tiny):
    selector = LikelyNodes(save_predictor(tiny.target), is_path=True, by_drafter=True)
    assert selector.choose(chain_of(torch.tensor([1, 2, 3])), torch.zeros(3, 64)) == [0, 1, 2]


def test_a_predictor_is_read_back_and_a_wrong_one_is_refused(tmp_path):
    target = load_sparse_target(tmp_path, None, 2, num_hidden_layers=LAYERS).target
    assert isinstance(target, SparseTarget)
    predictor = save_predictor(target)
    found = load_predictor(tmp_path, target.spec, "engine.select")
    assert found.layer == AT
    assert torch.equal(found.weight, predictor.weight)
    assert found.auc is None
    replace(predictor, auc=0.75).save(target.folder)
    assert load_predictor(tmp_path, target.spec, "engine.select").auc == 0.75
    for wrong in ({"hidden_size": 32}, {"num_layers": AT}, {"fingerprint": "another"}):
        with pytest.raises(ConfigError, match="was trained for another target: train it with"):
            load_predictor(tmp_path, target.spec.model_copy(update=wrong), "engine.select")
    (tmp_path / PREDICTOR).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_predictor(tmp_path, target.spec, "engine.select")
    assert isinstance(load_sparse_again(tmp_path), SparseTarget), "it loads all the same"


def load_sparse_again(folder) -> Target:
    return Target.load(TargetConfig(model=str(folder), device="cpu"))
