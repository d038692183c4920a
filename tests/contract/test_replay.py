"""A replay over a log accepts, cycle by cycle, what live decoding does; the target is gone by then."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from side_by_side import COUPLED, GREEDY
from tiny_drafters import TRAINED, VARIANTS, build, overfit
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.replay.chains import ChainMatches
from moray.bench.replay.configs import RecordConfig, ReplayConfig
from moray.bench.replay.evaluation import replay, within_text
from moray.bench.replay.log import read_log
from moray.bench.replay.record import record
from moray.config import validate
from moray.decoding.generate import SpeculativeDecoder
from moray.drafters.checkpoint import save_drafter
from moray.drafters.configs import NgramConfig, PretrainedConfig
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError, DataError, MismatchError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, SparseShape

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

TREES = (
    ChainShape(type="chain", depth=3),
    DynamicShape(type="dynamic", depth=3, breadth=2, nodes=6),
    FixedShape(type="fixed", branching=(3, 1, 2)),
    SparseShape(type="sparse", paths=((0,), (1,), (0, 0), (1, 2), (0, 0, 1))),
)
PROMPTS = ("one two three", "why?")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[str]]:
    """A target's folder, and those of drafters that have learnt an answer of it by heart."""
    parent = tmp_path_factory.mktemp("trained")
    folder = save_chat_target(parent / "target")
    tokenizer = ChatTokenizer.load(str(folder))
    tiny = TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))
    prompt = tokenizer.encode_prompt([{"role": "user", "content": PROMPTS[0]}])
    for variant in TRAINED:
        drafter = build(tiny, VARIANTS[variant])
        overfit(tiny, drafter, [*prompt, *tiny.hugging_face(prompt, 24)], len(prompt), steps=20)
        save_drafter(parent / variant, drafter, tokenizer.fingerprint)
    return folder, [str(parent / variant) for variant in TRAINED]


@pytest.mark.parametrize(
    ("params", "trees"),
    [
        pytest.param(GREEDY, TREES, id="greedy"),
        pytest.param(COUPLED, TREES[:2], id="coupled"),
        pytest.param(COUPLED, TREES, id="coupled-all-trees", marks=pytest.mark.soak),
    ],
)
def test_a_replay_is_live_decoding_cycle_by_cycle(trained, tmp_path, params, trees):
    made, names = trained
    folder = shutil.copytree(made, tmp_path / "target")
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    tokenizer = ChatTokenizer.load(str(folder))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    settings = {
        "target": {"model": str(folder), "device": "cpu"},
        "questions": str(tmp_path / "questions.jsonl"),
        "max_new_tokens": 24,
        "sampling": params.model_dump(),
        "head_layers": 2,
        "hidden_depths": [-1, -2, -3],
        "output": str(tmp_path / "log"),
    }
    record(validate(RecordConfig, settings))
    entries = read_log(str(tmp_path / "log"))[1]
    text = (tmp_path / "log" / "log.jsonl").read_bytes()
    (tmp_path / "log" / "log.jsonl").write_bytes(text[:-20])  # a kill cut the last line short
    record(validate(RecordConfig, settings))
    assert (tmp_path / "log" / "log.jsonl").read_bytes() == text
    (tmp_path / "others.jsonl").write_text(json.dumps({"prompt": "another question"}) + "\n")
    with pytest.raises(MismatchError, match="give another output"):
        record(validate(RecordConfig, settings | {"questions": str(tmp_path / "others.jsonl")}))
    live = {}
    usable = [*names, PretrainedConfig(type="pretrained", model=str(made)), NgramConfig(type="ngram")]
    eos_ids = [*target.eos_ids, *tokenizer.eos_ids]
    for name, drafter in load_drafters(tuple(usable), target, tokenizer).items():
        for shape in trees:
            decoder = SpeculativeDecoder(target, drafter, shape)
            answers = [decoder.generate(list(e.prompt), params, 24, eos_ids, sequence=e.sequence) for e in entries]
            live[name, shape.name] = [within_text(answer) for answer in answers]
    shutil.rmtree(folder)
    (tmp_path / "log" / "taps.parquet").rename(tmp_path / "taps.parquet")
    with pytest.raises(ConfigError, match=r"has no taps\.parquet: it is not complete"):
        replay(validate(ReplayConfig, {"log": str(tmp_path / "log"), "drafters": [{"type": "ngram"}]}), Console())
    (tmp_path / "taps.parquet").rename(tmp_path / "log" / "taps.parquet")
    config = {
        "log": str(tmp_path / "log"),
        "drafters": [*names, {"type": "pretrained", "model": str(made)}, {"type": "ngram"}],
        "trees": [t.model_dump() for t in trees],
        "max_depth": 3,
    }
    result = replay(validate(ReplayConfig, config), Console())
    for row in result["rows"]:
        is_walked = row["drafter"] == "ngram" or row["tree"].startswith("dynamic")
        assert row["by"] == ("walk" if is_walked else "ranks"), (row["drafter"], row["tree"])
        assert [cycle["accepted"] for cycle in row["cycles"]] == live[row["drafter"], row["tree"]], (
            row["drafter"],
            row["tree"],
        )
    for row in result["chains"]:
        found = [ChainMatches(**each) for each in row["continuations"]]
        chain = [[accepted for _, accepted, _ in each.cycles(3)] for each in found]
        assert chain == live[row["drafter"], "chain-3"], row["drafter"]
        emitted = [sum(count for *_, count in each.cycles(depth)) for depth in (1, 2, 3) for each in found]
        assert emitted == [len(entry.tokens) - 1 for entry in entries] * 3
    assert len(result["chains"]) == len(config["drafters"])
    assert any(row["tau"] > 1.2 for row in result["rows"])
    check_that_a_damaged_log_is_refused(tmp_path / "log", tokenizer.fingerprint)


def check_that_a_damaged_log_is_refused(log: Path, fingerprint: str) -> None:
    path, config = log / "log.jsonl", validate(ReplayConfig, {"log": str(log), "drafters": [{"type": "ngram"}]})
    text = path.read_text()
    path.write_text(text[:-20])
    with pytest.raises(DataError, match=r"line 3 of '.*log\.jsonl' is damaged: it was cut short; record it again"):
        replay(config, Console())
    other = fingerprint[::-1]
    path.write_text(text.replace(fingerprint, other))
    with pytest.raises(MismatchError, match=rf"has the fingerprint {fingerprint}, its log {other}: record it again"):
        replay(config, Console())
