"""A target over several processes is the target: the same numbers, the same text, an error when one ends."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from compiled_kernels import CAN_COMPILE
from rich.console import Console
from safetensors import safe_open
from side_by_side import COUPLED, GREEDY, SHAPES, is_lossless, plainly
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target, save_chat_target

from moray.activations.capture.record import record_taps
from moray.activations.format.schema import CacheConfig
from moray.bench.configs import EvaluateConfig
from moray.bench.evaluation import evaluate
from moray.config import validate
from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request
from moray.errors import RankError
from moray.targets.head import TargetHead
from moray.targets.kernels.kinds import ALL_ROWS, Kernels
from moray.targets.model import Target
from moray.targets.parallel.plan import plan_ranks
from moray.targets.parallel.target import ParallelTarget
from moray.targets.parallel.weights import load_part
from moray.targets.spec import TargetConfig

SPLIT = {
    "biases-2": ("qwen2", 2, {}),  # query and key/value heads are split
    "norms-4": ("qwen3", 4, {}),  # 2 key/value heads for 4: each is held twice
    "shared-heads-2": ("llama", 2, {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "whole-attention-3": ("tied", 3, {"intermediate_size": 100}),  # 4 heads for 3: the attention is whole on each
}
FAMILIES = [family for family, *_ in SPLIT.values()]
assert len({*FAMILIES}) == len(FAMILIES)
DRAFTED = ("moa-1", "eagle-0", "glide-0", "medusa-0", "ngram-0")
CLOSE = 1e-4


@pytest.fixture(scope="module", params=SPLIT)
def both(request, tmp_path_factory) -> Iterator[tuple[TinyTarget, TinyTarget]]:
    """A target in one process, and over several."""
    name, num_ranks, sizes = SPLIT[request.param]
    threads = torch.get_num_threads()
    whole = load_target(tmp_path_factory.mktemp(request.param), name, **sizes)
    config = TargetConfig(model=str(whole.folder), device="cpu", tensor_parallel=num_ranks)
    target = Target.load(config)
    assert isinstance(target, ParallelTarget)
    yield whole, TinyTarget(name, whole.folder, target)
    target.followers.end()
    torch.set_num_threads(threads)


def taps(tiny: TinyTarget) -> dict[str, torch.Tensor]:
    chats = [np.array(tiny.prompt(0, 30)), np.array(tiny.prompt(1, 17))]
    config = CacheConfig(hidden_depths=(-1, -2), kv_layers=(0, 2, 3))
    return dict(record_taps(tiny.target, config, chats))


def test_logits_and_taps_are_those_of_one_process(both):
    whole, split = both
    tokens = torch.tensor([whole.prompt(0, 20), whole.prompt(1, 20)])
    positions = torch.arange(20).expand(2, -1)
    wanted, found = (
        one.target.logits(one.target.forward(tokens, positions, None, one.target.new_cache(20, 2)).last) for one in both
    )
    torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)
    wanted_taps, found_taps = taps(whole), taps(split)
    assert wanted_taps.keys() == found_taps.keys()
    for name, tap in wanted_taps.items():
        torch.testing.assert_close(found_taps[name], tap, atol=CLOSE, rtol=0)


def test_plain_text_is_that_of_one_process(both):
    whole, split = both
    for seed in range(2):
        prompt = whole.prompt(seed, 12)
        assert plainly(split, prompt, GREEDY, 30) == plainly(whole, prompt, GREEDY, 30)


@pytest.mark.parametrize("turn", [0, 1, *(pytest.param(turn, marks=pytest.mark.soak) for turn in (2, 3, 4))])
def test_speculation_gives_its_plain_text(both, turn):
    """Each target meets two of the drafters, so that all are there, and in the soak each meets all."""
    whole, split = both
    drafter = build(split, VARIANTS[DRAFTED[(FAMILIES.index(whole.name) + turn) % len(DRAFTED)]], seed=3)
    assert is_lossless(split, drafter, SHAPES["dynamic"], GREEDY, [split.prompt(4)], 15)
    assert is_lossless(split, drafter, SHAPES["chain"], COUPLED, [split.prompt(5)], 10)


def test_the_engine_answers_several_at_once(both):
    _, split = both
    shape = SHAPES["dynamic"]
    drafter = build(split, VARIANTS["moa-0"], seed=3)
    config = EngineConfig(max_num_seqs=3, kv_cache_tokens=3 * 128, max_model_len=100, tree=shape)
    engine = Engine(split.target, config, (), drafts={"drafter": LocalDrafts(drafter, 100, shape.num_expanded)})
    prompts = [split.prompt(seed, length) for seed, length in enumerate((9, 1, 33, 20))]
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=12, params=GREEDY, drafter="drafter") for prompt in prompts
    ]
    answers = [generation.tokens for generation in answer_batch(engine, requests)]
    assert answers == [plainly(split, prompt, GREEDY, 12) for prompt in prompts]


def test_a_drafter_s_head_is_read_whole(both):
    whole, split = both
    found, wanted = TargetHead.of(split.target, 1).tensors(), TargetHead.of(whole.target, 1).tensors()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_packed_weights_give_the_same_numbers(both):
    whole, split = both
    target = split.target
    assert isinstance(target, ParallelTarget)
    tokens = torch.tensor([whole.prompt(0, 20)])

    def logits(one: Target) -> torch.Tensor:
        return one.logits(one.forward(tokens, torch.arange(20)[None], None, one.new_cache(20)).last)

    wanted = logits(whole.target)
    compiled = [50, ALL_ROWS] if CAN_COMPILE else []
    choices = [(None, 0), (50, 0), (1, 0), *((None, up_to) for up_to in compiled)]
    for packed_from, compiled_up_to in choices:
        target.pack_all_ranks(Kernels(packed_from, "", compiled_up_to=compiled_up_to))
        torch.testing.assert_close(logits(target), wanted, atol=CLOSE, rtol=0)


def test_no_rank_holds_more_than_its_share(both):
    whole, split = both
    target = split.target
    assert isinstance(target, ParallelTarget)
    sizes = {name: tensor.numel() for name, tensor in whole.target.model.state_dict().items()}
    held = {name: tensor.numel() for name, tensor in target.model.state_dict().items()}
    for name, size in sizes.items():
        is_whole = "norm" in name or "embed" in name
        is_whole |= "self_attn" in name and not target.plan.splits_attention
        num_parts = target.plan.num_ranks
        if ".k_proj" in name or ".v_proj" in name:
            num_parts = min(num_parts, whole.target.spec.num_kv_heads)
        share = size if is_whole else -(-size // num_parts)
        assert held[name] <= max(share * 1.1, size if name.endswith("bias") else 0), name


class _CountingFile:
    """A safetensors file that adds up the numbers read from it."""

    def __init__(self, *args: object, counts: dict[str, int], **options: object) -> None:
        self._file, self._counts = safe_open(*args, **options), counts

    def __enter__(self) -> "_CountingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def _counted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._counts[name] = self._counts.get(name, 0) + tensor.numel()
        return tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> "_CountingSlice":
        return _CountingSlice(self._file.get_slice(name), partial(self._counted, name))


class _CountingSlice:
    def __init__(self, stored: Any, counted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stored, self._counted = stored, counted

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._counted(self._stored[index])


def test_no_rank_reads_more_than_it_holds(both, monkeypatch):
    whole, split = both
    target = split.target
    assert isinstance(target, ParallelTarget)
    config = TargetConfig(model=str(whole.folder), device="cpu", tensor_parallel=target.plan.num_ranks)
    sizes = {name: tensor.numel() for name, tensor in whole.target.model.state_dict().items()}
    divided = [name for name in sizes if name.endswith("weight") and (".mlp." in name or "lm_head" in name)]
    for plan in plan_ranks(target.spec, target.plan.num_ranks):
        counts: dict[str, int] = {}
        monkeypatch.setattr("moray.targets.parallel.weights.safe_open", partial(_CountingFile, counts=counts))
        part = load_part(config, plan, torch.device("cpu"))
        held = {name: tensor.numel() for name, tensor in part.state_dict().items()}
        assert sum(counts.values()) == sum(held.values()) < sum(sizes.values()), plan.rank
        share = sum(sizes[name] for name in divided) / plan.num_ranks
        assert sum(held[name] for name in divided) <= 1.1 * share, plan.rank


def test_an_evaluation_over_two_processes_gives_the_target_s_own_text(tmp_path):
    folder = save_chat_target(tmp_path / "target")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "one two one two"}\n{"prompt": "three"}\n')
    texts = []
    for num_ranks in (1, 2):
        settings = {
            "target": {"model": str(folder), "device": "cpu", "tensor_parallel": num_ranks},
            "drafters": [{"type": "ngram"}],
            "trees": [{"type": "chain", "depth": 3}],
            "questions": str(tmp_path / "questions.jsonl"),
            "max_new_tokens": 16,
            "output": str(tmp_path / f"ranks-{num_ranks}"),
        }
        report = evaluate(validate(EvaluateConfig, settings), Console(quiet=True))
        assert {row["drafter"]: row["lossless"] for row in report["rows"]}["ngram"] == 1
        lines = (tmp_path / f"ranks-{num_ranks}" / "answers.jsonl").read_text().splitlines()
        answers = [answer for line in lines for answer in json.loads(line)["answers"]]
        texts.append([answer["generation"]["tokens"] for answer in answers if answer["method"] in ("plain", "ngram")])
    assert texts[0] == texts[1]


def test_a_killed_rank_is_an_error_and_no_hang(tmp_path):
    whole = load_target(tmp_path)
    target = Target.load(TargetConfig(model=str(tmp_path), device="cpu", tensor_parallel=2))
    assert isinstance(target, ParallelTarget)
    split = TinyTarget("llama", tmp_path, target)
    assert plainly(split, whole.prompt(), GREEDY, 5) == plainly(whole, whole.prompt(), GREEDY, 5)
    (pid,) = target.followers.pids
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match="tensor_parallel: a rank of 2 has ended"):
        plainly(split, whole.prompt(1), GREEDY, 5)
    target.followers.wait()
    with pytest.raises(RankError, match="rank 1 of 2 has ended with exit code -9"):
        target.check_ranks()
    assert time.monotonic() - began < 30
