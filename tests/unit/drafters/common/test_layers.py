"""Building blocks of drafters against torch's own and against their definitions."""

import math

import pytest
import torch
from reference import rotated
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from torch import nn

from moray.drafters.base import Drafter
from moray.drafters.common.attention import Reach
from moray.drafters.common.direction import Direction
from moray.drafters.common.layers import (
    RMSNorm,
    RotaryTable,
    SelfAttention,
    rotate,
)
from moray.drafters.common.slots import DraftSlots
from moray.drafters.config_base import BlockConfig, LayeredBase

WIDTH, HEAD_DIM, EPS = 24, 8, 1e-5
BLOCK = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=32)
ROTARY = RotaryTable(HEAD_DIM, 64, 300.0)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_weights(drafter: Drafter) -> torch.Tensor:
    return torch.cat([part.weight.detach() for part in drafter.modules() if isinstance(part, nn.RMSNorm)])


def both_norms(dtype: torch.dtype) -> tuple[RMSNorm, nn.RMSNorm]:
    ours, theirs = RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, eps=EPS)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(noise(WIDTH, seed=9) + 1.0)
            norm.weight.data = norm.weight.data.to(dtype)
    return ours, theirs


def test_a_direction_and_its_gradient_are_autograd_s() -> None:
    floor = torch.tensor(0.3)
    inputs = [noise(2, 5, WIDTH).double().requires_grad_() for _ in range(2)]
    plain = inputs[1] / torch.hypot(torch.linalg.vector_norm(inputs[1], dim=-1, keepdim=True), floor.double())
    found = Direction.apply(inputs[0], floor.double())
    torch.testing.assert_close(found, plain)
    for output in (found, plain):
        output.backward(noise(2, 5, WIDTH, seed=1).double())
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    nothing = torch.zeros(1, WIDTH).requires_grad_()
    Direction.apply(nothing, floor).sum().backward()
    torch.testing.assert_close(nothing.grad, torch.full((1, WIDTH), 1 / 0.3))


# --- Initial values ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("name", [name for name in VARIANTS if isinstance(VARIANTS[name], LayeredBase)])
def test_norms_begin_at_one_or_at_random(tiny, name):
    config = VARIANTS[name]
    ones, normal = (
        norm_weights(build(tiny, config.model_copy(update=changes))) for changes in ({}, {"norm_init": "normal"})
    )
    assert bool((ones == 1).all())
    assert normal.shape == ones.shape
    assert float(normal.mean()) == pytest.approx(0.0, abs=4 * 0.02 / len(normal) ** 0.5)
    assert float(normal.std()) == pytest.approx(0.02, rel=4 / (2 * len(normal)) ** 0.5)


# --- RMSNorm ---

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-2, 1e-4, 1e-7, 1e-30, 0.0])
def test_the_norm_is_torch_s_own_and_so_are_its_gradients(dtype, scale):
    """Where eps decides too: at 1e-4 it outweighs the input, at 1e-30 squares vanish, at 0 there is nothing else."""
    ours, theirs = both_norms(dtype)
    results = []
    for norm in (ours, theirs):
        x = (noise(3, 5, WIDTH) * scale).to(dtype).requires_grad_()
        y = norm(x)
        assert y.dtype == dtype
        results.append([y.detach()])
        if dtype != torch.float16:  # in which nothing is trained
            (y.float() * noise(3, 5, WIDTH, seed=2)).sum().backward()
            results[-1] += [x.grad, norm.weight.grad]
    for mine, wanted in zip(*results, strict=True):
        assert bool(torch.isfinite(mine).all())
        size = float(wanted.float().abs().max())
        torch.testing.assert_close(mine, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(size, 1e-30))


def test_the_norm_takes_half_precision_s_largest_numbers():
    """Norms are wanted exactly where numbers are large: nothing may overflow on the way."""
    ours, theirs = both_norms(torch.float16)
    x = noise(4, WIDTH).sign().half() * 6e4
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.mul_(3.0)
        torch.testing.assert_close(ours(x), theirs(x), rtol=3e-3, atol=3e-3)


def test_the_norm_saves_what_torch_s_own_saves():
    assert RMSNorm(WIDTH, EPS).state_dict().keys() == nn.RMSNorm(WIDTH, eps=EPS).state_dict().keys()


# --- Rotary ---


def test_neighbouring_pairs_turn_by_position_and_frequency():
    x = noise(2, 3, 6, HEAD_DIM)
    turned = rotate(x, ROTARY.rows(5, 11))
    for batch in range(2):
        for head in range(3):
            for i in range(6):
                wanted = rotated(x[batch, head, i].double(), 5 + i, 300.0)
                torch.testing.assert_close(turned[batch, head, i].double(), wanted, rtol=1e-5, atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone():
    query, key = noise(1, 1, 1, HEAD_DIM, seed=1), noise(1, 1, 1, HEAD_DIM, seed=2)
    products = [
        float((rotate(query, ROTARY.rows(at, at + 1)) * rotate(key, ROTARY.rows(at - 7, at - 6))).sum())
        for at in (7, 20, 60)
    ]
    assert products == pytest.approx([products[0]] * 3, abs=1e-5)
    assert float(rotate(query, ROTARY.rows(9, 10)).norm()) == pytest.approx(float(query.norm()), rel=1e-5)


def test_rotation_is_computed_precisely_and_returned_in_the_input_s_type():
    far = RotaryTable(HEAD_DIM, 100_001, 10_000.0).rows(100_000, 100_001)
    x = noise(1, 1, 1, HEAD_DIM).bfloat16()
    turned = rotate(x, far)
    assert turned.dtype == torch.bfloat16
    wanted = rotated(x[0, 0, 0].double(), 100_000, 10_000.0)
    torch.testing.assert_close(turned[0, 0, 0].double(), wanted, rtol=1e-2, atol=1e-2)


def test_a_table_survives_a_change_of_precision_and_is_not_saved():
    table = RotaryTable(HEAD_DIM, 8, 300.0)
    assert table.state_dict() == {}
    turned = table.double().rows(3, 4)
    assert float(turned[0, 0].imag) == pytest.approx(math.sin(3.0), abs=1e-6)


# --- Self-attention ---


@pytest.fixture
def attention() -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(WIDTH, BLOCK, HEAD_DIM).eval()


def causal_mask(seq: int) -> torch.Tensor:
    return torch.full((seq, seq), -torch.inf).triu(1)[None, None]


def test_causal_is_what_a_mask_says(attention):
    x, rotary = noise(2, 9, WIDTH), ROTARY.rows(0, 9)
    torch.testing.assert_close(attention(x, rotary, "causal"), attention(x, rotary, causal_mask(9)))


def begun(attention: SelfAttention, x: torch.Tensor, known: int):
    """Slots and a cache that remember the first `known` positions, in two pieces."""
    slots = DraftSlots(32, 8, x)
    cache = slots.new_cache(BLOCK.num_kv_heads, HEAD_DIM)
    for begin, end in ((0, known // 2), (known // 2, known)):
        add(attention, slots, cache, x, begin, end)
    return slots, cache


def add(attention: SelfAttention, slots: DraftSlots, cache: torch.Tensor, x: torch.Tensor, begin: int, end: int):
    """Verify positions of x: a token is its own position here."""

    def remember(some: torch.Tensor, start: int) -> None:
        rotary = ROTARY.rows(start, start + some.shape[0])
        attention.remember(x[:, some], rotary, cache, start)

    slots.extend(torch.arange(begin, end), 0, remember)


def drafted(attention: SelfAttention, slots: DraftSlots, cache: torch.Tensor, x: torch.Tensor, nodes, ancestors, depth):
    """What nodes read that are positions of x."""
    rows = slots.expand(nodes, ancestors, depth)
    rotary = ROTARY.rows(*rows.positions)
    return attention.draft(
        x[:, rows.tokens], rotary, [Reach(cache, rows.slot, rows.tokens.shape[0], rows.num_known, rows.mask)]
    )[0]


def test_drafting_token_by_token_attends_as_all_positions_at_once(attention):
    x = noise(1, 12, WIDTH)
    with torch.no_grad():
        whole = attention(x, ROTARY.rows(0, 12), causal_mask(12))
        slots, cache = begun(attention, x, 7)
        for depth, i in enumerate(range(7, 12)):
            read = drafted(attention, slots, cache, x, torch.tensor([i]), None, depth)
            torch.testing.assert_close(read, whole[0, i : i + 1], rtol=1e-5, atol=1e-5)


def test_a_tree_attends_along_its_paths(attention):
    """0 root; 1, 2 its children; 3 below 2, 4 below 1: each as if its path were the text."""
    x, known = noise(1, 9 + 5, WIDTH), 9
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[1:, 0] = ancestors[3, 2] = ancestors[4, 1] = True
    with torch.no_grad():
        slots, cache = begun(attention, x, known)
        for depth, (begin, end) in enumerate([(0, 1), (1, 3), (3, 5)]):
            nodes = torch.arange(known + begin, known + end)
            read = drafted(attention, slots, cache, x, nodes, ancestors[begin:end, :end], depth)
            for node in range(begin, end):
                path = [known + above for above in range(node + 1) if ancestors[node, above]]
                alone = x[:, [*range(known), *path]]
                seq = alone.shape[1]
                wanted = attention(alone, ROTARY.rows(0, seq), causal_mask(seq))[0, -1]
                torch.testing.assert_close(read[node - begin], wanted, rtol=1e-5, atol=1e-5)


def test_tokens_that_wait_attend_causally_where_a_layer_above_reads_them(attention):
    x = noise(1, 12, WIDTH)
    slots = DraftSlots(32, 4, x, is_layered=True)
    cache = slots.new_cache(BLOCK.num_kv_heads, HEAD_DIM)
    with torch.no_grad():
        whole = attention(x, ROTARY.rows(0, 12), causal_mask(12))
        add(attention, slots, cache, x, 0, 2)
        for begin, end in ((2, 5), (5, 6), (6, 10), (10, 11)):
            root = drafted(attention, slots, cache, x, torch.tensor([begin]), None, 0)
            torch.testing.assert_close(root, whole[0, begin : begin + 1], rtol=1e-5, atol=1e-5)
            slots.extend(torch.arange(begin, end), 1, pytest.fail)
            rows = slots.expand(torch.tensor([end]), None, 0)
            assert (rows.num_known, rows.positions) == (end - begin - 1, (begin + 1, end + 1))
            read = attention.draft(
                x[:, rows.tokens],
                ROTARY.rows(*rows.positions),
                [Reach(cache, rows.slot, rows.tokens.shape[0], 0, rows.causal)],
            )
            torch.testing.assert_close(read[0], whole[0, begin + 1 : end + 1], rtol=1e-5, atol=1e-5)


def test_what_a_draft_left_in_its_slots_is_overwritten_by_the_text(attention):
    x = noise(1, 12, WIDTH)
    other = noise(1, 12, WIDTH, seed=50)
    with torch.no_grad():
        whole = attention(x, ROTARY.rows(0, 12), causal_mask(12))
        slots, cache = begun(attention, x, 6)
        drafted(attention, slots, cache, x, torch.tensor([6]), None, 0)
        for depth in range(1, 4):
            drafted(attention, slots, cache, other, torch.tensor([6 + depth]), None, depth)
        add(attention, slots, cache, x, 6, 8)
        read = drafted(attention, slots, cache, x, torch.tensor([8]), None, 0)
    torch.testing.assert_close(read, whole[0, 8:9], rtol=1e-5, atol=1e-5)
