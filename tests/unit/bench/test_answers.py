"""Going on after a kill: no answer is lost, asked twice or mixed with another evaluation's."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from rehearsed import Rehearsed
from rich.console import Console
from tiny_targets import save_chat_target

from moray.bench import answers, evaluation
from moray.bench.answers import ANSWERS_FILE, open_answers
from moray.bench.configs import EvaluateConfig
from moray.bench.reports.report import write_report
from moray.bench.runner import Runner
from moray.bench.specbench import Question
from moray.config import validate
from moray.errors import DataError, MismatchError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

LONG = Question("9", "long", ("x" * 600, "and again", "and again"))
QUESTIONS = [Question("1", "sums", ("one two", "three?")), LONG, Question("1", "names", ("four five six",))]
NUM_TURNS = 2 * 6
FINGERPRINTS = {"target": "abc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target.load(TargetConfig(model=str(folder), device="cpu"))


def config_of(folder: Path, output: Path, **settings) -> EvaluateConfig:
    values = {
        "target": {"model": str(folder)},
        "drafters": ["unused"],
        "questions": "unused",
        "max_new_tokens": 8,
        "trees": [{"type": "chain", "depth": 3}],
        "temperatures": [0, 1],
        "threads": None,
        "output": str(output),
    }
    return validate(EvaluateConfig, values | settings)


def runner_of(target: Target, config: EvaluateConfig) -> Runner:
    tokenizer = ChatTokenizer.load(config.target.model)
    return Runner(target, {"rehearsed": Rehearsed(target, 0.5)}, tokenizer, config)


def count_runs(runner: Runner) -> list[int]:
    """The lengths that methods are asked for from here on."""
    asked: list[int] = []
    for method in runner.measurement.methods:

        def run(prompt, params, most, sequence, inner=method.run):
            asked.append(most)
            return inner(prompt, params, most, sequence)

        method.run = run
    return asked


def request_drafts(target: Target, config: EvaluateConfig) -> tuple[Runner, int, list[int]]:
    """Ask what is not answered yet: the runner, the turns that count as done, and the calls of methods."""
    runner = runner_of(target, config)
    calls = count_runs(runner)
    with open_answers(config, FINGERPRINTS) as log:
        return runner, log.num_recorded + sum(runner.ask(QUESTIONS, log)), calls


def texts(runner: Runner) -> list[list[list[int]]]:
    return [[generation.tokens for generation in method.generations] for method in runner.measurement.methods]


def test_a_run_that_was_cut_anywhere_goes_on_where_it_was(folder, target, tmp_path):
    config = config_of(folder, tmp_path)
    whole, num_done, calls = request_drafts(target, config)
    assert num_done == NUM_TURNS
    assert len(whole.measurement.asked) == 6
    assert whole.measurement.num_skipped == 6
    content = (tmp_path / ANSWERS_FILE).read_bytes()
    assert content.count(b"\n") == 6
    first, second = (content.index(b"\n", start) + 1 for start in (0, content.index(b"\n") + 1))
    for length in (0, 10, first - 1, first, first + 1, second + 700, len(content) - 1, len(content)):
        (tmp_path / ANSWERS_FILE).write_bytes(content[:length])
        num_known = content[:length].count(b"\n")
        runner, num_done, calls = request_drafts(target, config)
        assert num_done == NUM_TURNS, "the bar ends at 100 %"
        assert texts(runner) == texts(whole)
        assert all(all(method.lossless) for method in runner.measurement.methods if method.name != "generate")
        assert calls.count(8) == (6 - num_known) * 3
        assert calls.count(16) == (6 if num_known < 6 else 0), "3 methods warm up at 2 temperatures, in every process"
        lines = [json.loads(line) for line in (tmp_path / ANSWERS_FILE).read_bytes().splitlines()]
        assert [(line["question_id"], line["turn"], line["temperature"]) for line in lines] == [
            ("1", 0, 0.0), ("1", 0, 1.0), ("1", 1, 0.0), ("1", 1, 1.0), ("1", 0, 0.0), ("1", 0, 1.0)
        ]  # fmt: skip
        kept = content[: content.rfind(b"\n", 0, length) + 1]
        assert (tmp_path / ANSWERS_FILE).read_bytes().startswith(kept), "what was answered is not asked again"


def test_answers_of_several_versions_are_noted(folder, target, tmp_path, monkeypatch):
    """Also when everything has been answered, and when a version from the middle is used again."""
    config = config_of(folder, tmp_path)
    path = tmp_path / ANSWERS_FILE
    for sha, num_kept in (("a" * 40, 0), ("b" * 40, 2), ("a" * 40, 4)):
        monkeypatch.setattr(answers, "git_state", lambda _, sha=sha: {"sha": sha, "dirty": sha.startswith("b")})
        if path.exists():
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:num_kept]))
        request_drafts(target, config)
    with open_answers(config, FINGERPRINTS) as log:
        (note,) = log.mixed_programs()
    assert note == "speeds mix versions: commit aaaaaaa (4 turns), commit bbbbbbb with changes (2 turns)"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with open_answers(config, FINGERPRINTS) as log:
        assert log.mixed_programs() == []
    monkeypatch.setattr(answers, "git_state", lambda _: None)  # installed from a package
    request_drafts(target, config)
    assert f"version {metadata.version('moray-platform')}" in path.read_text()


def test_a_line_holds_all_that_figures_are_made_of(folder, target, tmp_path):
    runner, _, _ = request_drafts(target, config_of(folder, tmp_path))
    line = json.loads((tmp_path / ANSWERS_FILE).read_text().splitlines()[0])
    assert [(answer["method"], answer["tree"]) for answer in line["answers"]] == [
        ("plain", ""), ("generate", ""), ("rehearsed", "chain-3")
    ]  # fmt: skip
    assert set(line["answers"][2]["generation"]) >= {
        "tokens", "finish_reason", "accepted", "emitted", "drafted", "layer_counts", "seconds",
        "prefill_seconds", "phases",
    }  # fmt: skip
    again, _, _ = request_drafts(target, config_of(folder, tmp_path))
    for method, known in zip(runner.measurement.methods, again.measurement.methods, strict=True):
        assert method.generations == known.generations


@pytest.mark.parametrize(
    ("change", "fingerprints", "message"),
    [
        ({"max_new_tokens": 9}, FINGERPRINTS, "max_new_tokens = 8, now it is 9; .* remove '.*answers.jsonl'"),
        ({"temperatures": [0]}, FINGERPRINTS, r"temperatures = \[0.0, 1.0\], now it is \[0.0\]"),
        ({}, {"target": "abd"}, "fingerprint.target = abc, now it is abd; give another output or remove"),
        ({}, FINGERPRINTS | {"drafter.moa": "1"}, "fingerprint.drafter.moa = None, now it is 1"),
    ],
)
def test_answers_of_another_evaluation_are_refused(folder, target, tmp_path, change, fingerprints, message):
    request_drafts(target, config_of(folder, tmp_path))
    before = (tmp_path / ANSWERS_FILE).read_bytes()
    with pytest.raises(MismatchError, match=message), open_answers(config_of(folder, tmp_path, **change), fingerprints):
        pass
    assert (tmp_path / ANSWERS_FILE).read_bytes() == before


def test_a_folder_with_a_report_but_no_answers_may_be_used(folder, target, tmp_path):
    with open_answers(config_of(folder, tmp_path, max_new_tokens=9), {"target": "other"}):
        pass
    assert request_drafts(target, config_of(folder, tmp_path))[1] == NUM_TURNS
    assert request_drafts(target, config_of(folder, tmp_path))[2] == []


def test_damage_is_named_and_never_repaired_silently(folder, target, tmp_path):
    config = config_of(folder, tmp_path)
    request_drafts(target, config)
    path = tmp_path / ANSWERS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong, message in (
        ([lines[0], lines[1][:50] + b"\n", *lines[2:]], r"answers.jsonl:2: the line is damaged"),
        ([lines[0].replace(b'"turn":0', b'"turn":"0"'), *lines[1:]], r"answers.jsonl:1: turn is damaged"),
        ([*lines[1:]], r"temperature = 1.0, but 0.0 is next; remove the file"),
        ([lines[0].replace(b"chain-3", b"chain-4"), *lines[1:]], r"methods = .*chain-4.*, but .*chain-3.* is next"),
    ):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(DataError, match=message):
            request_drafts(target, config)
        assert path.read_bytes() == b"".join(wrong)
    path.write_bytes(b"".join(lines))
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(DataError, match=r"has no run.yaml beside it"):
        request_drafts(target, config)


def test_two_processes_do_not_write_the_same_answers(folder, tmp_path):
    config = config_of(folder, tmp_path)
    with (
        open_answers(config, FINGERPRINTS),
        pytest.raises(DataError, match="another evaluation is writing"),
        open_answers(config, FINGERPRINTS),
    ):
        pass
    with open_answers(config, FINGERPRINTS):
        pass


def test_an_output_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"output '.*file/out' cannot be written"),
        open_answers(config_of(folder, tmp_path / "file" / "out"), FINGERPRINTS),
    ):
        pass


def test_a_finished_evaluation_writes_its_report_again(folder, tmp_path, monkeypatch):
    """From its answers alone; a drafter or questions that changed since are refused."""
    drafter = tmp_path / "rehearsed"
    drafter.mkdir()
    for name in ("drafter.json", "drafter.safetensors"):
        (drafter / name).write_text("1")
    (drafter / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "tokens": 512.0, "seconds": 3.5}\n')
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "one two"}\n')
    config = config_of(folder, tmp_path / "out", drafters=[str(drafter)], questions=str(questions))
    monkeypatch.setattr(evaluation, "load_drafters", lambda _, target, __: {"rehearsed": Rehearsed(target, 0.5)})
    first = evaluation.evaluate(config, Console(quiet=True))
    write_report(first, tmp_path / "out")
    cold, warm = first["rows"]
    assert (cold["temperature"], warm["temperature"]) == (0.0, 1.0)
    for row in first["rows"]:
        assert (row["trainable_parameters"], row["training_tokens"], row["training_seconds"]) == (0, 512, 3.5)
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "_answer", lambda *_: pytest.fail("asked again"))
        assert evaluation.evaluate(config, Console(quiet=True)) == first
    for path, key in ((drafter / "drafter.safetensors", "fingerprint.drafter.rehearsed"), (questions, "questions")):
        text = path.read_text()
        path.write_text(text.replace("1", "2").replace("two", "three"))
        with pytest.raises(MismatchError, match=f"{key} = .*; give another output or remove '.*answers.jsonl'"):
            evaluation.evaluate(config, Console(quiet=True))
        path.write_text(text)
