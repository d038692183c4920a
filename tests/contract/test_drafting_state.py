"""What a drafter keeps of a sequence: memory token by token, and branches that do not see each other."""

import pytest
import torch
from drafting import pieces_of, state_at
from tiny_batches import batch_of, taps_of
from tiny_drafters import SEVERAL_LAYER_COUNTS, VARIANTS, build

from moray.batch import Taps


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
            torch.testing.assert_close(torch.cat([part[name] for part in parts], dim=1), memory, atol=1e-6, rtol=2e-6)
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


@pytest.mark.parametrize("name", SEVERAL_LAYER_COUNTS)
def test_a_state_may_change_its_n_in_every_cycle(tiny, name):
    """Cycles of a chain along the true text, each with another N, draft as states that never had another."""
    target = tiny("llama")
    drafter = build(target, VARIANTS[name])
    batch = batch_of(target.target, [target.prompt(0, 24)], 6, drafter.needs)
    text, known = batch.tokens[0], 4
    state = state_at(drafter, batch.tokens, batch.taps, known)
    with torch.no_grad():
        for num_target_layers in [*drafter.layer_counts, *reversed(drafter.layer_counts)]:
            drafter.set_num_target_layers(state, num_target_layers)
            fresh = state_at(drafter, batch.tokens, batch.taps, known)
            drafter.set_num_target_layers(fresh, num_target_layers)
            for level in range(3):
                token = text[known + level : known + level + 1]
                drafted, wanted = (drafter.step(each, token, None, level) for each in (state, fresh))
                torch.testing.assert_close(drafted, wanted, atol=1e-5, rtol=0)
            memory = drafter.observe(pieces_of(batch.taps, known, known + 2))
            drafter.extend(state, text[known : known + 2], memory, num_kept=2)
            known += 2
