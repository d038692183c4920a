"""From a log to a plan that is checked: replay, costs, plan, and the same rows measured, on a tiny target."""

import json

import pytest
import yaml
from rich.console import Console
from tiny_drafters import VARIANTS, build, overfit
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.plan.check import check
from moray.bench.plan.configs import CostsConfig, PlanCheckConfig, PlanConfig
from moray.bench.plan.measure import measure
from moray.bench.plan.page import print_check, print_plan, write_plan_page
from moray.bench.plan.planner import plan
from moray.bench.replay.configs import RecordConfig, ReplayConfig
from moray.bench.replay.evaluation import replay
from moray.bench.replay.record import record
from moray.config import validate
from moray.drafters.checkpoint import save_drafter
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

PROMPTS = ("one two three", "why?", "who", "a b")


def test_what_is_planned_from_a_log_is_measured_with_its_target(tmp_path):
    folder = str(save_chat_target(tmp_path / "target"))
    tokenizer = ChatTokenizer.load(folder)
    tiny = TinyTarget("chat", tmp_path / "target", Target.load(TargetConfig(model=folder, device="cpu")))
    prompt = tokenizer.encode_prompt([{"role": "user", "content": PROMPTS[0]}])
    drafter = overfit(tiny, build(tiny, VARIANTS["eagle-0"]), [*prompt, *tiny.hugging_face(prompt, 24)], len(prompt))
    save_drafter(tmp_path / "eagle", drafter, tokenizer.fingerprint)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    target = {"model": folder, "device": "cpu"}
    log, file = str(tmp_path / "log"), str(tmp_path / "replay.json")
    questions = {"questions": str(tmp_path / "questions.jsonl"), "max_new_tokens": 24}
    record(validate(RecordConfig, {"target": target, "output": log, **questions}))
    drafters = [str(tmp_path / "eagle"), {"type": "ngram"}]
    tree = {"type": "dynamic", "depth": 2, "breadth": 2, "nodes": 4}
    settings = {"log": log, "drafters": drafters, "trees": [tree], "max_depth": 3}
    replayed = replay(validate(ReplayConfig, settings), Console())
    (tmp_path / "replay.json").write_text(json.dumps(replayed))

    costs = str(tmp_path / "costs.yaml")
    sizes = {"batches": [1, 3], "depths": [1, 3]}
    measured = measure(
        validate(CostsConfig, {"target": target, "replay": file, "output": costs, "num_cycles": 6, **sizes})
    )
    assert yaml.safe_load((tmp_path / "costs.yaml").read_text()) == measured["costs"]
    assert set(measured["costs"]["drafts"]) == {"eagle", "ngram"}
    assert {1, 2, 4, 5} <= set(measured["costs"]["passes"][3])
    assert set(measured["costs"]["trees"]["eagle"]["dynamic-2x2-4"]) == {1, 3}

    settings = {"costs": costs, "replay": file, "output": str(tmp_path / "plan"), "batches": [1, 3], "max_depth": 3}
    planned = plan(validate(PlanConfig, settings))
    assert len(planned["rows"]) == 2 * (1 + 2 * (3 + 1))
    write_plan_page(tmp_path / "plan" / "report.html", planned)
    print_plan(planned, Console())
    assert (tmp_path / "plan" / "report.html").read_text().count("<svg") == 2

    result = check(validate(PlanCheckConfig, settings | {"target": target, "depths": [1, 3], "rounds": 1}))
    print_check(result, Console())
    drifted = Console(record=True, width=300)
    assert result["has_drifted"] == (abs(result["median_slowdown"] - 1) > 0.1)
    print_check(result | {"has_drifted": True, "median_slowdown": 1.3}, drifted)
    assert "changed its speed since the costs were measured (1.30 times as long in the median)" in drifted.export_text()
    assert (tmp_path / "plan" / "check.html").read_text().count("<svg") == 1
    measured_rows = {(row["drafter"], row["tree"], row["batch"]) for row in result["rows"]}
    chosen = {(each["drafter"], each["tree"], each["batch"]) for each in planned["best"]}
    assert len(result["rows"]) == len(measured_rows)
    assert chosen <= measured_rows
    assert len(measured_rows - chosen) <= 2 * (1 + 2 * 3) <= len(measured_rows), "depths 1 and 3 and a tree of both"
    assert result["costs_threads"] == result["threads"]
    taus = {(row["drafter"], row["tree"]): row["measured_tau"] for row in result["rows"] if row["batch"] == 1}
    for row in result["rows"]:
        assert row["lossless"]
        assert row["measured_tau"] == pytest.approx(row["tau"]) == pytest.approx(taus[row["drafter"], row["tree"]])
        assert row["error"] == pytest.approx(row["tokens_per_second"] / row["measured_tokens_per_second"] - 1)
    assert taus["eagle", "chain-3"] > 1.05
    assert taus["eagle", "dynamic-2x2-4"] > 1.05
    assert [each["batch"] for each in result["choices"]] == [1, 3]
    assert all(each["regret"] >= 0 for each in result["choices"])
