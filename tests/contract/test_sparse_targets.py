"""Sparse targets: a draft verified in one pass gives the text that the same target gives alone, token by token.

The text is not the dense model's. Four computations of it are compared: plain decoding and an engine of one sequence,
whose caches drop skipped tokens; an engine of several, which hides them; and one pass over the whole text without a
cache.
"""

import random
from collections.abc import Callable

import pytest
import torch
from in_turn import in_turn
from shape_checks import unchecked
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build, taught_by
from tiny_targets import MAX_POSITIONS, TinyTarget, load_sparse_target

from moray.activations.capture.record import KVRecorder
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.engine.sparse_kv_cache import SparseSingleKVCache
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.sparse.cache import SparseCache
from moray.targets.sparse.target import SparseTarget
from moray.trees.tree import TokenTree, structure_of

NEW, CAPACITY, LAYERS = 24, 400, 6


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture(scope="module", params=[None, 4], ids=["whole", "4 bits"])
def tiny(tmp_path_factory, request) -> TinyTarget:
    return load_sparse_target(tmp_path_factory.mktemp("sparse"), request.param, 2, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def taught(tiny) -> Callable[[str], Drafter]:
    """taught(variant): a drafter overfitted on the target's greedy answer to prompt 0."""
    return taught_by(tiny, plain(tiny, tiny.prompt(), GREEDY), 4)


def whole_pass(target: SparseTarget, tokens: list[int], layers=()):
    """One pass over a text, without a cache."""
    recorder = KVRecorder(target, layers)
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    return target.forward(ids, positions, None, recorder), recorder


def plain(tiny: TinyTarget, prompt: list[int], params) -> list[int]:
    return PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, params, NEW, ()).tokens


def test_about_half_of_the_tokens_run_and_they_differ(tiny):
    output, _ = whole_pass(tiny.target, tiny.prompt(0, 200))
    assert output.routes is not None
    routes = output.routes[:, 0]
    assert routes[0].all(), "the first layer has no router"
    assert routes[:, :2].all(), "the first tokens run through every layer"
    shares = routes[1:].float().mean(dim=1)
    assert ((shares[:-2] > 0.2) & (shares[:-2] < 0.8)).all()
    assert (shares[-2:] == 1).all(), "nor have the last two"
    assert len({tuple(column) for column in routes.T.tolist()}) > 3, "tokens take different layers"


def test_plain_decoding_is_a_pass_over_the_whole_text(tiny):
    prompt = tiny.prompt(0, 30)
    text = plain(tiny, prompt, GREEDY)
    output, _ = whole_pass(tiny.target, [*prompt, *text])
    logits = tiny.target.logits(output.last[0, len(prompt) - 1 : -1])
    assert logits.argmax(dim=1).tolist() == text


def test_what_plain_decoding_keeps_is_what_ran(tiny):
    target = tiny.target
    tokens = tiny.prompt(0, 40)
    output, recorder = whole_pass(target, tokens, range(LAYERS))
    cache = target.new_cache(64)
    assert isinstance(cache, SparseCache)
    begin = 0
    for count in (7, 1, 12, 20):  # the last of each are not kept at first
        for kept in sorted({max(1, count - 3), count}):
            ids, positions = torch.tensor([tokens[begin : begin + kept]]), torch.arange(begin, begin + kept)[None]
            mask = torch.ones(1, 1, kept, begin + kept, dtype=torch.bool).tril(begin) if kept > 1 else None
            found = target.forward(ids, positions, mask, cache)
            assert found.routes is not None
            assert torch.equal(found.routes[:, 0], output.routes[:, 0, begin : begin + kept])
            torch.testing.assert_close(found.last[0], output.last[0, begin : begin + kept], atol=1e-4, rtol=0)
            if kept == count:
                cache.commit(count)
        begin += count
    assert cache.num_stored == int(output.routes.sum())
    for layer in range(LAYERS):
        key, value = recorder.take(layer)
        flat = cache.flat(0, 40, [layer])[0, :, 0].view(40, 2, 2, 16)
        torch.testing.assert_close(flat[:, :, 0], key[0].transpose(0, 1), atol=1e-4, rtol=0)
        torch.testing.assert_close(flat[:, :, 1], value[0].transpose(0, 1), atol=1e-4, rtol=0)
        assert (flat[~output.routes[layer, 0]] == 0).all()


def random_tree(generator: random.Random) -> TokenTree:
    """A root and up to nine nodes below it, in any structure."""
    parents = [-1]
    for node in range(1, generator.randint(1, 10)):
        parents.append(generator.randrange(max(0, node - 4), node))
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    parts = structure_of(parents, depths, torch.device("cpu"))
    tokens = torch.tensor([generator.randrange(1, 90) for _ in parents])
    return TokenTree(tokens, parts.parents, parts.depths, parts.ancestors, max(depths))


def random_path(tree: TokenTree, generator: random.Random) -> list[int]:
    """A node of a tree and its ancestors, without the root; nothing for the root itself."""
    node, path = generator.randrange(tree.num_nodes), list[int]()
    while node:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


@torch.inference_mode()
def test_after_200_commits_of_trees_the_loop_s_cache_holds_what_ran(tiny):
    generator, tokens, num_moved = random.Random(0), tiny.prompt(0, 20), 0
    runner = TargetRunner(tiny.target, 512, max_rows=1)
    runner.cache.arrange(512, 0, 0)
    assert isinstance(runner.cache, SparseSingleKVCache)
    runner.read(0, [tokens], [0])
    for turn in range(200):
        if turn in (60, 120):  # the next request
            tokens = tiny.prompt(turn, 20)
            runner.read(0, [tokens], [0])
        tree = random_tree(generator)
        found = runner.verify(0, [len(tokens)], [tree])
        path = random_path(tree, generator) if len(tokens) < 300 else []
        runner.keep(0, [len(tokens)], [path])
        num_moved += path != list(range(1, 1 + len(path)))
        tokens = [*tokens, *tree.tokens[[0, *path]].tolist()]
    runner.cache.aim([len(tokens)], 1, len(tokens) + 1)
    output, recorder = whole_pass(tiny.target, tokens, range(LAYERS))
    assert runner.cache.num_stored == int(output.routes.sum()) < LAYERS * len(tokens)
    torch.testing.assert_close(found.last[0, [0, *path]], output.last[0, -1 - len(path) :], atol=1e-4, rtol=0)
    flat = runner.cache.flat([0], [0], [len(tokens)], range(LAYERS))[0]
    for layer in range(LAYERS):
        key, value = (side[0].transpose(0, 1) for side in recorder.take(layer))
        runs, own = output.routes[layer, 0, :, None, None], flat[:, layer].view(len(tokens), 2, 2, 16)
        torch.testing.assert_close(own[:, :, 0], key * runs, atol=1e-4, rtol=0)
        torch.testing.assert_close(own[:, :, 1], value * runs, atol=1e-4, rtol=0)
    assert num_moved > 50


def test_the_engine_s_taps_of_several_rows_are_zero_where_a_token_skipped(tiny):
    """Wrong ones would only draft worse, which no test of the text shows."""
    prompts = [tiny.prompt(0, 40), tiny.prompt(1, 25)]
    rows = TargetRunner(tiny.target, 128)
    rows.cache.arrange(64, 0, 0)
    with torch.inference_mode():
        rows.read(0, prompts, [0, 0])
        kv = rows.cache.flat([0, 1], [3, 0], [37, 25], range(LAYERS))[0]
    for tokens, own in zip((prompts[0][3:], prompts[1]), kv.split([37, 25]), strict=True):
        whole = prompts[0] if len(tokens) == 37 else prompts[1]
        output, recorder = whole_pass(tiny.target, whole, range(LAYERS))
        skip = len(whole) - len(tokens)
        for layer in range(LAYERS):
            key, value = (side[0].transpose(0, 1)[skip:] for side in recorder.take(layer))
            runs = output.routes[layer, 0, skip:, None, None]
            found = own[:, layer].view(len(tokens), 2, 2, 16)
            torch.testing.assert_close(found[:, :, 0], key * runs, atol=1e-4, rtol=0)
            torch.testing.assert_close(found[:, :, 1], value * runs, atol=1e-4, rtol=0)
    assert (kv == 0).all(dim=-1).any()


@in_turn(
    ("variant", "shape"),
    [name for name in VARIANTS if name.endswith("-0")] + ["moa-1"],
    ["chain", "fixed", "dynamic"],
    whole=["eagle-0"],
)
def test_drafts_change_nothing(tiny, taught, variant, shape):
    decoder = SpeculativeDecoder(tiny.target, taught(variant), SHAPES[shape], CAPACITY)
    num_accepted = 0
    for seed, params in ((0, GREEDY), (1, COUPLED)):
        prompt = tiny.prompt(seed, 9 if not seed else 270)
        found = decoder.generate(prompt, params, NEW, ())
        assert found.tokens == plain(tiny, prompt, params)
        num_accepted += sum(found.accepted)
    assert num_accepted or variant.startswith(("ngram", "pretrained"))


@pytest.mark.parametrize("variant", ["moa-0", "eagle-0", "glide-0", "medusa-0", "independent-0", "ngram-0"])
def test_rows_of_different_lengths_get_their_own_texts(tiny, variant):
    drafter = build(tiny, VARIANTS[variant])
    config = EngineConfig(max_num_seqs=3, kv_cache_tokens=3 * 512, max_model_len=CAPACITY, tree=SHAPES["fixed"])
    source = LocalDrafts(drafter, CAPACITY, SHAPES["fixed"].num_expanded)
    engine = Engine(tiny.target, config, (), drafts={"d": source})
    prompts = [tiny.prompt(seed, length) for seed, length in ((0, 9), (1, 270), (2, 1), (3, 61), (4, 33))]
    numbers = [engine.submit(Request(prompt=tuple(prompt), max_new_tokens=NEW)) for prompt in prompts]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.is_busy:
        for update in engine.step():
            texts[update.number] += update.tokens
    assert [texts[number] for number in numbers] == [plain(tiny, prompt, GREEDY) for prompt in prompts]


def test_a_drafter_that_reads_layers_with_routers_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"drafter.target_layers 3 needs the target's last 3 layers .* last_layers 2"):
        TargetHead(tiny.target.model, tiny.target.spec, 3)
    whole = tiny.target.spec.routing.model_copy(update={"last_layers": 0})
    spec = tiny.target.spec.model_copy(update={"routing": whole})
    with pytest.raises(ConfigError, match=r"drafter.type glide needs the target's last 1 layers .* last_layers 0"):
        VARIANTS["glide-0"].build(TargetHead(tiny.target.model, spec, 0))
