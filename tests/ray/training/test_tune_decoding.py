"""Sweeps over decoding choices on a tiny target: they find a winner per drafter, go on, and refuse what cannot work."""

import itertools
import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from moray.config import load_config, validate
from moray.errors import ConfigError, DataError
from moray.provenance import read_json
from sweeps.decoding.configs import TuneDecodingConfig

BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}
MOA = {"type": "moa", "layer_self_attention": BLOCK, "self_attention": BLOCK, "cross_attention": BLOCK}
PROMPTS = ("one two three", "four five", "six", "seven eight nine ten")
CHAIN, TREE = {"type": "chain", "depth": 3}, {"type": "dynamic", "depth": 2, "breadth": 2, "nodes": 4}

MakeSweep = Callable[..., TuneDecodingConfig]


@pytest.fixture(scope="module")
def values(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all sweeps here have in common: two untrained drafters, one of them of two levels, and four questions."""
    import torch

    from moray.drafters.checkpoint import save_drafter
    from moray.drafters.configs import DRAFTER_CONFIG
    from moray.targets.head import TargetHead
    from moray.targets.spec import TargetConfig
    from moray.text import ChatTokenizer

    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    head, text = TargetHead.load(TargetConfig(model=str(tiny_target))), ChatTokenizer.load(str(tiny_target)).fingerprint
    for config in (MOA, {"type": "medusa", "num_heads": 2}):
        drafter = DRAFTER_CONFIG.validate_json(json.dumps(config)).build(head)
        save_drafter(folder / str(config["type"]), drafter, text)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return {
        "target": {"model": str(tiny_target)},
        "drafters": [str(folder / "moa"), str(folder / "medusa")],
        "space": {"tree": [CHAIN, TREE]},
        "ladder": {"rungs": 2, "reduction": 2, "stop": False},
        "questions": str(folder / "questions.jsonl"),
        "max_new_tokens": 8,
    }


def run(sweep: TuneDecodingConfig) -> tuple[dict[str, Any], str]:
    from rich.console import Console

    from sweeps.decoding.console import print_decoding
    from sweeps.decoding.run import run_decoding

    console = Console(file=StringIO(), width=200)
    summary = run_decoding(sweep, console)
    print_decoding(summary, console)
    return summary, console.file.getvalue()


@pytest.fixture(scope="module")
def tuned(
    ray_session: None, values: dict[str, Any], tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TuneDecodingConfig, dict[str, Any], str]:
    """All combinations to the end; one is too deep for Medusa."""
    space = values["space"] | {"draft_vocab_size": [None, 40]}
    folder = tmp_path_factory.mktemp("tuned")
    own = {"space": space, "activations": str(tiny_cache), "confirm": {"finalists": 9}, "output": str(folder / "two")}
    sweep = validate(TuneDecodingConfig, values | own)
    return sweep, *run(sweep)


def test_every_drafter_gets_a_winner_measured_beside_the_others(
    tuned: tuple[TuneDecodingConfig, dict[str, Any], str],
) -> None:
    sweep, summary, text = tuned
    assert read_json(Path(sweep.output) / "summary.json") == json.loads(json.dumps(summary))
    assert {name: len(answer["finalists"]) for name, answer in summary["drafters"].items()} == {"moa": 4, "medusa": 2}
    for answer in summary["drafters"].values():
        best = max(answer["finalists"], key=lambda row: row["objective"])
        assert (answer["winner"], answer["objective"]) == (best["choices"], best["objective"])
        assert answer["objective"] == pytest.approx(answer["figures"]["speedup"])
        assert answer["spread"][0] <= answer["objective"] <= answer["spread"][1]
        assert 0 <= answer["stays_ahead"] <= 1
    assert {summary["between"]["best"], summary["between"]["second"]} == {"moa", "medusa"}
    assert summary["left_out"]["medusa"] == {"depth 3: this drafter drafts at most 2 levels": 2}
    assert "medusa: left out 2 combinations: 2 x depth 3: this drafter drafts at most 2 levels" in text
    assert {trial["state"] for trial in summary["trials"]} == {"finished"}
    assert read_json(Path(sweep.output) / "plan.json") == {"trials": {"moa": 4, "medusa": 2}, "questions": [2, 4]}
    page = (Path(sweep.output) / "report.html").read_text()
    assert all(f"Winner: {answer['name']}" in page for answer in summary["drafters"].values())
    rows = pd.read_parquet(Path(sweep.output) / "sweep.parquet")
    assert sorted(rows["rung_questions"]) == [2] * 6 + [4] * 6
    assert rows["lossless"].all()
    assert (rows["num_prompts"] == rows["rung_questions"]).all()
    assert (rows["tau"] >= 1).all()


def test_one_measurement_runs_at_a_time_without_gpus(tuned: tuple[TuneDecodingConfig, dict[str, Any], str]) -> None:
    _, summary, _ = tuned
    files = [Path(trial["folder"]) / "trial.json" for trial in summary["trials"]]
    for before, after in itertools.pairwise(sorted(files, key=lambda path: read_json(path)["begun"])):
        assert before.stat().st_mtime <= read_json(after)["begun"]


def test_a_winner_s_file_is_for_the_evaluate_command(tuned: tuple[TuneDecodingConfig, dict[str, Any], str]) -> None:
    from rich.console import Console

    from moray.bench.configs import EvaluateConfig
    from moray.bench.evaluation import evaluate
    from moray.drafters.checkpoint import read_contract
    from sweeps.decoding.combinations import Combination
    from sweeps.decoding.results import write_best

    sweep, summary, _ = tuned
    for name, answer in summary["drafters"].items():
        path = Path(sweep.output) / f"best-{name}.yaml"
        assert answer["evaluate"] == str(path)
        assert [shape["type"] for shape in yaml.safe_load(path.read_text())["trees"]] == [
            answer["winner"]["tree"]["type"]
        ]
    path = write_best(sweep, "medusa", Combination.of({"drafter": "medusa", "tree": TREE, "draft_vocab_size": 40}))
    words = [str(path), f"target.model={sweep.target.model}", f"questions={sweep.questions}", "max_new_tokens=6"]
    config = load_config(EvaluateConfig, [*words, "compare_generate=false"])
    (folder,) = config.drafters
    assert read_contract(Path(str(folder))).drafter.num_draft_tokens == 40
    (row,) = evaluate(config, Console(file=StringIO()))["rows"]
    assert (row["drafter"], row["tree"], row["lossless"]) == ("medusa", "dynamic-2x2-4", True)


@pytest.mark.slow
def test_resumption_asks_nothing_again(tuned: tuple[TuneDecodingConfig, dict[str, Any], str], tmp_path: Path) -> None:
    from sweeps.decoding.run import is_complete

    sweep, before, _ = tuned
    assert is_complete(sweep)
    again = sweep.model_copy(update={"output": str(tmp_path / "two")})
    shutil.copytree(sweep.output, again.output)
    (Path(again.output) / "summary.json").unlink()  # as a kill leaves it that met a trial at its third question
    lost = Path(again.output) / "trials" / Path(before["trials"][0]["folder"]).name
    rows, answers = read_json(lost / "rungs.json"), (lost / "answers.jsonl").read_text().splitlines(keepends=True)
    (lost / "rungs.json").write_text(json.dumps(rows[:1]))
    (lost / "trial.json").write_text(json.dumps(read_json(lost / "trial.json") | {"state": "running"}))
    (lost / "answers.jsonl").write_text("".join(answers[:3]) + answers[3][:50])
    with pytest.raises(ConfigError, match="--resume"):
        is_complete(again)
    resumed = again.model_copy(update={"resume": True})
    assert not is_complete(resumed)
    kept = [path for path in Path(again.output).glob("[tc]*/*/*.jsonl") if path.parent != lost]
    untouched = {path: path.read_bytes() for path in kept}
    assert len(untouched) == 6, "five trials and the confirmation"
    after, _ = run(resumed)
    assert {path: path.read_bytes() for path in kept} == untouched
    assert read_json(lost / "rungs.json")[0] == rows[0]
    assert (lost / "answers.jsonl").read_text().splitlines(keepends=True)[:3] == answers[:3]
    assert read_json(lost / "rungs.json")[1]["num_prompts"] == 4
    assert after["drafters"] == {
        name: answer | {"evaluate": str(Path(again.output) / f"best-{name}.yaml")}
        for name, answer in before["drafters"].items()
    }
    assert [trial["figures"]["tau"] for trial in after["trials"]] == [one["figures"]["tau"] for one in before["trials"]]


@pytest.mark.usefixtures("ray_session")
@pytest.mark.slow
def test_optuna_proposes_each_shape_once_until_there_are_no_more(values: dict[str, Any], tmp_path: Path) -> None:
    own = {"space": {"tree.type": ["chain"], "tree.depth": [1, 2, 9], "tree.breadth": [1, 2]}, "objective": "tau"}
    search = {"type": "optuna", "num_trials": 9, "num_random": 2}
    drafters = values["drafters"][1:]
    sweep = validate(
        TuneDecodingConfig, values | own | {"search": search, "drafters": drafters, "output": str(tmp_path / "optuna")}
    )
    summary, _ = run(sweep)
    assert sorted(trial["choices"]["tree"]["depth"] for trial in summary["trials"]) == [1, 2]
    assert summary["left_out"]["medusa"]["depth 9: this drafter drafts at most 2 levels"] >= 1
    assert summary["drafters"]["medusa"]["winner"]["tree"]["depth"] in (1, 2)


@pytest.mark.usefixtures("ray_session")
def test_what_cannot_work_is_refused_before_anything_starts(values: dict[str, Any], tmp_path: Path) -> None:
    def refused(**changes: Any) -> TuneDecodingConfig:
        return validate(TuneDecodingConfig, values | {"output": str(tmp_path / "sweep")} | changes)

    with pytest.raises(DataError, match=r"drafters names '.*/moo', which is no folder"):
        run(refused(drafters=[str(tmp_path / "moo")]))
    with pytest.raises(DataError, match=r"holds no drafter"):
        run(refused(drafters=[str(tmp_path)]))
    with pytest.raises(ConfigError, match=r"nothing is left of the space: medusa: 1 x depth 3: this drafter"):
        run(refused(drafters=values["drafters"][1:], space={"tree": [CHAIN]}))
    with pytest.raises(ConfigError, match=r"needs cpus=99"):
        run(refused(cpus=99))
    assert not (tmp_path / "sweep").exists()
