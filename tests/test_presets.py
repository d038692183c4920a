"""The presets fit together: each loads and reads a cache that another fills; evaluations name their outputs."""

import json
import re
from pathlib import Path

import pytest
import torch

from moray.bench.configs import EvaluateConfig
from moray.bench.sparse.configs import PredictorConfig, SparseEvaluationConfig
from moray.cluster.training.configs import DistillConfig, SparsifyConfig
from moray.config import load_config, read_yaml
from moray.data.ultrachat import Chat, ChatsConfig, plan_chunks, read_chunk
from moray.drafters.configs import DRAFTER_CONFIG, TrainedConfig
from moray.drafters.loading import folder_of
from moray.targets.head import TargetHead
from moray.trees.shapes import ChainShape
from pipelines.benchmarks.shaped import random_target
from pipelines.benchmarks.shaped_config import ShapeConfig, ShapedBenchmarkConfig
from pipelines.demo import DemoConfig, load_stage

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DRAFTERS = sorted((CONFIGS / "drafters").glob("*.yaml"))
WIDE = [path for path in DRAFTERS if path.stem.startswith("independent-wide")]
WHERE = {"moa-stories": ["activations=a", "output=runs/stories/moa-stories"]}
"""Settings that presets without a cache of their own need."""


@pytest.mark.parametrize("path", DRAFTERS, ids=lambda path: path.stem)
def test_a_preset_loads_and_writes_a_folder_of_its_own_name(path):
    config = load_config(DistillConfig, [str(path), "target.model=x", *WHERE.get(path.stem, [])])
    assert Path(config.output).name == path.stem.removesuffix("-demo").removesuffix("-smollm2")


@pytest.mark.parametrize("path", sorted((CONFIGS / "parallel").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_way_of_sharing_goes_with_a_preset(path):
    config = load_config(DistillConfig, [str(CONFIGS / "drafters" / "moa.yaml"), str(path), "target.model=x"])
    assert config.parallel.model_dump()["stage"] == int(path.stem.removeprefix("zero-"))


@pytest.mark.parametrize("path", sorted((CONFIGS / "sources").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_source_goes_with_a_preset(path):
    config = load_config(DistillConfig, [str(CONFIGS / "drafters" / "moa-demo.yaml"), str(path), "target.model=x"])
    assert config.source.type == path.stem.split("-")[0]


@pytest.mark.parametrize("path", DRAFTERS, ids=lambda path: path.stem)
def test_a_preset_reads_the_activations_that_its_target_s_preset_writes(path):
    preset = read_yaml(path)
    cache = {"llama-3-8b": "ultrachat", "demo": "demo", "smollm2": "smollm2"}.get(
        Path(preset.get("output", "")).parent.name
    )
    if cache is None:
        assert path.stem in WHERE
        return
    assert preset["activations"] == read_yaml(CONFIGS / "activations" / f"{cache}.yaml")["output"]


PREDICTORS = sorted((CONFIGS / "sparse").glob("predictor-*.yaml"))
SPARSIFIED = sorted(set((CONFIGS / "sparse").glob("*.yaml")) - set(PREDICTORS))


@pytest.mark.parametrize("path", SPARSIFIED, ids=lambda path: path.stem)
def test_a_sparse_preset_loads_and_reads_its_target_s_activations(path):
    config = load_config(SparsifyConfig, [str(path), "target.model=x"])
    assert config.activations == read_yaml(CONFIGS / "activations" / f"{path.stem}.yaml")["output"]
    assert Path(config.output).name == "sparse"


@pytest.mark.parametrize("path", PREDICTORS, ids=lambda path: path.stem)
def test_a_predictor_s_preset_names_the_target_that_a_preset_writes(path):
    config = load_config(PredictorConfig, [str(path)])
    preset = read_yaml(path.with_name(path.name.removeprefix("predictor-")))
    assert config.target.model == preset["output"]
    assert config.drafter == f"{preset['output']}-eagle"
    cached = read_yaml(CONFIGS / "activations" / path.name.removeprefix("predictor-"))["chats"]["path"]
    assert config.chats != cached or config.skip_chats, "the target was trained on those"


SPARSE_GUIDE = CONFIGS.parent / "docs" / "guide" / "sparse.md"
OVERRIDDEN = set(re.findall(r"(?:output=|cp -r \S+ )(\S+)", SPARSE_GUIDE.read_text(encoding="utf-8")))
"""Outputs of the guide's commands."""
EVALUATIONS = sorted((CONFIGS / "evaluations").glob("*.yaml"))
SPARSE = [path for path in EVALUATIONS if path.stem.startswith(("sparse-", "spadec-"))]


@pytest.mark.parametrize("path", SPARSE, ids=lambda path: path.stem)
def test_a_sparse_evaluation_names_folders_that_presets_write(path):
    config = load_config(SparseEvaluationConfig, [str(path)])
    written = {read_yaml(preset)["output"] for preset in SPARSIFIED} | OVERRIDDEN
    assert {one.model for name, one in config.targets.items() if name != "dense"} <= written


@pytest.mark.parametrize("path", [path for path in EVALUATIONS if path not in SPARSE], ids=lambda path: path.stem)
def test_an_evaluation_names_folders_that_presets_write(path):
    config = load_config(EvaluateConfig, [str(path), "target.model=x"])
    written = {read_yaml(preset).get("output") for preset in DRAFTERS}
    assert {str(folder_of(entry)) for entry in config.drafters if isinstance(entry, str | TrainedConfig)} <= written


@pytest.mark.parametrize("path", WIDE, ids=lambda path: path.stem)
@pytest.mark.parametrize(("vocab_size", "written"), [(32_000, 0), (128_256, 1)])
def test_a_wide_preset_has_the_parameters_that_it_says(path, vocab_size, written):
    drafter = DRAFTER_CONFIG.validate_python(read_yaml(path)["drafter"])
    sizes = {"num_layers": 1, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    shape = ShapeConfig(**sizes, intermediate_size=8, vocab_size=vocab_size)
    chain = ChainShape(type="chain", depth=1)
    config = ShapedBenchmarkConfig(shape=shape, device="cpu", drafter=drafter, trees=(chain,), tau=1.5)
    with torch.device("meta"):
        target = random_target(config, torch.device("meta"))
        count = drafter.build(TargetHead.of(target)).num_parameters
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    said = re.findall(r"([\d.]+) ([MB])\b", comment)[-2:][written]
    unit = {"M": 1e6, "B": 1e9}[said[1]]
    digits = len(said[0].partition(".")[2])
    assert f"{count / unit:.{digits}f}" == said[0]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("demo*.yaml")), ids=lambda path: path.stem)
def test_a_demo_trains_what_it_evaluates_from_files_that_are_here(path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    demo = load_config(DemoConfig, [str(path)])
    stages = [(name, load_stage(name, arguments)[1]) for name, *arguments in demo.stages]
    trained = {str(config.output) for name, config in stages if name == "distill"}
    (evaluated,) = (config for name, config in stages if name == "evaluate")
    folders = {str(folder_of(entry)) for entry in evaluated.drafters if isinstance(entry, str | TrainedConfig)}
    assert folders == trained
    (cached,) = (config for name, config in stages if name == "cache_activations")
    assert {config.activations for name, config in stages if name == "distill"} == {cached.output}
    if not cached.chats.path.startswith("runs/"):
        rows = [row for chunk in plan_chunks(cached.chats) for row in read_chunk(chunk)]
        assert len(rows) == cached.chats.max_chats
        assert all(isinstance(row, Chat) for row in rows)
    assert demo.live is not None
    assert demo.live.drafter in trained
    assert demo.live.target.model == evaluated.target.model


def test_the_chats_that_are_shipped_are_small_and_say_where_they_are_from():
    folder = CONFIGS / "chats"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    origin = (folder / "README.md").read_text(encoding="utf-8")
    assert "pipelines.regenerate" in origin
    for path in folder.iterdir():
        assert path.name == "README.md" or path.name in origin, f"{path.name} has no provenance"


def shipped_chats(pattern: str) -> list[Chat]:
    """The chats of these files, which are all valid."""
    config = ChatsConfig(path=str(CONFIGS / "chats" / pattern))
    rows = [row for chunk in plan_chunks(config) for row in read_chunk(chunk)]
    chats = [row for row in rows if isinstance(row, Chat)]
    assert len(chats) == len(rows)
    return chats


def test_more_chats_leave_those_that_results_hold_out_last():
    both, first = shipped_chats("smollm2*.parquet"), shipped_chats("smollm2.parquet")
    assert [chat.messages for chat in both[-64:]] == [chat.messages for chat in first[-64:]]


def test_shipped_chats_ask_no_question_twice_and_none_of_the_evaluation():
    asked = [chat.messages[0]["content"] for chat in shipped_chats("smollm2*.parquet")]
    assert len(set(asked)) == len(asked)
    lines = (CONFIGS / "chats" / "smollm2-questions.jsonl").read_text(encoding="utf-8").splitlines()
    of_the_evaluation = {json.loads(line)["turns"][0] for line in lines}
    assert len(of_the_evaluation) == 24
    assert not of_the_evaluation & set(asked)
