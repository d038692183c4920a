"""Logs that another program has written: printed tensors of token ids."""

import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.replay.configs import ImportConfig, RecordConfig, ReplayConfig
from moray.bench.replay.evaluation import replay
from moray.bench.replay.imported import import_log, read_tensors
from moray.bench.replay.log import read_log
from moray.bench.replay.record import record
from moray.config import validate
from moray.drafters.checkpoint import save_drafter
from moray.errors import ConfigError, DataError, MismatchError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

PROMPTS = ("one two three", "why?", "[header] how to")
CHAIN = [{"type": "chain", "depth": 3}]


def parsed(tmp_path: Path, text: str) -> list[list[int]]:
    path = tmp_path / "outputs.txt"
    path.write_text(text)
    return [tokens for _, tokens in read_tensors(path)]


def test_tensors_are_read_as_torch_prints_them(tmp_path):
    rows = [torch.arange(100, 160)[None], torch.tensor([[7]]), torch.arange(1234).view(2, 617)]
    torch.set_printoptions(threshold=10**9)
    try:
        text = "\n".join(map(str, rows))
    finally:
        torch.set_printoptions(profile="default")
    assert "\n" in text
    assert parsed(tmp_path, text) == [row.tolist() for tensor in rows for row in tensor]
    assert parsed(tmp_path, "tensor([[1, 2]], device='cuda:0')tensor([[3]])") == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds no tensor\(\[\[...\]\]\)"),
        ("tensor([[1, 2]])\ntensor([[3,", r"the tensor in line 2 .* is cut short"),
        ("\ntensor([[1, 2, ..., 3]])", r"the tensor in line 2 .* was abbreviated with '...'"),
        ("tensor([[1]])\ntensor([2, 3])\ntensor([[4]])", r"line 2 .* does not begin with tensor\(\[\["),
        ("tensor([[1]])\ntensor([], size=(1, 0), dtype=torch.int64)", r"line 2 .* does not begin with tensor"),
        ("tensor([[]])", r"the tensor in line 1 .* is empty"),
        ("tensor([[0.5]])", r"the tensor in line 1 .* is not made of token ids"),
    ],
)
def test_what_is_no_tensor_of_ids_is_named_by_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        parsed(tmp_path, text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    folder = save_chat_target(tmp_path_factory.mktemp("imported") / "target")
    return TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


@pytest.fixture(scope="module")
def given(tiny, tmp_path_factory) -> dict[str, str]:
    """Prompts, and what the target writes after them, as the other program keeps them."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = ChatTokenizer.load(str(tiny.folder), "plain")
    answers = [tiny.hugging_face(tokenizer.encode_text(prompt), 30) for prompt in PROMPTS]
    (folder / "prompts.json").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (folder / "outputs.txt").write_text("\n".join(f"{torch.tensor([answer])}" for answer in answers))
    return {"prompts": str(folder / "prompts.json"), "outputs": str(folder / "outputs.txt")}


def test_texts_alone_are_replayed_without_the_target(tiny, given, tmp_path):
    config = {**given, "tokenizer": str(tiny.folder), "output": str(tmp_path / "log")}
    made = import_log(validate(ImportConfig, config))
    assert (made["continuations"], made["agreement"]) == (3, None)
    entries = read_log(config["output"])[1]
    tokenizer = ChatTokenizer.load(str(tiny.folder), "plain")
    assert [list(entry.prompt) for entry in entries] == [tokenizer.encode_text(prompt) for prompt in PROMPTS]
    itself = {"type": "pretrained", "model": str(tiny.folder)}
    result = replay(
        validate(ReplayConfig, {"log": config["output"], "drafters": [itself, {"type": "ngram"}], "trees": CHAIN}),
        Console(),
    )
    accepted = [sum(cycle["accepted"]) for cycle in result["rows"][0]["cycles"]]
    assert accepted == [7 * 3 + 1] * 3, "of 29 tokens after the first: seven cycles of four, and one more"
    assert import_log(validate(ImportConfig, config)) == made
    with pytest.raises(ConfigError, match=r"drafters\[0\] was trained for a target, .* import it with target.model"):
        replay(validate(ReplayConfig, {"log": config["output"], "drafters": ["runs/eagle"]}), Console())


def test_several_are_recorded_at_a_time_as_if_one_by_one(tiny, given, tmp_path):
    questions = tmp_path / "questions.jsonl"
    texts = ["one", "a much longer question than the others", "two", "why?", "x"]
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = {
        "target": {"model": str(tiny.folder), "device": "cpu"},
        "questions": str(questions),
        "max_new_tokens": 12,
        "kv_layers": [],
    }
    logs = []
    for count in (1, 2):
        output = tmp_path / f"log-{count}"
        record(validate(RecordConfig, {**config, "max_num_seqs": count, "output": str(output)}))
        logs.append((output / "log.jsonl").read_bytes())
    assert logs[0] == logs[1]
    cut = (tmp_path / "log-2" / "log.jsonl").read_bytes().splitlines(keepends=True)[:3]
    (tmp_path / "log-2" / "log.jsonl").write_bytes(b"".join(cut))
    record(validate(RecordConfig, {**config, "max_num_seqs": 2, "output": str(tmp_path / "log-2")}))
    assert (tmp_path / "log-2" / "log.jsonl").read_bytes() == logs[0], "it goes on where it was"


def test_with_the_target_comes_all_that_drafters_read(tiny, given, tmp_path):
    target = {"model": str(tiny.folder), "device": "cpu"}
    config = {**given, "target": target, "output": str(tmp_path / "log")}
    made = import_log(validate(ImportConfig, config))
    assert made["agreement"] == 1
    assert {path.name for path in (tmp_path / "log").iterdir()} >= {"taps.parquet", "head.safetensors", "log.jsonl"}
    drafter = build(tiny, VARIANTS["eagle-0"])
    save_drafter(tmp_path / "eagle", drafter, ChatTokenizer.load(str(tiny.folder)).fingerprint)
    trained = {"log": config["output"], "drafters": [str(tmp_path / "eagle")], "trees": CHAIN}
    assert replay(validate(ReplayConfig, trained), Console())["rows"][0]["num_tokens"] == made["tokens"]
    rows = [
        replay(validate(ReplayConfig, {"log": log, "drafters": [{"type": "ngram"}], "trees": CHAIN}), Console())["rows"]
        for log in (config["output"], str(_alone(tiny, given, tmp_path)))
    ]
    assert rows[0][0]["cycles"] == rows[1][0]["cycles"]
    text = Path(given["outputs"]).read_text()
    (tmp_path / "changed.txt").write_text(re.sub(r"\d+", "65", text, count=1))
    with pytest.raises(MismatchError, match="is another log: give another output"):
        import_log(validate(ImportConfig, config | {"outputs": str(tmp_path / "changed.txt")}))
    changed = config | {"outputs": str(tmp_path / "changed.txt"), "output": str(tmp_path / "other")}
    assert import_log(validate(ImportConfig, changed))["agreement"] < 1


def _alone(tiny: TinyTarget, given: dict[str, str], tmp_path: Path) -> Path:
    output = tmp_path / "alone"
    import_log(validate(ImportConfig, {**given, "tokenizer": str(tiny.folder), "output": str(output)}))
    return output


def test_a_continuation_ends_where_the_target_ends_it(tiny, given, tmp_path):
    config = {**given, "outputs": str(tmp_path / "outputs.txt"), "tokenizer": str(tiny.folder)}
    eos = ChatTokenizer.load(str(tiny.folder), "plain").eos_ids[0]
    (tmp_path / "outputs.txt").write_text(f"tensor([[70, 71, {eos}, 0, 0]])")
    import_log(validate(ImportConfig, {**config, "output": str(tmp_path / "log")}))
    (entry,) = read_log(str(tmp_path / "log"))[1]
    assert (entry.tokens, entry.finish_reason) == ((70, 71, eos), "stop")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor([[5]])" * 4, r"has more continuations than .* has prompts \(3\)"),
        ("tensor([[5, 9999]])", r"has token 9999, but the tokenizer or the target has only 262"),
    ],
)
def test_outputs_of_another_target_are_refused(tiny, given, tmp_path, text, message):
    (tmp_path / "outputs.txt").write_text(text)
    config = {**given, "outputs": str(tmp_path / "outputs.txt"), "tokenizer": str(tiny.folder), "output": "x"}
    with pytest.raises(DataError, match=message):
        import_log(validate(ImportConfig, config))


def test_a_log_is_of_a_target_or_of_a_tokenizer():
    for others in ({}, {"tokenizer": "a", "target": {"model": "a"}}):
        with pytest.raises(ConfigError, match="give one of the two"):
            validate(ImportConfig, {"prompts": "p", "outputs": "o", "output": "x", **others})
