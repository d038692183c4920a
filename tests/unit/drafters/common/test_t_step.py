"""Rules of T-step bounded training: drawn by hand, against loops, and in attention against dense masks."""

import pytest
import torch
import torch.nn.functional as F

from moray.distill.masks import verified_start
from moray.drafters.common.attention import attend
from moray.drafters.common.t_step import memory_tokens, own_tokens, past_and_drafted
from moray.targets import visibility
from moray.targets.visibility import Visible

SEQ = 23


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(seen)] for seen in row) for row in mask]


def test_rules_by_hand():
    """Positions 0 and 2 are verified; the second sequence is a staircase."""
    start = torch.tensor([[0, 0, 2, 2]]).expand(2, 4)
    own, memory = own_tokens(start, torch.tensor([False, True])), memory_tokens(start)
    assert own_tokens(start, None) == "causal"
    assert isinstance(own, Visible)
    assert drawn(own.rows(0, 4)[0, 0]) == ["x...", "xx..", "xxx.", "xxxx"]
    assert drawn(own.rows(0, 4)[1, 0]) == ["x...", ".x..", "..x.", "...x"]
    for row in range(2):
        assert drawn(memory.rows(0, 4)[row, 0]) == ["x...", "x...", "xxx.", "xxx."]
        assert drawn(past_and_drafted(start).rows(0, 4)[row, 0]) == ["x.......", "x....x..", "xxx.....", "xxx....x"]
    assert drawn(past_and_drafted(start).rows(1, 3)[0, 0]) == ["x...x.", "xxx..."], "keys up to the block's end alone"


def test_a_sliding_window_cuts_every_run():
    start = torch.tensor([[0, 0, 2, 2]])
    assert drawn(memory_tokens(start).within(2).rows(0, 4)[0, 0]) == ["x...", "x...", ".xx.", "..x."]
    tail = past_and_drafted(start).within(2)
    assert drawn(tail.rows(0, 4)[0, 0]) == ["x.......", "x....x..", ".xx.....", "..x....x"]
    assert drawn(tail.within(1).rows(0, 4)[0, 0]) == ["x.......", ".....x..", "..x.....", ".......x"]


def views() -> tuple[torch.Tensor, torch.Tensor]:
    """start and staircase of chats of different lengths and turns; the last one is padding from position 9 on."""
    response = torch.zeros(4, SEQ, dtype=torch.bool)
    response[0, 3:], response[1, 1:8], response[1, 12:], response[2, 20:], response[3, 2:9] = (True,) * 5
    start = verified_start(response, torch.tensor([5, 2, 7, 4]), torch.tensor([0, 1, 3, 2]))
    return start, torch.tensor([True, False, True, True])


def dense(kind: str, start: torch.Tensor, staircase: torch.Tensor) -> torch.Tensor:
    """The masks as [batch, 1, seq, keys], element by element."""
    masks = torch.zeros(len(start), 1, SEQ, SEQ * (1 + (kind == "tail")), dtype=torch.bool)
    for row in range(len(start)):
        for i in range(SEQ):
            first = int(start[row, i])
            for j in range(SEQ):
                near = j == i or first < j <= i
                masks[row, 0, i, j] = {
                    "causal": j <= i,
                    "own": near if staircase[row] else j <= i,
                    "memory": j <= first,
                    "tail": j <= first,
                }[kind]
                if kind == "tail":
                    masks[row, 0, i, SEQ + j] = first < j <= i
    return masks


def rule(kind: str, start: torch.Tensor, staircase: torch.Tensor) -> Visible | str:
    made = {
        "causal": lambda: own_tokens(start, None),
        "own": lambda: own_tokens(start, staircase),
        "memory": lambda: memory_tokens(start),
        "tail": lambda: past_and_drafted(start),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["causal", "own", "memory", "tail"])
@pytest.mark.parametrize("block", [1, 4, 8, 512])
def test_attention_in_blocks_is_that_with_a_dense_mask_and_so_are_its_gradients(monkeypatch, kind, block):
    monkeypatch.setattr(visibility, "_QUERY_BLOCK", block)
    start, staircase = views()
    generator = torch.Generator().manual_seed(1)
    keys = SEQ * (1 + (kind == "tail"))

    def tensors() -> list[torch.Tensor]:
        generator.manual_seed(2)
        sizes = [(4, 6, SEQ, 8), (4, 2, keys, 8), (4, 2, keys, 8)]
        return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]

    upstream = torch.randn(4, SEQ, 48, generator=generator, dtype=torch.float64)
    mine, wanted = tensors(), tensors()
    out = attend(*mine, rule(kind, start, staircase))
    query, key, value = wanted
    scores = query @ key.repeat_interleave(3, dim=1).transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(~dense(kind, start, staircase), -torch.inf)
    expected = (scores.softmax(dim=-1) @ value.repeat_interleave(3, dim=1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    out.backward(upstream)
    expected.backward(upstream)
    for ours, theirs in zip(mine, wanted, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def test_no_mask_is_larger_than_a_block_of_queries(monkeypatch):
    monkeypatch.setattr(visibility, "_QUERY_BLOCK", 8)
    start, _ = views()
    seen: list[tuple[int, ...]] = []
    real = F.scaled_dot_product_attention

    def watch(query, key, value, attn_mask=None, **rest):
        seen.append(tuple(attn_mask.shape))
        return real(query, key, value, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    query, key = torch.zeros(4, 2, SEQ, 8), torch.zeros(4, 2, 2 * SEQ, 8)
    attend(query, key, key, past_and_drafted(start))
    assert seen == [(4, 1, 8, 16), (4, 1, 8, 32), (4, 1, 7, 46)]
