"""From questions to figures with real models: what a report claims is what happened."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from rehearsed import Rehearsed
from tiny_targets import save_chat_target

from moray.bench.configs import DecodeBenchmarkConfig, EvaluateConfig
from moray.bench.lossless import check_lossless
from moray.bench.reports.schema import read_report
from moray.bench.runner import Measurement, Method, Run, Runner
from moray.bench.specbench import Question
from moray.bench.summary import slower_than_plain, summarise
from moray.config import validate
from moray.decoding.engine import engine as engine_module
from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.accept import Accepted, accept, row_by_row
from moray.errors import ConfigError, LosslessError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

QUESTIONS = [Question("1", "sums", ("one two", "three?")), Question("2", "names", ("four five six",))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("runner"))


def runner_of(folder: Path, **settings) -> tuple[Runner, EvaluateConfig]:
    values = {
        "target": {"model": str(folder)},
        "drafters": ["unused"],
        "questions": "unused",
        "max_new_tokens": 12,
        "trees": [{"type": "chain", "depth": 3}],
        "output": "unused",
    }
    config = validate(EvaluateConfig, values | settings)
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    return Runner(target, {"rehearsed": Rehearsed(target, 0.5)}, ChatTokenizer.load(str(folder)), config), config


def measure(folder: Path, questions: list[Question] = QUESTIONS, **settings) -> tuple[Measurement, EvaluateConfig]:
    runner, config = runner_of(folder, **settings)
    for _ in runner.ask(questions):
        pass
    return runner.measurement, config


@dataclass(frozen=True)
class Call:
    """One run of a method, and what came of it."""

    method: str
    temperature: float
    max_new_tokens: int
    sequence: int
    generation: Generation


def record_calls(runner: Runner) -> list[Call]:
    """Every run of any method from now on, in order."""
    calls: list[Call] = []

    def recorded(method: Method) -> Run:
        run = method.run

        def record(prompt: list[int], params: SamplingParams, most: int, sequence: int) -> Generation:
            generation = run(prompt, params, most, sequence)
            calls.append(Call(method.name, params.temperature, most, sequence, generation))
            return generation

        return record

    for method in runner.measurement.methods:
        method.run = recorded(method)
    return calls


def report_of(measurement: Measurement, config: EvaluateConfig, dtype: str = "float32") -> dict:
    figures = summarise(measurement, config.samplings, dtype)
    read_report(figures | {"training": {}, "machine": {}, "settings": {}})
    return figures


def decoding_seconds(method) -> float:
    return sum(generation.seconds for generation in method.generations)


def test_figures_are_those_of_the_generations(folder):
    measurement, config = measure(folder)
    figures = report_of(measurement, config)
    (row,) = figures["rows"]
    plain, generate, drafted = measurement.methods
    assert [len(method.generations) for method in measurement.methods] == [3, 3, 3]
    assert all(generate.lossless), "transformers is another implementation of the same greedy text"
    assert row["lossless"] is True
    assert (row["num_prompts"], row["num_tokens"]) == (3, sum(len(g.tokens) for g in plain.generations))
    cycles = sum(len(g.accepted) for g in drafted.generations)
    assert row["tau"] == pytest.approx(sum(len(g.tokens) - 1 for g in drafted.generations) / cycles)
    seconds = [sum(g.seconds + g.prefill_seconds for g in m.generations) for m in measurement.methods]
    assert row["speedup_vs_plain"] == pytest.approx(seconds[0] / seconds[2])
    assert row["speedup_vs_generate"] == pytest.approx(seconds[1] / seconds[2])
    step = decoding_seconds(plain) / sum(len(g.tokens) - 1 for g in plain.generations)
    emitted = sum(sum(g.emitted) for g in drafted.generations)
    assert row["speedup_in_cycles"] == pytest.approx(emitted * step / decoding_seconds(drafted)), "without the prefill"
    ideal = row["tau"] / (1 + row["draft_steps"] * row["draft_cost"])
    assert row["efficiency"] == pytest.approx(row["speedup_in_cycles"] / ideal)
    assert sum(row["phases_ms"].values()) * cycles / 1e3 == pytest.approx(sum(g.seconds for g in drafted.generations))
    assert {entry["category"]: entry["num_prompts"] for entry in figures["categories"]} == {"sums": 2, "names": 1}
    assert figures["notes"] == []


def test_trees_that_lose_are_named_unless_they_stop_by_themselves():
    rows = [
        {"drafter": "moa", "tree": tree, "speedup_vs_plain": 0.9, "speedup_spread": spread, "temperature": 0.5}
        for tree, spread in (("chain-3", (0.8, 1.02)), ("dynamic-5x4-16", (0.6, 0.99)), ("adaptive-8", (0.8, 0.9)))
    ]
    (note,) = slower_than_plain(rows)
    assert note.startswith("slower than plain decoding: moa dynamic-5x4-16 at T 0.5 (0.90); an adaptive tree drafts")
    assert slower_than_plain(rows[:1]) == slower_than_plain([]) == []


def test_a_broken_verifier_is_reported_as_not_lossless(folder, monkeypatch):
    def accept_everything(tree, logits, sampler, root_position):
        if tree.max_depth == 0:  # plain decoding
            return accept(tree, logits, sampler, root_position)
        return Accepted([1, 2, 3], tree.tokens[1:4].tolist(), int(logits[3].argmax()))

    monkeypatch.setattr(engine_module, "accept_rows", row_by_row(accept_everything))
    measurement, config = measure(folder)
    assert report_of(measurement, config)["rows"][0]["lossless"] is False


def test_what_tokens_cannot_prove_is_not_claimed(folder):
    """Rejection sampling keeps the distribution, 16 bits the text up to near ties: neither is a defect."""
    measurement, config = measure(
        folder, sampling={"temperature": 1.0, "acceptance_method": "rejection"}, max_new_tokens=24
    )
    assert not all(measurement.methods[2].lossless)
    assert report_of(measurement, config)["rows"][0]["lossless"] is None
    measurement, config = measure(folder)
    measurement.methods[2].lossless[1] = False
    figures = report_of(measurement, config, "bfloat16")
    assert figures["rows"][0]["lossless"] is None
    assert "1 of 3 answers differ" in figures["notes"][0]


@pytest.mark.parametrize("settings", [{}, {"typical_epsilon": 1.0, "typical_delta": 1e9}], ids=["lossy", "equal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_typical_acceptance_is_never_called_lossless(folder, settings, dtype):
    """Not even where it happens to give plain decoding's text."""
    measurement, config = measure(folder, sampling={"temperature": 1.0, "acceptance_method": "typical"} | settings)
    assert all(measurement.methods[2].lossless) == bool(settings)
    figures = report_of(measurement, config, dtype)
    assert figures["rows"][0]["lossless"] is None
    assert figures["notes"] == ["typical acceptance is lossy: the text need not follow the target's distribution"]


def test_generate_does_our_task_whatever_the_model_brings_along(folder, tmp_path):
    import json
    import shutil

    shutil.copytree(folder, tmp_path / "penal")
    path = tmp_path / "penal" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.9, "no_repeat_ngram_size": 2}))
    measurement, _ = measure(tmp_path / "penal", max_new_tokens=40)
    assert all(measurement.methods[1].lossless)


def test_answers_without_a_cycle_leave_figures_undefined(folder):
    measurement, config = measure(folder, max_new_tokens=1)
    (row,) = report_of(measurement, config)["rows"]
    assert (row["tau"], row["draft_cost"], row["efficiency"], row["lossless"]) == (None, None, None, True)


def test_trees_that_are_too_deep_are_left_out_unless_they_all_are(folder, monkeypatch):
    monkeypatch.setattr(Rehearsed, "max_depth", 2)
    shallow, deep = {"type": "chain", "depth": 2}, {"type": "chain", "depth": 3}
    runner, _ = runner_of(folder, trees=[shallow, deep], compare_generate=False)
    assert [(method.name, method.tree) for method in runner.measurement.methods[1:]] == [("rehearsed", "chain-2")]
    assert runner.measurement.notes == ["rehearsed, chain-3: left out, this drafter drafts at most 2 levels"]
    with pytest.raises(ConfigError, match=r"too deep for every drafter .* at most 2 levels\); take shallower"):
        runner_of(folder, trees=[deep])


def test_turns_that_do_not_fit_are_counted(folder):
    long = Question("3", "long", ("x" * 600, "and again"))
    measurement, config = measure(folder, [long, *QUESTIONS])
    assert len(measurement.asked) == 3
    assert report_of(measurement, config)["notes"] == [
        "2 turns were left out: with them the prompt fills the whole context"
    ]


def test_every_temperature_has_its_own_conversation_and_figures(folder):
    measurement, config = measure(folder, temperatures=[0, 1], max_new_tokens=24)
    figures = report_of(measurement, config)
    assert [(asked.category, asked.temperature) for asked in measurement.asked] == [
        ("sums", 0.0), ("sums", 1.0), ("sums", 0.0), ("sums", 1.0), ("names", 0.0), ("names", 1.0)
    ]  # fmt: skip
    assert [(row["temperature"], row["num_prompts"], row["lossless"]) for row in figures["rows"]] == [
        (0.0, 3, True),
        (1.0, 3, True),
    ]
    assert {(e["category"], e["temperature"], e["num_prompts"]) for e in figures["categories"]} == {
        ("sums", 0.0, 2), ("sums", 1.0, 2), ("names", 0.0, 1), ("names", 1.0, 1)
    }  # fmt: skip
    assert [(b["name"], b["temperature"]) for b in figures["baselines"]] == [
        ("plain", 0.0), ("generate", 0.0), ("plain", 1.0), ("generate", 1.0)
    ]  # fmt: skip
    alone, _ = measure(folder, sampling={"temperature": 1.0}, max_new_tokens=24)
    texts = [[g.tokens for g in m.at(1.0).methods[2].generations] for m in (measurement, alone)]
    assert texts[0] == texts[1], "what is drawn at one temperature does not depend on the others"
    cold, warm = (m.generations for m in (measurement.at(0.0).methods[0], measurement.at(1.0).methods[0]))
    assert [g.tokens for g in cold] != [g.tokens for g in warm]


def test_every_method_is_warmed_up_at_every_temperature_before_anything_is_timed(folder):
    runner, _ = runner_of(folder, temperatures=[0, 1], max_new_tokens=5)
    calls = record_calls(runner)
    for _ in range(2):
        for _ in runner.ask(QUESTIONS[1:]):
            pass
    names = [method.name for method in runner.measurement.methods]
    assert names == ["plain", "generate", "rehearsed"]
    warm, timed = calls[:6], calls[6:]
    assert sorted((c.method, c.temperature) for c in warm) == sorted(product(names, (0.0, 1.0))), "each of them once"
    assert {c.max_new_tokens for c in warm} == {16}
    assert len(timed) == 2 * 2 * 3
    assert {c.max_new_tokens for c in timed} == {5}, "warmed up again"
    for method in runner.measurement.methods:
        expected = [c.generation for c in timed if c.method == method.name]
        assert [id(g) for g in method.generations] == [id(g) for g in expected], "nothing of the warm-up counts"


def test_progress_names_the_method_that_runs_next(folder):
    """A turn of many methods takes minutes, and the warm-up as long again."""
    runner, _ = runner_of(folder, max_new_tokens=5)
    shown: list[str] = []
    for _ in runner.ask(QUESTIONS[:1], show=shown.append):
        pass
    labels = ["plain", "generate", f"rehearsed, {runner.measurement.methods[2].tree}"]
    assert shown[:3] == [f"warm-up: {label}" for label in labels]
    assert shown[3:6] == labels


def test_methods_rotate_from_prompt_to_prompt_and_temperatures_alternate(folder):
    runner, _ = runner_of(folder, temperatures=[0, 1], max_new_tokens=5)
    calls = record_calls(runner)
    for _ in runner.ask(QUESTIONS):
        pass
    prompts = [calls[begin : begin + 3] for begin in range(6, len(calls), 3)]
    assert [{(c.sequence, c.temperature) for c in prompt} for prompt in prompts] == [
        {(sequence, temperature)} for sequence in range(3) for temperature in (0.0, 1.0)
    ]
    orders = [
        ["plain", "generate", "rehearsed"],
        ["generate", "rehearsed", "plain"],
        ["rehearsed", "plain", "generate"],
    ]
    for temperature in (0.0, 1.0):
        asked = [prompt for prompt in prompts if prompt[0].temperature == temperature]
        assert [[c.method for c in prompt] for prompt in asked] == orders
    for method in runner.measurement.methods:
        expected = [c.generation for prompt in prompts for c in prompt if c.method == method.name]
        assert [id(g) for g in method.generations] == [id(g) for g in expected], "another method's answer"


def test_no_two_prompts_share_noise(folder):
    """Asked twice, a question is answered anew when sampling; each time all methods agree."""
    twice = [QUESTIONS[1], QUESTIONS[1]]
    measurement, config = measure(folder, twice, temperatures=[0, 1], max_new_tokens=24)
    assert all(row["lossless"] for row in report_of(measurement, config)["rows"])
    greedy, sampled = (measurement.at(value).methods[2].generations for value in (0.0, 1.0))
    assert greedy[0].tokens == greedy[1].tokens
    assert sampled[0].tokens != sampled[1].tokens


def test_medians_quartiles_and_intervals_are_over_prompts(folder):
    measurement, config = measure(folder)
    plain, _, drafted = measurement.methods
    for index, (slow, fast) in enumerate(((8.0, 2.0), (6.0, 2.0), (2.0, 2.0))):
        for generation, seconds in ((plain.generations[index], slow), (drafted.generations[index], fast)):
            generation.seconds, generation.prefill_seconds = seconds - 0.5, 0.5
    (row,) = report_of(measurement, config)["rows"]
    assert row["speedup_median"] == pytest.approx(3.0)
    assert row["speedup_quartiles"] == pytest.approx((2.0, 3.5))
    low, high = row["speedup_spread"]
    assert 1.0 <= low <= row["speedup_vs_plain"] <= high <= 4.0
    low, high = row["tau_spread"]
    assert low <= row["tau"] <= high


def test_temperatures_are_named_once_and_in_one_place():
    from moray.errors import ConfigError

    values = {"target": {"model": "m"}, "drafters": ["d"], "trees": [{"type": "chain", "depth": 3}]}
    values |= {"questions": "q", "output": "o"}
    config = validate(EvaluateConfig, values | {"sampling": {"temperature": 0.5, "top_k": 3}})
    assert [(params.temperature, params.top_k) for params in config.samplings] == [(0.5, 3)]
    config = validate(EvaluateConfig, values | {"sampling": {"top_k": 3}, "temperatures": [0, 1]})
    assert [(params.temperature, params.top_k) for params in config.samplings] == [(0.0, 3), (1.0, 3)]
    for wrong, message in (
        ({"temperatures": [1, 1.0]}, "name each of them once"),
        ({"temperatures": [-1]}, "temperatures"),
        (
            {"temperatures": [0, 1], "sampling": {"temperature": 0.5}},
            r"sampling.temperature is 0.5 but .* \[0.0, 1.0\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(EvaluateConfig, values | wrong)


def test_an_evaluation_without_a_prompt_says_so(folder, tmp_path, monkeypatch):
    from rich.console import Console

    from moray.bench import evaluation
    from moray.errors import DataError

    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "long", "turns": ["' + "x" * 600 + '"]}\n')
    (tmp_path / "drafter.json").touch()
    (tmp_path / "drafter.safetensors").touch()
    monkeypatch.setattr(evaluation, "load_drafters", lambda _, target, __: {"rehearsed": Rehearsed(target)})
    values = {
        "target": {"model": str(folder)},
        "drafters": [str(tmp_path)],
        "questions": str(questions),
        "trees": [{"type": "chain", "depth": 3}],
        "output": str(tmp_path / "report"),
    }
    threads = torch.get_num_threads()
    with pytest.raises(DataError, match=r"no prompt of questions .* fits into the context of 512 tokens"):
        evaluation.evaluate(validate(EvaluateConfig, values), Console(quiet=True))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("command", ["evaluate", "decode"])
def test_a_text_that_differs_is_an_error_once_the_report_is_written(folder, tmp_path, monkeypatch, command, capsys):
    from moray.bench import evaluation
    from pipelines import benchmark, evaluate
    from pipelines.benchmarks import decode as decode_benchmark

    def accept_everything(tree, logits, sampler, root_position):
        if tree.max_depth == 0:  # plain decoding
            return accept(tree, logits, sampler, root_position)
        return Accepted([1, 2, 3], tree.tokens[1:4].tolist(), int(logits[3].argmax()))

    monkeypatch.setattr(engine_module, "accept_rows", row_by_row(accept_everything))
    for module in (evaluation, decode_benchmark):
        monkeypatch.setattr(module, "load_drafters", lambda _, target, __: {"rehearsed": Rehearsed(target, 0.5)})
    (tmp_path / "drafter.json").touch()
    (tmp_path / "drafter.safetensors").touch()
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "c", "turns": ["one two"]}\n')
    values = {
        "target": {"model": str(folder), "device": "cpu"},
        "drafters": [str(tmp_path)],
        "questions": str(questions),
        "trees": [{"type": "chain", "depth": 3}],
        "max_new_tokens": 12,
    }
    threads, report = torch.get_num_threads(), tmp_path / "report" / "report.json"
    config = (
        validate(EvaluateConfig, values | {"output": str(report.parent)})
        if command == "evaluate"
        else validate(DecodeBenchmarkConfig, values | {"report": str(report)})
    )
    message = "differs from plain decoding, which is a defect of Moray: rehearsed with chain-3 at temperature 0"
    with pytest.raises(LosslessError, match=message) as caught:
        (evaluate if command == "evaluate" else benchmark).main(config)
    torch.set_num_threads(threads)
    assert caught.value.exit_code == 1
    assert report.is_file()
    assert "NO" in capsys.readouterr().out
    check_lossless([("bf16, rejection and typical", None), ("equal", True)])
