"""Hit rates are what drafters really do at every position, and the tree that comes out goes where trees go."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from rehearsed import Rehearsed
from rich.console import Console
from side_by_side import plainly
from tiny_batches import taps_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target, save_chat_target

from moray.batch import TapNeeds, TrainBatch
from moray.bench.configs import DecodeBenchmarkConfig, TreeSearchConfig
from moray.config import load_config, validate
from moray.decoding.params import SamplingParams
from moray.drafters.checkpoint import save_drafter
from moray.drafters.configs import MedusaConfig
from moray.drafters.learner import DraftView
from moray.errors import ConfigError, DataError
from moray.provenance import write_json_atomically
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from moray.trees.search import expected_tau
from pipelines.benchmarks.hit_rates import HitCounter
from pipelines.benchmarks.tree_search import print_tree, search_tree, tree_yaml, write_tree

LEVELS, RANKS, CAPACITY = 3, 4, 400
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("hits") / "target")


class Breathless(Rehearsed):
    """Right, but with nothing to say below the first level."""

    def step(self, state, tokens, ancestors, depth):
        return super().step(state, tokens, ancestors, depth) if depth == 0 else None


def ranks_of(logits: torch.Tensor, token: int) -> list[float]:
    best = logits.argsort(descending=True)[:RANKS].tolist()
    return [float(candidate == token) for candidate in best]


def counted(counter: HitCounter, prompt: list[int], max_new_tokens: int, eos_ids: tuple[int, ...]) -> list[int]:
    """The answer to a prompt, after it was counted."""
    answer = counter.answer(prompt, max_new_tokens, eos_ids)
    counter.count(prompt, answer)
    return answer


def test_a_perfect_drafter_is_always_right_at_every_level(tiny):
    counter = HitCounter(tiny.target, Rehearsed(tiny.target), LEVELS, RANKS, CAPACITY)
    for seed, length in ((0, 9), (1, 250)):  # the second answer begins in one chunk of the prefill, ends in another
        prompt = tiny.prompt(seed, length)
        assert counted(counter, prompt, 20, ()) == plainly(tiny, prompt, GREEDY, 20)
    assert counter.measured.rates == ((1.0, 0.0, 0.0, 0.0),) * LEVELS
    assert counter.measured.num_positions == (2 * 19, 2 * 18, 2 * 17)


@torch.inference_mode()
def test_a_noisy_drafter_is_right_as_often_as_its_candidates_are(tiny):
    noise, prompt = 1.5, tiny.prompt(2)
    counter = HitCounter(tiny.target, Rehearsed(tiny.target, noise), LEVELS, RANKS, CAPACITY)
    text = [*prompt, *counted(counter, prompt, 40, ())]
    tokens = torch.tensor([text])
    logits = tiny.target.logits(taps_of(tiny.target, tokens, TapNeeds(hidden_depths=(-1,))).hidden[-1][0])
    for level in range(LEVELS):
        found = []
        for root in range(len(prompt), len(text) - 1 - level):
            generator = torch.Generator().manual_seed(root + level)
            noisy = logits[root + level] + noise * torch.randn(logits.shape[1], generator=generator)
            found.append(ranks_of(noisy, text[root + level + 1]))
        expected = torch.tensor(found).mean(dim=0).tolist()
        assert 0 < expected[0] < 1
        assert counter.measured.rates[level] == pytest.approx(expected)
        assert counter.measured.num_positions[level] == len(found)


@torch.inference_mode()
def test_medusa_s_rates_are_those_of_its_heads_in_training(tiny):
    drafter = build(tiny, VARIANTS["medusa-1"])
    generator = torch.Generator().manual_seed(0)
    for weight in drafter.block_weights:  # heads that start as the identity would all say the same
        weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    counter = HitCounter(tiny.target, drafter, 9, RANKS, CAPACITY)
    prompt = tiny.prompt(3)
    text = [*prompt, *counted(counter, prompt, 40, ())]
    tokens, seq = torch.tensor([text]), len(text)
    batch = TrainBatch(
        tokens, torch.ones(1, seq, dtype=torch.bool), torch.tensor([seq]), taps_of(tiny.target, tokens, drafter.needs)
    )
    view = DraftView(torch.arange(seq)[None], torch.zeros(1, dtype=torch.bool))
    assert len(counter.measured.rates) == drafter.max_depth == 6, "as many levels as heads"
    for level, prediction in enumerate(drafter(batch, view).predictions):
        logits = prediction.score(prediction.hidden[0])
        found = [ranks_of(logits[i], text[i + 1]) for i in range(len(prompt) + level, seq - 1)]
        assert counter.measured.rates[level] == pytest.approx(torch.tensor(found).mean(dim=0).tolist())


def test_what_is_not_proposed_is_a_miss_and_nothing_below_it_is_asked(tiny):
    counter = HitCounter(tiny.target, Breathless(tiny.target), LEVELS, RANKS, CAPACITY)
    counted(counter, tiny.prompt(), 20, ())
    assert counter.measured.rates == ((1.0, 0.0, 0.0, 0.0), (0.0,) * RANKS, (0.0,) * RANKS)
    assert counter.measured.num_positions == (19, 18, 0)


@pytest.mark.parametrize("name", ["moa-0", "moa-2", "eagle-1", "glide-0", "medusa-0", "independent-1", "ngram-0"])
def test_every_drafter_can_be_measured(tiny, name):
    counter = HitCounter(tiny.target, build(tiny, VARIANTS[name]), LEVELS, RANKS, CAPACITY)
    counted(counter, tiny.prompt(), 12, ())
    rates = counter.measured
    assert rates.num_positions[0] == 11
    assert all(0 <= rate <= 1 for row in rates.rates for rate in row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a random Medusa, and two questions of two turns."""
    folder = tmp_path_factory.mktemp("search")
    save_chat_target(folder / "target")
    chat = TinyTarget("chat", folder / "target", Target.load(TargetConfig(model=str(folder / "target"), device="cpu")))
    text = ChatTokenizer.load(str(folder / "target")).fingerprint
    save_drafter(folder / "medusa", build(chat, MedusaConfig(type="medusa", num_heads=3)), text)
    rows = [{"turns": [f"one two {number}", "and then?"]} for number in range(2)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def configure(folder: Path, **settings) -> TreeSearchConfig:
    values = {
        "target": {"model": str(folder / "target"), "device": "cpu"},
        "drafter": str(folder / "medusa"),
        "questions": str(folder / "questions.jsonl"),
        "max_new_tokens": 24,
        "ranks": 40,
        "nodes": 7,
    }
    return validate(TreeSearchConfig, values | settings)


def test_the_yaml_is_what_trees_takes_and_the_result_is_json(folder, tmp_path):
    result = search_tree(configure(folder), Console(quiet=True))
    assert result["tree"] == "sparse-7"
    assert len(result["rates"]) == 3
    assert result["expected_tau"] == pytest.approx(
        expected_tau(result["rates"], [tuple(path) for path in result["paths"]])
    )
    write_json_atomically(tmp_path / "tree.json", result)
    write_tree(result, tmp_path / "tree.yaml")
    assert set(yaml.safe_load(tree_yaml(result))) == {"trees"}
    assert max(map(len, tree_yaml(result).splitlines())) <= 120
    words = [str(tmp_path / "tree.yaml"), "target.model=x", "drafters=[x]", "questions=x"]
    (shape,) = load_config(DecodeBenchmarkConfig, words).trees
    assert sorted(shape.paths) == sorted(map(tuple, result["paths"]))
    console = Console(record=True, width=100)
    print_tree(result, console)
    assert f"sparse-7: {shape.depth} levels, expected tau {result['expected_tau']:.3f}" in console.export_text()


@pytest.mark.parametrize("report", ["tree.yaml", "./tree.yaml", "x/../tree.yaml"])
def test_tree_and_report_are_two_files(folder, report):
    with pytest.raises(ConfigError, match=r"output is 'tree.yaml' and report \(--json\) '.*', the same file; .* two"):
        configure(folder, output="tree.yaml", report=report)
    configure(folder, output="tree.yaml", report="tree.json")


def test_what_cannot_be_searched_says_why(folder, tmp_path):
    with pytest.raises(ConfigError, match="'ranks' is 65"):
        configure(folder, ranks=65)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 600}))
    with pytest.raises(
        DataError, match=r"no prompt of questions '.*long.jsonl' fits into the context of 512 tokens; give"
    ):
        search_tree(configure(folder, questions=str(path)), Console(quiet=True))
    nothing = configure(folder, drafter={"type": "ngram", "min_ngram": 16, "max_ngram": 16})
    with pytest.raises(DataError, match="drafter ngram never had the target's next token among its 40 likeliest"):
        search_tree(nothing, Console(quiet=True))
