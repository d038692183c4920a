"""Sequences whose drafts come from a client, beside others in one engine: every text is the target's own."""

import pytest
import torch
from side_by_side import GREEDY
from tiny_batches import taps_of
from tiny_drafters import VARIANTS, build
from tiny_targets import MAX_POSITIONS, TinyTarget, load_target

from moray.batch import TapNeeds
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.paced import ClientMemory, Offer
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request, RequestOutput
from moray.errors import DataError
from moray.trees.shapes import ChainShape
from moray.trees.tree import chain_of

NEW = 12
CHAIN = ChainShape(type="chain", depth=2)
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("paced"))


def engine_of(tiny: TinyTarget, variant: str = "moa-0", rows: int = 3, **more) -> Engine:
    drafter = build(tiny, VARIANTS[variant])
    config = EngineConfig(max_num_seqs=rows, kv_cache_tokens=rows * 512, max_model_len=400, tree=CHAIN, **more)
    drafts = {"own": LocalDrafts(drafter, 400, CHAIN.num_expanded)}
    return Engine(tiny.target, config, (), drafts=drafts, paced={"d": drafter}, max_offered_nodes=8)


def request(prompt: list[int], drafter: str | None = "d") -> Request:
    return Request(prompt=tuple(prompt), max_new_tokens=NEW, drafter=drafter)


def plain(tiny: TinyTarget, prompt: list[int]) -> list[int]:
    return PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, GREEDY, NEW, ()).tokens


def until_idle(engine: Engine, found: dict[int, list[RequestOutput]]) -> None:
    for _ in range(200):
        if not engine.is_busy:
            return
        for update in engine.step():
            found.setdefault(update.number, []).append(update)
    raise AssertionError("the engine never comes to rest")


def tokens_of(updates: list[RequestOutput]) -> list[int]:
    return [token for update in updates for token in update.tokens]


@pytest.mark.parametrize("variant", ["moa-0", "eagle-0", "independent-0"])
def test_paced_sequences_and_others_get_their_texts_side_by_side(tiny, variant):
    engine = engine_of(tiny, variant)
    prompts = [tiny.prompt(seed, length) for seed, length in ((0, 9), (1, 270), (2, 30))]
    texts = [plain(tiny, prompt) for prompt in prompts]
    paced = [engine.submit_paced(request(prompt), ClientMemory()) for prompt in prompts[:2]]
    other = engine.submit(request(prompts[2], "own"))
    found: dict[int, list[RequestOutput]] = {}
    until_idle(engine, found)
    assert tokens_of(found[other]) == texts[2], "the others do not wait for clients"
    assert [tokens_of(found[number]) for number in paced] == [text[:1] for text in texts[:2]]
    for seq in range(1, 2 * NEW):  # one right token, one wrong one, in turn
        for number, prompt, text in zip(paced, prompts, texts, strict=False):
            have = tokens_of(found[number])
            if len(have) == NEW:
                continue
            right = text[len(have)] if seq % 2 else (text[len(have)] + 1) % 97
            tree = chain_of(torch.tensor([have[-1], right]))
            engine.offer(number, Offer(seq, len(prompt) + len(have) - 1, tree))
        until_idle(engine, found)
    assert [tokens_of(found[number]) for number in paced] == texts[:2]
    assert not engine.num_running


def test_memory_is_what_the_drafter_observes_and_comes_once(tiny):
    for variant, num_layers in (("moa-1", 1), ("eagle-0", 0)):
        engine, prompt = engine_of(tiny, variant), tiny.prompt(1, 270)
        drafter = build(tiny, VARIANTS[variant])
        for memory_from in (0, 100, 270):
            found: dict[int, list[RequestOutput]] = {}
            number = engine.submit_paced(request(prompt), ClientMemory(memory_from, num_layers))
            until_idle(engine, found)
            engine.offer(number, Offer(1, len(prompt), None, num_plain=4, num_target_layers=num_layers))
            until_idle(engine, found)
            text = [*prompt, *tokens_of(found[number])]
            assert len(text) == len(prompt) + 5
            taps = taps_of(tiny.target, torch.tensor([text]), drafter.observed)
            wanted, at = drafter.observe(taps), memory_from
            for update in found[number]:
                for piece in update.paced.memory if update.paced else ():
                    count = next(iter(piece.values())).shape[1]
                    for name, rows in piece.items():
                        assert torch.allclose(rows, wanted[name][:, at : at + count], atol=1e-4)
                    at += count
            assert at == len(text) - 1, "all tokens but the last, which is not in the cache"
            assert layers_of(found[number], num_layers) == [(0, len(text) - 1)] * num_layers
            engine.cancel(number)


def layers_of(updates: list[RequestOutput], num_layers: int) -> list[tuple[int, int]]:
    """First and last position of the keys and values that came of each of the target's last layers, without a gap."""
    spans: dict[int, tuple[int, int]] = {}
    for update in updates:
        for piece in update.paced.tail if update.paced else ():
            begin, end = spans.get(piece.layer, (piece.begin, piece.begin))
            assert piece.begin == end, "a gap, or a token twice"
            spans[piece.layer] = begin, end + piece.kv.shape[0]
    return [spans[layer] for layer in range(1, num_layers + 1)]


def test_keys_and_values_of_the_last_layers_come_while_they_are_used(tiny):
    engine, prompt = engine_of(tiny, "dynamic-moa-0"), tiny.prompt(1, 270)
    number = engine.submit_paced(request(prompt), ClientMemory())
    found: dict[int, list[RequestOutput]] = {}
    counts = [0, 0, 1, 0, 2, 2]
    for seq, num_layers in enumerate(counts):
        until_idle(engine, found)
        at = len(prompt) + len(tokens_of(found[number])) - 1
        engine.offer(number, Offer(seq + 1, at, None, num_target_layers=num_layers))
    until_idle(engine, found)
    with pytest.raises(DataError, match="drafts with 0, 1, 2"):
        engine.offer(number, Offer(9, at + 1, None, num_target_layers=3))
    lengths = [sum(p.kv.shape[0] for p in u.paced.tail) for u in found[number] if u.paced]
    num_chunks = len(lengths) - len(counts)
    length = len(prompt)
    assert lengths[:num_chunks] == [0] * num_chunks, "a prompt brings none"
    assert lengths[num_chunks:] == [0, 0, length + 3, 0, 2 + length + 5, 2]
    text = torch.tensor([[*prompt, *tokens_of(found[number])][:-1]])
    last = tiny.target.spec.num_layers
    wanted = taps_of(tiny.target, text, TapNeeds((last - 2, last - 1), ())).kv
    spans = layers_of(found[number], 2)
    assert spans == [(0, text.shape[1])] * 2
    for layer in (1, 2):
        pieces = [p.kv for u in found[number] if u.paced for p in u.paced.tail if p.layer == layer]
        assert torch.allclose(torch.cat(pieces), wanted[0, :, -layer], atol=1e-4)


def test_a_sequence_that_waits_for_its_client_costs_no_steps(tiny):
    engine = engine_of(tiny, rows=1)
    found: dict[int, list[RequestOutput]] = {}
    number = engine.submit_paced(request(tiny.prompt(0, 9)), ClientMemory())
    until_idle(engine, found)
    engine.submit(request(tiny.prompt(1, 9), None))  # has no place while the other one waits
    assert not engine.is_busy
    engine.cancel(number)
    assert engine.is_busy
    until_idle(engine, found)
    assert engine.num_waiting == 0


def test_drafts_that_were_sent_in_a_wrong_expectation_are_voided(tiny):
    engine, prompt = engine_of(tiny), tiny.prompt(0, 9)
    text = plain(tiny, prompt)
    found: dict[int, list[RequestOutput]] = {}
    number = engine.submit_paced(request(prompt), ClientMemory())
    until_idle(engine, found)
    wrong = (text[1] + 1) % 97
    engine.offer(number, Offer(1, len(prompt), chain_of(torch.tensor([text[0], wrong]))))
    engine.offer(number, Offer(2, len(prompt) + 2, chain_of(torch.tensor([text[2], text[3]]))))
    with pytest.raises(DataError, match="2 offers wait"):
        engine.offer(number, Offer(3, len(prompt) + 2, None))
    until_idle(engine, found)
    assert [(u.paced.seq, u.paced.is_void) for u in found[number] if u.paced and u.paced.seq] == [(1, False), (2, True)]
    right = [Offer(4, len(prompt) + 1, chain_of(torch.tensor(text[1:3])))]
    right.append(Offer(5, len(prompt) + 3, chain_of(torch.tensor(text[3:5]))))
    for offer in right:
        engine.offer(number, offer)
    until_idle(engine, found)
    assert tokens_of(found[number]) == text[:6]


def test_what_cannot_be_verified_is_refused(tiny):
    engine, prompt = engine_of(tiny), tiny.prompt(0, 9)
    with pytest.raises(DataError, match="they can run d"):
        engine.submit_paced(request(prompt, "own"), ClientMemory())
    with pytest.raises(DataError, match="memory_from is 10"):
        engine.submit_paced(request(prompt), ClientMemory(10))
    number = engine.submit_paced(request(prompt), ClientMemory())
    with pytest.raises(DataError, match="has not been read yet"):
        engine.offer(number, Offer(1, 9, None))
    until_idle(engine, {})
    with pytest.raises(DataError, match="position 3"):
        engine.offer(number, Offer(1, 3, None))
    with pytest.raises(DataError, match="11 nodes; 9 are accepted"):
        engine.offer(number, Offer(1, 9, chain_of(torch.zeros(11, dtype=torch.long))))
