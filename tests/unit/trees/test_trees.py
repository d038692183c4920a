"""Shapes count right, structures and masks say who sees whom, and growing finds the likeliest nodes."""

import itertools
import json
import math

import pytest
import torch
from one_tree import grow
from pydantic import TypeAdapter, ValidationError

from moray.trees.grow import root_alone
from moray.trees.ranking import prune
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape, Shape, SparseShape
from moray.trees.tree import PrefixMask, TokenTree, fixed_structure, structure_of

CPU = torch.device("cpu")
VOCABULARY = 7
ROOT = torch.tensor([2])
SHAPES = [
    ChainShape(type="chain", depth=1),
    ChainShape(type="chain", depth=5),
    FixedShape(type="fixed", branching=(3,)),
    FixedShape(type="fixed", branching=(1, 1, 2)),
    FixedShape(type="fixed", branching=(3, 2, 2)),
    DynamicShape(type="dynamic", depth=1, breadth=3, nodes=2),
    DynamicShape(type="dynamic", depth=3, breadth=1, nodes=3),
    DynamicShape(type="dynamic", depth=4, breadth=3, nodes=17),
    DynamicShape(type="dynamic", depth=6, breadth=5, nodes=60),
]

ADAPTIVE = [
    AdaptiveShape(type="adaptive", depth=5),
    AdaptiveShape(type="adaptive", depth=4, breadth=3, nodes=17),
]


def naive_ancestors(parents: list[int]) -> torch.Tensor:
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above = node
        while above != -1:
            ancestors[node, above] = True
            above = parents[above]
    return ancestors


class Recorder:
    """A drafter whose scores depend on a node's whole path, known through `ancestors` alone."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 2
        self.tokens: list[int] = []
        self.paths: list[list[int]] = []
        self.calls: list[int] = []

    def scores(self, path: list[int]) -> torch.Tensor:
        """Log-probabilities after a path of tokens."""
        logits = self.table[path[-1]].clone()
        for age, token in enumerate(reversed(path)):
            logits += self.table[:, token] / (age + 1)
        return logits.log_softmax(dim=-1)

    def step(self, tokens, ancestors, depth):
        self.calls.append(depth)
        self.tokens += tokens.tolist()
        if ancestors is None:
            ancestors = torch.ones(len(tokens), len(self.tokens), dtype=torch.bool)
        assert ancestors.shape == (len(tokens), len(self.tokens)), "the mask covers all nodes expanded so far"
        rows = []
        for row in ancestors:
            path = [self.tokens[node] for node in row.nonzero().flatten().tolist()]
            assert len(path) == depth + 1, "a node at depth d has d ancestors and itself"
            self.paths.append(path)
            rows.append(self.scores(path))
        return torch.stack(rows)

    def select(self, logits, depth, k):
        scores, tokens = logits.topk(k, dim=-1)
        return tokens, scores, None


def text_of(tree, node: int) -> tuple[int, ...]:
    """Tokens from the root's child down to a node."""
    text: list[int] = []
    while node != 0:
        text.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(reversed(text))


# --- Shapes ---


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_counts_its_nodes_and_its_expansions(shape):
    recorder = Recorder()
    tree = grow(ROOT, shape, recorder.step, recorder.select)
    assert tree.num_nodes == shape.num_nodes + 1
    assert len(recorder.tokens) == shape.num_expanded, "states are allocated for exactly these"
    assert recorder.calls == list(range(shape.depth)), "one drafter pass per level"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "chain", "depth": 0}, "greater than or equal to 1"),
        ({"type": "chain", "depth": 65}, "less than or equal to 64"),
        ({"type": "fixed", "branching": []}, "at least 1"),
        ({"type": "fixed", "branching": [2, 0]}, "must be positive"),
        ({"type": "fixed", "branching": [8, 8, 8]}, "at most 512 nodes"),
        ({"type": "dynamic", "depth": 2, "breadth": 2, "nodes": 7}, "nodes is 7, but depth 2 and breadth 2 make 6"),
        ({"type": "adaptive", "depth": 0}, "greater than or equal to 1"),
        ({"type": "adaptive", "depth": 33}, "less than or equal to 32"),
        ({"type": "adaptive", "breadth": 2}, "nodes is None, breadth 2; give nodes if breadth > 1"),
        ({"type": "adaptive", "nodes": 3}, "nodes is 3, breadth 1; give nodes if breadth > 1"),
        ({"type": "adaptive", "depth": 2, "breadth": 2, "nodes": 7}, "nodes is 7, but depth 2 and breadth 2 make 6"),
        ({"type": "adaptive", "depth": 2, "breadth": 2, "nodes": 513}, "less than or equal to 512"),
        ({"type": "star"}, "star"),
    ],
)
def test_impossible_shapes_are_refused(values, message):
    import json

    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Shape).validate_json(json.dumps(values))


def test_names_tell_shapes_apart():
    shapes = [*SHAPES, *ADAPTIVE]
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert [shape.name for shape in ADAPTIVE] == ["adaptive-5", "adaptive-4x3-17"]


@pytest.mark.parametrize("shape", ADAPTIVE, ids=lambda shape: shape.name)
def test_an_adaptive_shape_is_as_large_as_the_largest_it_chooses(shape):
    chosen = [shape.at(depth) for depth in range(1, shape.depth + 1)]
    assert [one.depth for one in chosen] == list(range(1, shape.depth + 1))
    for measure in ("num_nodes", "max_children", "num_expanded"):
        assert getattr(shape, measure) == max(getattr(one, measure) for one in chosen), measure
    assert {type(one) for one in chosen} == {ChainShape if shape.breadth == 1 else DynamicShape}


def test_a_shallow_tree_has_no_more_nodes_than_its_levels_hold():
    shape = AdaptiveShape(type="adaptive", depth=4, breadth=3, nodes=17)
    assert [shape.at(depth).num_nodes for depth in (1, 2, 3, 4)] == [3, 12, 17, 17]


# --- Structures ---


@pytest.mark.parametrize("branching", [(1,), (1, 1, 1), (3, 2, 2), (1, 4, 1)])
def test_fixed_structures_are_complete(branching):
    structure = fixed_structure(branching, CPU)
    parents, depths = structure.parents.tolist(), structure.depths.tolist()
    for depth, width in enumerate(branching):
        for node in (node for node in range(len(parents)) if depths[node] == depth):
            assert [depths[child] for child in range(len(parents)) if parents[child] == node] == [depth + 1] * width
    assert depths == sorted(depths), "level by level"
    assert torch.equal(structure.ancestors, naive_ancestors(parents))


def test_structures_of_any_tree():
    parents = [-1, 0, 0, 2, 1, 3, 3]
    structure = structure_of(parents, [0, 1, 1, 2, 2, 3, 3], CPU)
    assert structure.parents.tolist() == parents
    assert torch.equal(structure.ancestors, naive_ancestors(parents))


# --- Growing ---


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_grown_trees_are_sound_and_scored_on_their_true_paths(shape):
    recorder = Recorder(seed=1)
    tree = grow(ROOT, shape, recorder.step, recorder.select)
    parents = tree.parents.tolist()
    assert parents[0] == -1
    assert all(0 <= parents[node] < node for node in range(1, tree.num_nodes))
    assert torch.equal(tree.ancestors, naive_ancestors(parents))
    texts = [text_of(tree, node) for node in range(tree.num_nodes)]
    assert tree.depths.tolist() == [len(text) for text in texts]
    assert len(set(texts)) == tree.num_nodes, "no path twice"
    scored = {tuple(path) for path in recorder.paths}
    for node in range(1, tree.num_nodes):
        assert (int(ROOT), *texts[parents[node]]) in scored, "its parent was expanded with its own path"


def test_chains_and_fixed_trees_take_the_best_children():
    for shape, branching in (
        (ChainShape(type="chain", depth=3), (1, 1, 1)),
        (FixedShape(type="fixed", branching=(3, 2)), (3, 2)),
    ):
        recorder = Recorder(seed=2)
        tree = grow(ROOT, shape, recorder.step, recorder.select)
        level = [()]
        expected = [()]
        for width in branching:
            level = [
                (*text, token)
                for text in level
                for token in recorder.scores([int(ROOT), *text]).topk(width).indices.tolist()
            ]
            expected += level
        assert [text_of(tree, node) for node in range(tree.num_nodes)] == expected


def reference_dynamic(recorder: Recorder, shape: DynamicShape) -> set[tuple[int, ...]]:
    """EAGLE-2 as the paper says it: expand the likeliest `breadth` per level, then rerank all candidates."""
    candidates: dict[tuple[int, ...], float] = {}
    frontier = {(): 0.0}
    for _ in range(shape.depth):
        level = {}
        for text, score in frontier.items():
            scores = recorder.scores([int(ROOT), *text])
            for token in scores.topk(shape.breadth).indices.tolist():
                level[(*text, token)] = score + float(scores[token])
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.breadth])
    return {text for text, _ in sorted(candidates.items(), key=lambda item: -item[1])[: shape.nodes]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("depth", "breadth", "nodes"), [(3, 2, 5), (4, 3, 12), (6, 5, 40), (2, 7, 56)])
def test_dynamic_trees_are_eagle_2_s(seed, depth, breadth, nodes):
    shape = DynamicShape(type="dynamic", depth=depth, breadth=breadth, nodes=nodes)
    recorder = Recorder(seed)
    tree = grow(ROOT, shape, recorder.step, recorder.select)
    assert {text_of(tree, node) for node in range(1, tree.num_nodes)} == reference_dynamic(Recorder(seed), shape)


def test_with_full_breadth_a_dynamic_tree_holds_the_best_paths_of_all():
    """The best tree for a budget is the b largest path probabilities: brute force over every path."""
    shape = DynamicShape(type="dynamic", depth=2, breadth=VOCABULARY, nodes=15)
    recorder = Recorder(seed=3)
    paths: dict[tuple[int, ...], float] = {}
    for length in (1, 2):
        for text in itertools.product(range(VOCABULARY), repeat=length):
            paths[text] = sum(float(recorder.scores([int(ROOT), *text[:i]])[token]) for i, token in enumerate(text))
    best = {text for text, _ in sorted(paths.items(), key=lambda item: -item[1])[:15]}
    tree = grow(ROOT, shape, recorder.step, recorder.select)
    assert {text_of(tree, node) for node in range(1, tree.num_nodes)} == best


def test_ties_and_impossible_tokens_keep_a_dynamic_tree_connected():
    shape = DynamicShape(type="dynamic", depth=3, breadth=3, nodes=12)
    for logits in (torch.zeros(VOCABULARY), torch.tensor([0.0, *[-torch.inf] * (VOCABULARY - 1)])):
        tree = grow(
            ROOT,
            shape,
            lambda tokens, ancestors, depth, row=logits: row.log_softmax(dim=-1).expand(len(tokens), -1),
            Recorder().select,
        )
        parents = tree.parents.tolist()
        assert all(0 <= parents[node] < node for node in range(1, 13))
        assert torch.equal(tree.ancestors, naive_ancestors(parents))


def test_draft_distributions_belong_to_the_node_they_made():
    """draft_probs[i] is what node i was drawn from: that of its parent's row."""
    recorder = Recorder(seed=4)

    def select(logits, depth, k):
        return logits.topk(k, dim=-1).indices, logits.topk(k, dim=-1).values, logits.exp()

    tree = grow(ROOT, FixedShape(type="fixed", branching=(2, 3)), recorder.step, select)
    assert tree.draft_probs is not None
    for node in range(1, tree.num_nodes):
        path = [int(ROOT), *text_of(tree, int(tree.parents[node]))]
        torch.testing.assert_close(tree.draft_probs[node], recorder.scores(path).exp())


# --- Growing less ---


@pytest.mark.parametrize("keep", [1, 2, 5, 11, 17])
def test_pruning_keeps_the_best_nodes_of_the_same_tree(keep):
    shape = DynamicShape(type="dynamic", depth=4, breadth=3, nodes=17)
    offered: list[list[list[float]]] = []

    def choose(log_probs: list[list[float]]) -> int:
        offered.append(log_probs)
        return keep

    recorder = Recorder(seed=5)
    ((tree, promised),) = prune([grow(ROOT, shape, recorder.step, recorder.select)], choose)
    parents, texts = tree.parents.tolist(), [text_of(tree, node) for node in range(tree.num_nodes)]
    assert tree.num_nodes == keep + 1
    assert all(0 <= parents[node] < node for node in range(1, tree.num_nodes))
    assert all(text[:-1] in texts for text in texts[1:]), "every prefix of a kept path is kept"
    assert torch.equal(tree.ancestors, naive_ancestors(parents))
    assert tree.depths.tolist() == [len(text) for text in texts]
    smaller = DynamicShape(type="dynamic", depth=4, breadth=3, nodes=keep)
    assert set(texts[1:]) == reference_dynamic(Recorder(seed=5), smaller)
    (((scores),),) = offered
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == shape.nodes
    assert promised == pytest.approx(sum(math.exp(score) for score in scores[:keep]))
    paths = [sum(float(recorder.scores([2, *text[:i]])[token]) for i, token in enumerate(text)) for text in texts[1:]]
    assert sorted(paths, reverse=True) == pytest.approx(scores[:keep], abs=1e-5)


@pytest.mark.parametrize("keep", [0, 1, 4, 9])
def test_trees_of_different_sizes_are_pruned_together(keep):
    shapes = [DynamicShape(type="dynamic", depth=depth, breadth=3, nodes=nodes) for depth, nodes in ((4, 17), (1, 3))]
    trees = [grow(ROOT, shape, own.step, own.select) for shape, own in zip(shapes, map(Recorder, (5, 6)), strict=True)]
    together = prune(trees, lambda _: keep)
    for tree, (pruned, promised) in zip(trees, together, strict=True):
        ((alone, own),) = prune([tree], lambda _: keep)
        assert_same(pruned, alone)
        assert promised == own
        assert pruned.num_nodes == 1 + min(keep, tree.num_nodes - 1)


def test_a_pruned_tree_that_does_not_stand_level_by_level_knows_its_depth():
    """As a drafter replica may send it: parents before children, and no more order than that."""
    structure = structure_of([-1, 0, 1, 0], [0, 1, 2, 1], torch.device("cpu"))
    scores = torch.tensor([0.0, -1.0, -2.0, -3.0])
    tree = TokenTree(ROOT.repeat(4), structure.parents, structure.depths, structure.ancestors, 2, scores=scores)
    ((pruned, _),) = prune([tree], lambda _: 3)
    assert pruned.max_depth == int(pruned.depths.max()) == 2


def test_chains_and_fixed_trees_have_no_scores_to_prune_by():
    for shape in SHAPES[:5]:
        assert grow(ROOT, shape, Recorder().step, Recorder().select).scores is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_pruned_tree_knows_its_deepest_node(seed, size):
    shape = DynamicShape(type="dynamic", depth=6, breadth=3, nodes=17)
    recorder = Recorder(seed)
    ((tree, _),) = prune([grow(ROOT, shape, recorder.step, recorder.select)], lambda _: size)
    assert tree.num_nodes == size + 1
    assert tree.max_depth == int(tree.depths.max())
    assert tree.num_levels == len(recorder.calls) == 6


@pytest.mark.parametrize(
    "shape", [*SHAPES, FixedShape(type="fixed", branching=(1, 1, 1))], ids=lambda shape: shape.name
)
def test_what_is_kept_of_a_path_was_expanded_first_and_in_order(shape):
    recorder = Recorder(seed=3)
    tree = grow(ROOT, shape, recorder.step, recorder.select)
    is_chain = max(getattr(shape, "branching", (shape.max_children,))) == 1 and not isinstance(shape, DynamicShape)
    for node in range(tree.num_nodes):
        text = [int(ROOT), *text_of(tree, node)]
        kept = tree.num_kept(len(text) - 1)
        assert recorder.paths[:kept] == [text[:end] for end in range(1, kept + 1)]
        assert kept == (min(len(text), shape.depth) if is_chain else 1)
    assert root_alone(ROOT).num_kept(0) == 0, "nothing was drafted"


@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.depth > 2], ids=lambda shape: shape.name)
def test_a_drafter_that_stops_early_leaves_the_levels_it_had(shape, levels, is_pruned):
    """The same nodes as those of a shape that deep, and `max_depth` says how deep."""
    recorder = Recorder(seed=6)

    def step(tokens, ancestors, depth):
        return recorder.step(tokens, ancestors, depth) if depth < levels else None

    def keep_all(log_probs: list[list[float]]) -> int:
        assert log_probs[0], "nothing to choose from"
        return len(log_probs[0])

    tree = grow(ROOT, shape, step, recorder.select)
    if is_pruned and tree.scores is not None:
        ((tree, _),) = prune([tree], keep_all)
    parents, texts = tree.parents.tolist(), [text_of(tree, node) for node in range(tree.num_nodes)]
    assert parents[0] == -1
    assert all(0 <= parents[node] < node for node in range(1, tree.num_nodes))
    assert torch.equal(tree.ancestors, naive_ancestors(parents))
    assert tree.depths.tolist() == [len(text) for text in texts]
    assert tree.max_depth == levels == max(map(len, texts))
    if levels == 0:
        assert_same(tree, root_alone(ROOT))
        return
    values = shape.model_dump()
    if isinstance(shape, FixedShape):
        values["branching"] = shape.branching[:levels]
    else:
        values["depth"] = levels
    if isinstance(shape, DynamicShape):
        values["nodes"] = min(shape.nodes, shape.breadth + (levels - 1) * shape.breadth**2)
    whole = Recorder(seed=6)
    assert_same(tree, grow(ROOT, type(shape).model_validate(values), whole.step, whole.select))


def assert_same(tree, other) -> None:
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(other, name)), name
    assert tree.max_depth == other.max_depth


def test_a_sampled_chain_that_stops_early_hands_on_what_it_drew_from():
    recorder = Recorder(seed=7)

    def select(logits, depth, k):
        return logits.argmax(dim=-1, keepdim=True), logits.max(dim=-1, keepdim=True).values, logits.exp()

    for levels in (0, 2):
        tree = grow(
            ROOT,
            ChainShape(type="chain", depth=5),
            lambda tokens, ancestors, depth, levels=levels: Recorder(seed=7).table[tokens] if depth < levels else None,
            select,
        )
        assert tree.num_nodes == levels + 1
        if levels == 0:
            assert tree.draft_probs is None
        else:
            assert tree.draft_probs is not None
            assert torch.equal(tree.draft_probs[1:], recorder.table[tree.tokens[:-1]].exp())


# --- The mask ---


def test_a_prefix_mask_shows_committed_slots_and_the_block():
    mask = PrefixMask(3, 10, torch.zeros(1))
    block = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)

    def seen(view):
        return (view == 0)[0, 0] if view.dtype != torch.bool else view[0, 0]

    assert torch.equal(seen(mask.view(block)), block)
    mask.commit(2)
    assert torch.equal(seen(mask.view(block)), torch.cat([torch.ones(3, 2, dtype=torch.bool), block], dim=1))
    mask.view(torch.ones(3, 5, dtype=torch.bool))  # a wider tree, refused whole, must leave nothing behind
    assert torch.equal(seen(mask.view(block[:2])), torch.cat([torch.ones(2, 2, dtype=torch.bool), block[:2]], dim=1))
    mask.commit(1)
    narrow = mask.view(torch.zeros(1, 2, dtype=torch.bool))
    assert seen(narrow)[0].tolist() == [True] * 3 + [False] * 2
    mask.reset()
    assert mask.length == 0
    assert torch.equal(seen(mask.view(block)), block)


def test_a_mask_hides_completely():
    """Hidden slots get no weight at all, whatever their scores."""
    mask = PrefixMask(1, 4, torch.zeros(1))
    view = mask.view(torch.tensor([[True, False]]))
    value = torch.tensor([[1.0], [1e30]])[None, None]
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([[0.0], [100.0]])[None, None]
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=view)
    assert float(out) == 1.0


def test_a_reset_mask_holds_nothing_of_what_it_was():
    """Whatever was committed or only viewed, in the rows and columns that the next sequence does not write first."""
    mask = PrefixMask(4, 12, torch.zeros(1))
    fresh = mask._data.clone()
    for committed, rows, columns in ((3, 2, 4), (0, 4, 9), (5, 1, 1), (2, 4, 8), (0, 0, 0)):
        mask.commit(committed)
        if rows:
            mask.view(torch.ones(rows, columns, dtype=torch.bool))
        if committed == 5:
            mask.commit(2)
        mask.reset()
        assert mask.length == 0
        assert torch.equal(mask._data, fresh)


# --- Sparse trees ---


def sparse(*paths: tuple[int, ...]) -> SparseShape:
    return SparseShape(type="sparse", paths=paths)


def table_step(seen: list | None = None):
    """Logits that depend on the token and on the number of its ancestors; remembers what it was asked."""

    def step(tokens, ancestors, depth):
        if seen is not None:
            seen.append((tokens.tolist(), None if ancestors is None else ancestors.tolist(), depth))
        depths = torch.ones_like(tokens) if ancestors is None else ancestors.sum(dim=1)
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(50, 9, 50, generator=generator)
        return table[tokens, depths]

    return step


def best(logits, depth, children):
    scores, tokens = logits.log_softmax(-1).topk(children, dim=-1)
    return tokens, scores, None


def test_a_sparse_tree_of_all_ranks_is_the_fixed_one():
    every = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(2)]
    shape = sparse(*reversed(every))
    fixed = FixedShape(type="fixed", branching=(3, 2))
    ours, theirs = (grow(torch.tensor([7]), each, table_step(), best) for each in (shape, fixed))
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.max_depth == theirs.max_depth == 2
    assert (shape.num_nodes, shape.depth, shape.max_children) == (9, 2, 3)
    assert (shape.num_expanded, fixed.num_expanded) == (4, 4)


def test_a_sparse_tree_keeps_the_named_ranks_and_expands_no_leaf():
    seen: list = []
    shape = sparse((0,), (1,), (4,), (0, 0), (0, 2), (1, 1), (0, 2, 0))
    tree = grow(torch.tensor([7]), shape, table_step(seen), best)
    step = table_step()

    def ranked(path: list[int]) -> list[int]:
        """Children of the path's last token, likeliest first; the table knows the path's length alone."""
        alone = torch.ones(1, len(path), dtype=torch.bool)
        return step(torch.tensor(path[-1:]), alone, len(path) - 1)[0].topk(5).indices.tolist()

    first = ranked([7])
    a, b, c = first[0], first[1], first[4]
    aa, ac, bb = ranked([7, a])[0], ranked([7, a])[2], ranked([7, b])[1]
    assert tree.tokens.tolist() == [7, a, b, c, aa, ac, bb, ranked([7, a, ac])[0]]
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1, 2, 5]
    assert tree.depths.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [tokens for tokens, _, _ in seen] == [[7], [a, b], [ac]], "leaves are not expanded"
    assert seen[1][1] == [[True, True, False], [True, False, True]]
    assert seen[2][1] == [[True, True, False, True]], "the root, the likeliest token, itself"
    assert shape.num_expanded == 4


def test_a_sparse_tree_may_end_early():
    shape = sparse((0,), (1,), (0, 0), (0, 0, 0))
    for levels in range(3):

        def step(tokens, ancestors, depth, levels=levels):
            return table_step()(tokens, ancestors, depth) if depth < levels else None

        tree = grow(torch.tensor([7]), shape, step, best)
        assert tree.max_depth == levels
        assert tree.num_nodes == [1, 3, 4][levels] == tree.ancestors.shape[0]


@pytest.mark.parametrize(
    ("paths", "message"),
    [([[0], [0]], "twice"), ([[0, 1]], r"\[0, 1\] but not its parent \[0\]"), ([[]], "the root"), ([[-1]], "greater")],
)
def test_sparse_trees_that_are_none_are_refused(paths, message):
    with pytest.raises(ValidationError, match=message):
        SparseShape.model_validate_json(json.dumps({"type": "sparse", "paths": paths}))
