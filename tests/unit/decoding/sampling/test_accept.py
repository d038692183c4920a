"""Typical acceptance on trees made by hand, against a reference that tries every path in turn.

The lossless methods are held to the target's law in tests/contract/test_law_of_acceptance_methods.py.
"""

import math

import pytest
import torch

from moray.config import validate
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.accept import Accepted, accept
from moray.decoding.sampling.sampler import Sampler
from moray.errors import ConfigError
from moray.trees.tree import TokenTree, structure_of

CPU = torch.device("cpu")
VOCABULARY = 6
ROOT_POSITION = 11


def typical(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "acceptance_method": "typical"} | changes)


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    structure = structure_of(parents, depths, CPU)
    return TokenTree(torch.tensor(tokens), structure.parents, structure.depths, structure.ancestors, max(depths))


def random_case(seed: int) -> tuple[TokenTree, torch.Tensor]:
    """A tree of up to ten nodes, children of one parent distinct, and logits from flat to sharp."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = int(torch.randint(2, 11, (1,), generator=generator))
    tokens, parents, taken = [0], [-1], set()
    while len(tokens) < num_nodes:
        parent = int(torch.randint(len(tokens), (1,), generator=generator))
        token = int(torch.randint(VOCABULARY, (1,), generator=generator))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    logits = torch.randn(num_nodes, VOCABULARY, generator=generator) * 3 * torch.rand(1, generator=generator)
    return tree_of(tokens, parents), logits


def naive(tree: TokenTree, logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """The accepted path, every node's path tried by itself."""
    probs = Sampler(params, VOCABULARY, CPU).log_probs(logits).exp().tolist()
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    best: list[int] = []
    best_score = 0.0
    for node in range(1, tree.num_nodes):
        path = [node]
        while parents[path[0]] != 0:
            path.insert(0, parents[path[0]])
        score = 0.0
        for child in path:
            p = probs[parents[child]]
            entropy = -sum(x * math.log(x) for x in p if x)
            if not p[tokens[child]] > min(params.typical_epsilon, params.typical_delta * math.exp(-entropy)):
                break
            score += math.log(p[tokens[child]])
        else:
            if len(path) > len(best) or (len(path) == len(best) and score > best_score):
                best, best_score = path, score
    return best


def agrees_with_the_reference(params: SamplingParams, cases: int = 300) -> bool:
    """Whether path, tokens and next token are the reference's on random trees."""
    for seed in range(cases):
        tree, logits = random_case(seed)
        sampler = Sampler(params.model_copy(update={"seed": seed}), VOCABULARY, CPU)
        path = naive(tree, logits, params)
        last = path[-1] if path else 0
        next_token = int(sampler.choose(logits[last : last + 1], ROOT_POSITION + len(path) + 1))
        expected = Accepted(path, [int(tree.tokens[node]) for node in path], next_token)
        if accept(tree, logits, sampler, ROOT_POSITION) != expected:
            return False
    return True


SETTINGS = {
    "as in the paper": {},
    "epsilon decides": {"typical_epsilon": 0.15, "typical_delta": 100.0},
    "delta decides": {"typical_epsilon": 1.0, "typical_delta": 0.6},
    "everything possible": {"typical_epsilon": 0.0, "top_k": 4},
    "filtered": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_typical_acceptance_equals_the_reference(name):
    assert agrees_with_the_reference(typical(**SETTINGS[name]))


#        0
#      /   \
#     1     2        node: its token is its number
#     |     |
#     3     4
HAND = tree_of([0, 1, 2, 3, 4], [-1, 0, 0, 1, 2])


def accepted_by_hand(rows: dict[int, list[float]], **changes) -> list[int]:
    """The path in HAND where `rows` gives the probabilities below some nodes; below the others all are equal."""
    probs = torch.full((5, VOCABULARY), 1 / VOCABULARY)
    for node, row in rows.items():
        probs[node] = torch.tensor(row)
    return accept(HAND, probs.log(), Sampler(typical(**changes), VOCABULARY, CPU), 0).path


def test_the_longest_path_wins_over_the_likelier_one():
    below_one = [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]  # token 3 cannot follow
    assert accepted_by_hand({0: [0.0, 0.8, 0.2, 0.0, 0.0, 0.0], 1: below_one}) == [2, 4]


def test_of_equally_long_paths_the_likelier_as_a_whole_wins():
    rows = {
        0: [0.0, 0.6, 0.4, 0.0, 0.0, 0.0],
        1: [0.5, 0.2, 0.1, 0.2, 0.0, 0.0],
        2: [0.1, 0.1, 0.1, 0.1, 0.6, 0.0],
    }
    assert accepted_by_hand(rows) == [2, 4], "0.4 * 0.6 against 0.6 * 0.2"
    assert accepted_by_hand(rows | {1: [0.3, 0.1, 0.1, 0.5, 0.0, 0.0]}) == [1, 3], "0.6 * 0.5"


def test_less_is_asked_where_the_target_is_unsure():
    """0.05 is below epsilon; it passes only if delta * exp(-H) is still lower."""
    sure, unsure = [0.0, 0.05, 0.0, 0.0, 0.0, 0.95], [0.19, 0.05, 0.19, 0.19, 0.19, 0.19]
    assert accepted_by_hand({0: sure}, typical_delta=0.2) == []
    assert accepted_by_hand({0: unsure, 2: sure}, typical_delta=0.2)[:1] == [1]


def test_the_bounds_are_strict():
    half = [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    no_more = {1: half, 2: half}  # tokens 3 and 4 cannot follow
    assert accepted_by_hand({0: half} | no_more, typical_epsilon=0.5, typical_delta=9.0) == []
    assert accepted_by_hand({0: half} | no_more, typical_epsilon=0.4999, typical_delta=9.0) == [1], (
        "the first of equals"
    )


def test_an_impossible_token_is_never_accepted():
    assert accepted_by_hand({0: [0.5, 0.0, 0.0, 0.0, 0.0, 0.5]}, typical_epsilon=0.0, typical_delta=0.0) == []


def test_a_distribution_of_one_token_has_no_entropy():
    """Filters leave zeros: 0 log 0 counts as 0."""
    one = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert accepted_by_hand({0: one, 1: one}) == [1]


# --- Faults, each of which must fail the comparison ---


def test_faulty_rules_fail_the_comparison(monkeypatch):
    params = typical()
    right = accept_module.accept_typical

    def ignores_the_entropy(tree, log_p, sampler, root_position):
        changed = sampler.params.model_copy(update={"typical_delta": 1e9})
        return right(tree, log_p, Sampler(changed, VOCABULARY, CPU), root_position)

    def one_short(tree, log_p, sampler, root_position):
        """Leaves the last accepted token to the target."""
        result = right(tree, log_p, sampler, root_position)
        path = result.path[:-1]
        node = path[-1] if path else 0
        next_token = int((log_p[node] + sampler.noise(root_position + len(path) + 1, 1)[0]).argmax())
        return Accepted(path, result.tokens[: len(path)], next_token)

    def stale_noise(tree, log_p, sampler, root_position):
        """Draws the next token with the noise of the root's place, not of its own."""
        result = right(tree, log_p, sampler, root_position)
        node = result.path[-1] if result.path else 0
        return Accepted(
            result.path, result.tokens, int((log_p[node] + sampler.noise(root_position + 1, 1)[0]).argmax())
        )

    for fault in (ignores_the_entropy, one_short, stale_noise):
        with monkeypatch.context() as patch:
            patch.setattr(accept_module, "accept_typical", fault)
            assert not agrees_with_the_reference(params), fault.__name__
    assert agrees_with_the_reference(params)


# --- Proposals and settings ---


def test_a_chain_proposes_the_likeliest_and_a_tree_the_best():
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(typical(top_k=4), VOCABULARY, CPU)
    tokens, _, probs = sampler.selector(3, 2, is_chain=True)(logits, 0, 1)
    assert (tokens[:, 0].tolist(), probs) == (logits.argmax(dim=-1).tolist(), None)
    tokens, scores, probs = sampler.selector(3, 2, is_chain=False)(logits, 1, 3)
    assert torch.equal(tokens, logits.topk(3).indices)
    assert torch.equal(scores, sampler.log_probs(logits).topk(3).values)
    assert probs is None


def test_typical_is_the_only_lossy_method():
    assert not typical().is_lossless
    assert SamplingParams().is_lossless
    assert all(
        SamplingParams(temperature=1.0, acceptance_method=method).is_lossless
        for method in ("gumbel_coupled", "rejection")
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"acceptance_method": "typical"},
            "acceptance_method is 'typical' and temperature 0; .* needs one of 1e-05 or more",
        ),
        ({"acceptance_method": "typical", "temperature": 1.0, "typical_epsilon": 1.5}, "'typical_epsilon' is 1.5"),
        ({"acceptance_method": "typical", "temperature": 1.0, "typical_epsilon": -0.1}, "'typical_epsilon' is -0.1"),
        ({"acceptance_method": "typical", "temperature": 1.0, "typical_delta": -1}, "'typical_delta' is -1"),
        ({"acceptance_method": "medusa"}, "'acceptance_method' is \"medusa\": accepted are .*typical"),
    ],
)
def test_impossible_settings_are_refused_on_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(SamplingParams, values)
    assert "\n" not in str(caught.value)
