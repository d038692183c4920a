"""The engine's side of the target: what is kept after a pass, and the taps of exactly that."""

import pytest
import torch
from tiny_batches import taps_of
from tiny_targets import TinyTarget, load_target

from moray.batch import TapNeeds
from moray.decoding.engine.runner import TargetRunner
from moray.trees.tree import TokenTree, structure_of

LAYERS, DEPTHS_READ = (0, 1, 2, 3), (-1, -3)
#  0 root - 1, 2 - (1: 3, 4) (2: 5) - (5: 6)
TOKENS, PARENTS, DEPTHS = [40, 41, 42, 43, 44, 45, 46], [-1, 0, 0, 1, 1, 2, 5], [0, 1, 1, 2, 2, 2, 3]
PATHS = [[], [1], [2], [1, 3], [1, 4], [2, 5, 6]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("rows"))


def tree() -> TokenTree:
    structure = structure_of(PARENTS, DEPTHS, torch.device("cpu"))
    return TokenTree(torch.tensor(TOKENS), structure.parents, structure.depths, structure.ancestors, 3)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("paths", [*([path] for path in PATHS), PATHS[1:4], PATHS[::-1]], ids=str)
@pytest.mark.parametrize("first_row", [0, 1])
def test_committed_paths_leave_what_plain_text_would(tiny, paths, first_row):
    """Cache, hidden states and the next pass's logits equal those of the text read at once: of one row, and of many."""
    count = len(paths)
    prompts = [tiny.prompt(row, 6 + row) for row in range(count)]
    lengths = [len(prompt) for prompt in prompts]
    rows = TargetRunner(tiny.target, 64 * (count + first_row))
    rows.cache.arrange(64, 0, 0)
    with torch.inference_mode():
        rows.read(first_row, prompts, [0] * count)
        output = rows.verify(first_row, lengths, [tree()] * count, DEPTHS_READ)
        rows.keep(first_row, lengths, paths)
        known = [length + 1 + len(path) for length, path in zip(lengths, paths, strict=True)]
        kv = rows.cache.flat([first_row + row for row in range(count)], [0] * count, known, LAYERS).split(known, dim=1)
        after = tiny.target.logits(rows.verify(first_row, known, [tree()] * count).last)
    for row, path in enumerate(paths):
        nodes = [0, *path]
        text = [*prompts[row], *(TOKENS[node] for node in nodes)]
        whole = taps_of(tiny.target, torch.tensor([text]), TapNeeds(LAYERS, DEPTHS_READ))
        assert whole.kv is not None
        close(kv[row], whole.kv)
        for depth in DEPTHS_READ:
            close(output.hidden[depth][row, nodes], whole.hidden[depth][0, lengths[row] :])
        longer = torch.tensor([[*text, TOKENS[0], TOKENS[2], TOKENS[5]]])
        with torch.no_grad():
            close(after[row, 5], tiny.target.model(longer).logits[0, -1])


def test_a_prompt_is_read_in_pieces_as_at_once(tiny):
    prompt = tiny.prompt(1, 40)
    whole = taps_of(tiny.target, torch.tensor([prompt]), TapNeeds(LAYERS, (-1,)))
    assert whole.kv is not None
    rows = TargetRunner(tiny.target, 128)
    rows.cache.arrange(64, 0, 0)
    with torch.inference_mode():
        for begin, end in ((0, 17), (17, 18), (18, 40)):
            output = rows.read(1, [prompt[begin:end]], [begin], (-1,))
            close(output.hidden[-1], whole.hidden[-1][:, begin:end])
        close(rows.cache.flat([1], [0], [40], LAYERS), whole.kv)
        close(rows.cache.flat([1], [5], [9], (1, 3)), whole.kv[:, 5:14, [1, 3]])


def test_taps_of_rows_lie_one_after_the_other(tiny):
    rows = TargetRunner(tiny.target, 128)
    rows.cache.arrange(64, 0, 0)
    prompts = [tiny.prompt(0, 60), tiny.prompt(1, 20)]
    with torch.inference_mode():
        rows.read(0, prompts, [0, 0])
        kv = rows.cache.flat([0, 1], [57, 3], [3, 16], LAYERS)
    whole = [taps_of(tiny.target, torch.tensor([prompt]), TapNeeds(LAYERS)).kv for prompt in prompts]
    close(kv, torch.cat([whole[0][:, 57:], whole[1][:, 3:19]], dim=1))
