"""Sparse targets beside their dense one: what is measured, on a real pair of tiny targets."""

import json
import math
import shutil

import pytest
import torch
from rich.console import Console
from tiny_targets import make_sparse, save_chat_target

from moray.bench.perplexity import token_losses
from moray.bench.sparse.configs import SparseEvaluationConfig
from moray.bench.sparse.divergence import Divergence, first_divergence
from moray.bench.sparse.evaluation import evaluate_sparse
from moray.bench.sparse.page import render_sparse
from moray.bench.sparse.quality import measure_quality, read_texts
from moray.bench.sparse.work import Weights
from moray.config import validate
from moray.decoding.engine import engine as engine_module
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.accept import Accepted, accept, row_by_row
from moray.errors import ConfigError, DataError, LosslessError
from moray.targets.model import Target
from moray.targets.sparse.measured import MEASURED, Measured
from moray.targets.sparse.target import PassCounts
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from pipelines.evaluate import main_sparse

CHATS = [
    [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word}, {word}!"}]
    for word in ("one", "two", "three")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse-evaluation")
    save_chat_target(folder / "dense")
    shutil.copytree(folder / "dense", folder / "sparse")
    make_sparse(folder / "sparse")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return folder


def settings(folder, **more):
    targets = {name: {"model": str(folder / name), "device": "cpu"} for name in ("dense", "sparse")}
    chats = str(folder / "chats.jsonl")
    return {"targets": targets, "chats": chats, "questions": chats, "max_new_tokens": 12, "num_questions": 2} | more


def test_quality_and_speed_of_a_sparse_target(folder, capsys):
    rows = [{"target": name, "drafter": {"type": "ngram"}} for name in ("dense", "sparse")]
    result = evaluate_sparse(validate(SparseEvaluationConfig, settings(folder, rows=rows)), Console())
    dense, sparse = result["quality"]["dense"], result["quality"]["sparse"]
    assert (dense["agreement"], dense["share"]) == (1.0, 1.0)
    assert sparse["perplexity"] > dense["perplexity"] > 1
    assert 0 < sparse["agreement"] < 1
    assert 0 <= dense["reference_match"] < 1
    assert 0.4 < sparse["share"] < 0.95
    assert (dense["kv_share"], sparse["kv_share"]) == (1.0, sparse["share"]), "skipped tokens store nothing"
    assert dense["pass_share"] == 1.0
    assert sparse["share"] < sparse["pass_share"] < 1.0, "eight tokens need more layers than one"
    assert dense["num_tokens"] == sparse["num_tokens"] > 10
    names = [row["name"] for row in result["rows"]]
    assert names == ["dense", "sparse", "dense + ngram adaptive-8", "sparse + ngram adaptive-8"]
    for row in result["rows"]:
        assert row["num_different"] == row["num_unexplained"] == 0
        assert row["num_answers"] == 2
        assert row["tokens_per_second"] > 0
        assert (row["layers_read"] < 1) == row["name"].startswith("sparse")
        assert (row["weights_read"] == 1.0) == row["name"].startswith("dense")
    dense_alone, sparse_alone, dense_drafts, sparse_drafts = result["rows"]
    assert dense_alone["same_as_dense"] == dense_drafts["same_as_dense"] == 2
    assert sparse_alone["same_as_dense"] == sparse_drafts["same_as_dense"]
    assert dense_alone["operations"] == 1.0 <= dense_drafts["operations"]
    assert 0 < sparse_alone["operations"] <= sparse_drafts["operations"]
    assert result["rows"][0]["speedup"] == 1.0
    assert "2 of 2" in capsys.readouterr().out
    page = render_sparse(result)
    assert page.count("<svg") == 3
    for row in result["rows"]:
        assert f"{row['name']}</th>" in page
    target = Target.load(TargetConfig(model=str(folder / "sparse"), device="cpu"))
    measured = Measured.read(folder / "sparse", target.spec.fingerprint)
    assert measured is not None
    assert (measured.share, measured.agreement) == (sparse["share"], sparse["agreement"])
    assert measured.dense_perplexity == dense["perplexity"]
    assert Measured.read(folder / "sparse", "another") is None, "it was written again since"
    assert not (folder / "dense" / MEASURED).exists()
    (folder / "sparse" / MEASURED).write_text("{")
    with pytest.raises(ConfigError, match="cannot be used"):
        Measured.read(folder / "sparse", target.spec.fingerprint)
    (folder / "sparse" / MEASURED).unlink()


def credulous(tree, logits, sampler, root_position) -> Accepted:
    """Takes the first drafted token, whatever the target thinks of it."""
    if tree.num_nodes == 1:
        return accept(tree, logits, sampler, root_position)
    return Accepted([1], [int(tree.tokens[1])], int(logits[1].argmax()))


def test_a_text_that_is_not_the_target_s_own_fails_the_command_and_the_report_is_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "accept_rows", row_by_row(credulous))
    rows = [{"target": "dense", "drafter": {"type": "ngram"}, "tree": {"type": "chain", "depth": 2}}]
    report = tmp_path / "report.json"
    config = validate(SparseEvaluationConfig, settings(folder, rows=rows, report=str(report)))
    with pytest.raises(LosslessError, match="differs from plain decoding, which is a defect of Moray: dense"):
        main_sparse(config)
    assert json.loads(report.read_text())["rows"][-1]["num_unexplained"] > 0
    assert report.with_suffix(".html").is_file()


def test_a_selection_without_a_predictor_is_refused_before_anything_is_measured(folder):
    rows = [{"target": "sparse", "drafter": {"type": "ngram"}, "select": "path"}]
    with pytest.raises(ConfigError, match=r"rows\[0\].select needs a predictor"):
        evaluate_sparse(validate(SparseEvaluationConfig, settings(folder, rows=rows)), Console())


def test_perplexity_is_that_of_the_responses_alone(folder):
    target = Target.load(TargetConfig(model=str(folder / "dense"), device="cpu"))
    tokenizer = ChatTokenizer.load(str(folder / "dense"))
    texts = read_texts(str(folder / "chats.jsonl"), tokenizer, 1, 1024)
    (text,) = texts
    later = read_texts(str(folder / "chats.jsonl"), tokenizer, None, 1024, 1)
    assert len(later) == 2
    assert later[0].tokens.tolist() != text.tokens.tolist(), "the first chat was left out"
    with pytest.raises(DataError, match="after 3 chats"):
        read_texts(str(folder / "chats.jsonl"), tokenizer, None, 1024, 3)
    quality, best = measure_quality(target, texts, None)
    begin = int(text.predicts.nonzero()[0]) + 1
    losses = token_losses(target, text.tokens[:begin].tolist(), text.tokens[begin:].tolist())
    count = int(text.predicts.sum())
    assert quality.perplexity == pytest.approx(math.exp(sum(losses[:count]) / count), rel=1e-3)
    assert best[0].shape == (count,)
    other, _ = measure_quality(target, texts, [torch.full((count,), -1)])
    assert other.agreement == 0


def test_counts_are_shares_of_layers_and_of_tokens():
    counts = PassCounts()
    counts.record([5, 0, 1], 5)
    more = PassCounts()
    more.record([1, 0, 0], 1)
    counts.add(more)
    assert counts.layers_read == 3 / 6
    assert counts.rows_run == 7 / 18
    counts.record([3, 3, 1], 3, 1)
    assert counts.kept_nodes == (5 + 1 + 1) / 3
    assert PassCounts().layers_read == PassCounts().rows_run == PassCounts().kept_nodes == 1.0


def test_a_pass_reads_layers_routers_and_head_and_multiplies_tokens_with_them():
    weights = Weights(layer=10, head=5, routers=3, num_layers=3)
    counts = PassCounts()
    counts.record([4, 0, 2], 4, 2)
    assert weights.total == 35
    assert weights.read(counts) == pytest.approx(2 * 10 + 3 + 5)
    assert weights.products(counts) == 6 * 10 + 4 * 3 + 2 * 5


def test_a_target_without_some_layers_is_measured_in_layers_of_the_dense_one(folder):
    target = Target.load(TargetConfig(model=str(folder / "dense"), device="cpu"))
    tokenizer = ChatTokenizer.load(str(folder / "dense"))
    texts = read_texts(str(folder / "chats.jsonl"), tokenizer, 1, 1024)
    quality, _ = measure_quality(target, texts, None, 2 * target.spec.num_layers)
    assert (quality.share, quality.kv_share, quality.pass_share) == (0.5, 0.5, 0.5)


def test_weights_are_counted_on_the_targets(folder):
    dense, sparse = (Target.load(TargetConfig(model=str(folder / name), device="cpu")) for name in ("dense", "sparse"))
    one, other = Weights.of(dense), Weights.of(sparse)
    assert (one.routers, other.routers > 0) == (0, True)
    assert (one.layer, one.head, one.num_layers) == (other.layer, other.head, other.num_layers)
    whole = sum(weight.numel() for weight in dense.model.parameters())
    others = one.num_layers * one.layer + dense.spec.hidden_size  # and the final norm
    assert whole - others in (one.head, 2 * one.head), "the rest is the head, and embeddings if they are not shared"


def test_an_unknown_target_is_refused(folder):
    with pytest.raises(ConfigError, match=r"rows\[0\].target is 'x'; targets has dense, sparse"):
        validate(SparseEvaluationConfig, settings(folder, rows=[{"target": "x", "drafter": {"type": "ngram"}}]))


def test_a_first_difference_is_explained_by_a_tie_or_not_at_all(folder):
    target = Target.load(TargetConfig(model=str(folder / "sparse"), device="cpu"))
    prompt = list(range(5, 25))
    plain = SpeculativeDecoder(target, None).generate(prompt, SamplingParams(), 8, ()).tokens
    other = [*plain[:3], (plain[3] + 1) % 10, *plain[4:]]
    found = first_divergence(target, prompt, other, plain)
    assert found.token == 3
    assert first_divergence(target, prompt, plain[:5], plain).token == 5, "one ends earlier"
    logits = target.logits(whole(target, [*prompt, *plain[:3]])).topk(2).values.tolist()
    assert found.logit_margin == pytest.approx(logits[0] - logits[1], abs=1e-4)
    assert found.router_margin > 0
    assert not Divergence(3, 0.1, 0.01).is_tie
    assert Divergence(3, 1e-5, 0.01).is_tie
    assert Divergence(3, 0.1, 1e-5).is_tie


def whole(target, tokens):
    positions = torch.arange(len(tokens))[None]
    return target.forward(torch.tensor([tokens]), positions, None, target.new_cache(len(tokens))).last[0, -1]


def test_a_router_at_a_tie_is_found(folder):
    target = Target.load(TargetConfig(model=str(folder / "sparse"), device="cpu"))
    router = next(iter(target.routers.values()))
    prompt = list(range(5, 25))
    plain = SpeculativeDecoder(target, None).generate(prompt, SamplingParams(), 4, ()).tokens
    layer = next(iter(target.routers))
    depth = layer - target.spec.num_layers - 1
    tokens = torch.tensor([[*prompt, *plain[:2]]])
    positions = torch.arange(tokens.shape[1])[None]
    entering = target.forward(tokens, positions, None, target.new_cache(64), [depth]).hidden[depth][0]
    router.outer.bias.data[1] -= router.margin(entering)[7] - 1e-5
    assert first_divergence(target, prompt, [*plain[:2], 0 if plain[2] else 1], plain).is_tie
