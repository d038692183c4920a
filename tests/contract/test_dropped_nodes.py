"""SpaDec: dropping nodes of a draft at a layer of the sparse target changes what is read, never the text."""

import pytest
import torch
from shape_checks import unchecked
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build, overfit
from tiny_targets import MAX_POSITIONS, TinyTarget, load_sparse_target

from moray.decoding.engine.node_selection import NodeSelector
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.errors import ConfigError, DataError
from moray.targets.sparse.predictor import PREDICTOR, Predictor, load_predictor
from moray.targets.sparse.target import SparseTarget

NEW, CAPACITY, LAYERS, AT = 24, 400, 6, 2


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    found = load_sparse_target(tmp_path_factory.mktemp("sparse"), 4, 2, num_hidden_layers=LAYERS)
    assert isinstance(found.target, SparseTarget)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(found.target.spec.hidden_size, generator=generator)
    found.target.predictor = Predictor(AT, weight, torch.tensor(0.3))
    return found


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


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("-0")] + ["moa-1"])
@pytest.mark.parametrize("shape", ["chain", "fixed", "dynamic"])
def test_dropping_any_nodes_changes_no_token(tiny, variant, shape):
    drafter = overfit(tiny, build(tiny, VARIANTS[variant]), plain(tiny, tiny.prompt(), GREEDY), 4)
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


@pytest.mark.parametrize("select", ["trie", "path", "budget", "drafter"])
def test_every_selection_gives_the_target_s_text_and_computes_less(tiny, select):
    drafter = overfit(tiny, build(tiny, VARIANTS["eagle-0"]), plain(tiny, tiny.prompt(), GREEDY), 4)
    run = {}
    for name in ("all", select):
        tiny.target.counts.num_rows_run = tiny.target.counts.num_rows = 0
        decoder = SpeculativeDecoder(tiny.target, drafter, SHAPES["dynamic"], CAPACITY, select=name)
        for seed in range(2):
            prompt = tiny.prompt(seed, 9)
            assert decoder.generate(prompt, GREEDY, NEW, ()).tokens == plain(tiny, prompt, GREEDY)
        run[name] = tiny.target.counts.rows_run
    assert run[select] < run["all"]


def test_a_rule_that_dropping_would_bend_is_refused(tiny):
    decoder = SpeculativeDecoder(tiny.target, build(tiny, VARIANTS["eagle-0"]), SHAPES["chain"], select="path")
    params = SamplingParams(temperature=1.0, acceptance_method="rejection")
    with pytest.raises(DataError, match=r"acceptance_method is 'rejection', but this target drops nodes"):
        decoder.generate([1, 2, 3], params, 4, ())


def test_a_target_without_a_predictor_is_refused(tiny, tmp_path):
    sparse = load_sparse_target(tmp_path, None, 2, num_hidden_layers=LAYERS)
    with pytest.raises(ConfigError, match=r"engine.select is 'path', but there is no predictor.safetensors"):
        SpeculativeDecoder(sparse.target, build(sparse, VARIANTS["eagle-0"]), SHAPES["chain"], select="path")


def test_a_predictor_is_read_back_and_a_wrong_one_is_refused(tiny, tmp_path):
    predictor = tiny.target.predictor
    spec = tiny.target.spec
    assert load_predictor(tmp_path, spec.hidden_size, LAYERS) is None
    predictor.save(tmp_path)
    found = load_predictor(tmp_path, spec.hidden_size, LAYERS)
    assert found is not None
    assert found.layer == AT
    assert torch.equal(found.weight, predictor.weight)
    with pytest.raises(ConfigError, match="train the predictor again"):
        load_predictor(tmp_path, spec.hidden_size + 1, LAYERS)
    with pytest.raises(ConfigError, match="train the predictor again"):
        load_predictor(tmp_path, spec.hidden_size, AT)
    (tmp_path / PREDICTOR).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_predictor(tmp_path, spec.hidden_size, LAYERS)
