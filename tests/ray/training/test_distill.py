"""Distillation on Ray Train with one worker: it learns, writes what it should, and refuses what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.resume import begin_or_resume, is_complete
from moray.config import validate
from moray.distill.tracking.metrics import read_metrics
from moray.drafters.checkpoint import load_drafter, read_contract
from moray.errors import ConfigError, DataError, MismatchError, UnreachableError
from moray.targets.head import TargetHead
from moray.targets.spec import read_spec
from moray.text import ChatTokenizer

BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}

pytestmark = pytest.mark.usefixtures("ray_session")


def _config(target: Path, cache: Path, output: Path, **train: Any) -> DistillConfig:
    values = {
        "target": {"model": str(target)},
        "activations": str(cache),
        "output": str(output),
        "drafter": {
            "type": "moa",
            "target_layers": 1,
            "layer_self_attention": BLOCK,
            "self_attention": BLOCK,
            "cross_attention": BLOCK,
        },
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "schedule": {"type": "linear", "warmup_steps": 3},
        "train": {"epochs": 2, "max_steps": 24, "batch_tokens": 512, "save_steps": 10, "logging_steps": 2} | train,
    }
    return validate(DistillConfig, values)


@pytest.fixture(scope="module")
def distilled(tiny_target: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillConfig:
    from moray.cluster.training.distill import distill

    config = _config(tiny_target, tiny_cache, tmp_path_factory.mktemp("run") / "drafter")
    assert not is_complete(config)
    assert distill(config) == Path(config.output)
    return config


def test_loss_falls_and_every_report_is_written(distilled: DistillConfig) -> None:
    rows = read_metrics(Path(distilled.output))
    assert [row["step"] for row in rows] == list(range(2, 25, 2))
    first, last = rows[0], rows[-1]
    assert sum(row["loss"] for row in rows[-3:]) / 3 < 0.9 * first["loss"]
    assert last["learning_rate"] < 0.1 * max(row["learning_rate"] for row in rows)
    assert all(0 <= row["accuracy"] <= 1 <= row["simulated_tau"] for row in rows)


def _shown_losses(folder: Path) -> dict[int, float]:
    """What TensorBoard shows, by update."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def test_tensorboard_shows_the_same_losses(distilled: DistillConfig) -> None:
    shown = _shown_losses(Path(distilled.output))
    rows = read_metrics(Path(distilled.output))
    assert list(shown) == [row["step"] for row in rows]
    assert list(shown.values()) == pytest.approx([row["loss"] for row in rows], rel=1e-5)


def test_the_drafter_loads_and_has_learnt(distilled: DistillConfig, tiny_target: Path) -> None:
    import torch

    folder = Path(distilled.output)
    head = TargetHead.load(distilled.target, 1)
    text = ChatTokenizer.load(str(tiny_target)).fingerprint
    drafter = load_drafter(folder, head, text)
    assert read_contract(folder).drafter == distilled.drafter
    torch.manual_seed(distilled.train.seed)
    fresh = dict(distilled.drafter.build(head).named_parameters())
    trained = dict(drafter.named_parameters())
    assert trained.keys() == fresh.keys()
    assert all(bool(parameter.isfinite().all()) for parameter in trained.values())
    moved = [name for name in trained if not torch.equal(trained[name], fresh[name])]
    assert len(moved) > 0.8 * len(trained)


def test_checkpoints_are_kept_as_told(distilled: DistillConfig) -> None:
    kept = sorted(Path(distilled.output).glob("ray/train/checkpoint_2*"))
    assert len(kept) == distilled.train.keep_checkpoints == 2
    assert {path.name for path in kept[-1].iterdir()} >= {
        "drafter.safetensors",
        "training.safetensors",
        "training.json",
    }


def test_the_same_command_finds_it_complete_and_another_configuration_is_refused(
    distilled: DistillConfig, tiny_target: Path, tiny_cache: Path
) -> None:
    assert is_complete(distilled)
    other = _config(tiny_target, tiny_cache, Path(distilled.output), batch_tokens=256)
    with pytest.raises(MismatchError, match=r"holds a run with train.batch_tokens = 512, now it is 256; give another"):
        is_complete(other)


def test_a_run_may_go_on_with_what_changes_no_weight(
    distilled: DistillConfig, tiny_target: Path, tiny_cache: Path
) -> None:
    output = Path(distilled.output)
    changes = {"save_steps": 7, "logging_steps": 3, "keep_checkpoints": 5, "activation_checkpointing": True}
    assert is_complete(_config(tiny_target, tiny_cache, output, **changes))


@pytest.mark.parametrize("kind", [DataError, UnreachableError])
def test_only_what_may_answer_again_is_left_to_ray_to_retry(
    monkeypatch: pytest.MonkeyPatch, kind: type[DataError], tmp_path: Path
) -> None:
    import ray

    from moray.cluster.progress_actor import ProgressActor
    from moray.cluster.training import worker as training

    def fail(settings: training.WorkerSettings) -> None:
        raise kind("no")

    monkeypatch.setattr(training, "_train", fail)
    progress_actor: Any = ProgressActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    config = _config(tmp_path, tmp_path, tmp_path)
    settings = training.WorkerSettings(config, tmp_path, 1, None, progress_actor)
    with pytest.raises(kind):
        training.work({"settings": settings})
    failure: Any = ray.get(progress_actor.failure.remote())
    assert (failure is None) == (kind is UnreachableError)


def test_a_cache_of_another_target_is_refused(other_target: Path, tiny_cache: Path, tmp_path: Path) -> None:
    from moray.cluster.training.distill import distill

    cached = read_manifest(CacheStore(str(tiny_cache))).plan.target.fingerprint
    config = _config(other_target, tiny_cache, tmp_path / "run")
    with pytest.raises(MismatchError, match=rf"fingerprint {cached}; target.model '{other_target}' has [0-9a-f]+: "):
        distill(config)
    assert not (tmp_path / "run").exists()


def test_no_cache_is_a_one_line_error(tiny_target: Path, tmp_path: Path) -> None:
    from moray.cluster.training.distill import distill

    with pytest.raises(DataError, match=r"activation cache '.*nothing' is not there: run pipelines.cache_activations"):
        distill(_config(tiny_target, tmp_path / "nothing", tmp_path / "run"))


@pytest.mark.soak
def test_an_error_in_a_worker_is_our_own_one_line_error_and_is_not_tried_again(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """A shard that is damaged after the manifest was read: only a data task of a worker can notice."""
    import shutil

    from moray.cluster.training.distill import distill

    damaged = tmp_path / "cache"
    shutil.copytree(tiny_cache, damaged)
    for path in (damaged / "shards").glob("*.parquet"):
        path.write_bytes(path.read_bytes()[:100])
    config = _config(tiny_target, damaged, tmp_path / "run")
    assert config.workers.max_failures == 3
    with pytest.raises(DataError, match=r"^shard '.*/shards/\d{5}-\d{5}.parquet' cannot be read: ") as caught:
        distill(config)
    assert type(caught.value) is DataError
    assert not (tmp_path / "run" / "drafter.json").exists()
    assert not (tmp_path / "run" / "run.yaml").exists(), "nothing was trained: another configuration may begin here"
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1, "it trained again after an error of ours"


def test_workers_that_the_machine_has_no_room_for_are_refused(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    from moray.cluster.training.distill import distill

    config = _config(tiny_target, tiny_cache, tmp_path / "run")
    many = config.model_copy(update={"workers": config.workers.model_copy(update={"num_workers": 9})})
    with pytest.raises(
        ConfigError, match=r"num_workers=9 with .*per_worker=1.0 needs 9.5 CPUs, 0.5 to read with included; .* has 4"
    ):
        distill(many)
    gpus = config.model_copy(update={"workers": config.workers.model_copy(update={"use_gpu": True})})
    with pytest.raises(ConfigError, match=r"workers.use_gpu=True needs 1 GPUs; this machine has 0"):
        distill(gpus)
    values = config.model_dump(mode="json")
    values["source"] = {"type": "stream", "chats": {"path": "none.jsonl"}, "capture": {"num_targets": 4}}
    with pytest.raises(ConfigError, match=r"needs 5.5 CPUs, .*source.capture.num_targets=4 beside them included"):
        distill(validate(DistillConfig, values))


def test_a_cluster_that_is_too_small_is_said_to_be(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The cluster may grow; until then nothing happens, and a line says why."""
    from moray.cluster.training.data_shards import num_workers

    config = _config(tiny_target, tiny_cache, tmp_path / "run")
    many = config.model_copy(update={"workers": config.workers.model_copy(update={"num_workers": 4})})
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert num_workers(many) == 4
    told = " ".join(capsys.readouterr().err.split())
    assert "num_workers=4 with workers.cpus_per_worker=1.0 needs 4.5 CPUs" in told
    assert "this cluster has 4, and training waits until it has grown" in told
    assert num_workers(config) == config.workers.num_workers
    assert not capsys.readouterr().err


def test_a_range_of_workers_is_cut_to_the_machine_and_to_the_run_s_lanes(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    from moray.cluster.training.data_shards import num_workers, run_data_shards

    def asked(given: Any, **train: Any) -> DistillConfig:
        config = _config(tiny_target, tiny_cache, tmp_path / "run", **train)
        return config.model_copy(update={"workers": config.workers.model_copy(update={"num_workers": given})})

    assert run_data_shards(asked((1, 8), gradient_accumulation_steps=3)) == 24
    assert num_workers(asked((1, 8))) == (1, 3), "4 CPUs, of which a part is for reading"
    assert num_workers(asked((3, 8))) == 3
    begin_or_resume(asked(2))
    assert run_data_shards(asked(1)) == 2
    assert num_workers(asked((1, 3))) == (1, 2)
    with pytest.raises(
        ConfigError, match=r"num_workers is 3, but the run in '.*' began with 2 data shards, .* or less, or"
    ):
        num_workers(asked(3))


def test_a_column_that_the_drafter_reads_and_the_cache_lacks_is_named(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    from moray.cluster.training.worker import build_learner

    config = _config(tiny_target, tiny_cache, tmp_path / "run")
    manifest = read_manifest(CacheStore(str(tiny_cache)))
    del manifest.columns["hidden.-2"]
    with pytest.raises(DataError, match=r"the cache has no column 'hidden.-2', which this drafter reads"):
        build_learner(config, manifest)


def test_a_run_is_not_taken_up_for_another_target(
    distilled: DistillConfig, other_target: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """The same paths with other weights behind them."""
    import shutil

    config = _config(tmp_path / "target", tmp_path / "cache", tmp_path / "run")
    shutil.copytree(tiny_target, tmp_path / "target")
    shutil.copytree(distilled.activations, tmp_path / "cache")
    assert not is_complete(config)
    begin_or_resume(config)
    shutil.copytree(other_target, tmp_path / "target", dirs_exist_ok=True)
    plan = CacheStore(config.activations).read_json("plan.json")
    before, after = plan["target"]["fingerprint"], read_spec(config.target.model).fingerprint
    for name in ("plan.json", "manifest.json"):  # as if cached again, too
        store = CacheStore(config.activations)
        store.write_json(name, json.loads(json.dumps(store.read_json(name)).replace(before, after)))
    with pytest.raises(MismatchError, match=r"holds a run with fingerprint.target = "):
        is_complete(config)


@pytest.mark.slow
def test_a_list_of_checkpoints_that_a_kill_cut_short_costs_nothing(
    distilled: DistillConfig, tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """Ray writes its list in place: what an interrupted write leaves must not keep a run from going on."""
    import json
    import shutil

    from moray.cluster.training.distill import distill

    config = _config(tiny_target, tiny_cache, tmp_path / "run")
    shutil.copytree(distilled.output, config.output)
    run = tmp_path / "run" / "ray" / "train"
    (run / "checkpoint_manager_snapshot.json").write_text('{"ray_ver')
    checkpoints = {json.loads((p / "training.json").read_text())["step"]: p for p in run.glob("checkpoint_2*")}
    assert sorted(checkpoints) == [20, 24]
    torn = checkpoints[24] / "drafter.safetensors"  # killed while this one was copied
    torn.write_bytes(torn.read_bytes()[:-100])
    (tmp_path / "run" / "drafter.json").unlink()
    distill(config)
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == list(range(2, 25, 2))
    weights = [(Path(folder) / "drafter.safetensors").read_bytes() for folder in (distilled.output, config.output)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_checkpoint_that_ray_has_not_listed_counts(
    distilled: DistillConfig, tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """Whole on disk when the workers died, and the controller had not come to note it."""
    import json
    import shutil

    from moray.cluster.training.distill import distill

    config = _config(tiny_target, tiny_cache, tmp_path / "run")
    shutil.copytree(distilled.output, config.output)
    snapshot = tmp_path / "run" / "ray" / "train" / "checkpoint_manager_snapshot.json"
    listed = json.loads(snapshot.read_text())
    assert [result["metrics"]["step"] for result in listed["checkpoint_results"]] == [20, 24]
    listed["checkpoint_results"] = listed["checkpoint_results"][:1]
    listed["checkpoint_report_indices"] = listed["checkpoint_report_indices"][:1]
    listed["latest_checkpoint_result"] = listed["checkpoint_results"][0]
    listed["current_report_index"] -= 1
    snapshot.write_text(json.dumps(listed))
    (tmp_path / "run" / "drafter.json").unlink()
    distill(config)
    assert read_metrics(tmp_path / "run") == read_metrics(Path(distilled.output)), "no update was made again"
    assert [r["metrics"]["step"] for r in json.loads(snapshot.read_text())["checkpoint_results"]] == [20, 24]
    weights = [(Path(folder) / "drafter.safetensors").read_bytes() for folder in (distilled.output, config.output)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_chats(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    """One chat of the cache is poisoned; two data shards, of which one meets it."""
    import json
    import shutil

    from moray.cluster.training.distill import distill

    poisoned = tmp_path / "cache"
    shutil.copytree(tiny_cache, poisoned)
    uid = _poison(poisoned)
    config = _config(
        tiny_target, poisoned, tmp_path / "run", gradient_accumulation_steps=2, save_steps=1, max_steps=None
    )
    with pytest.raises(
        DataError, match=r"^update \d+: the loss of data shard [01] is nan; its chats are .*nonfinite\.json"
    ):
        distill(config)
    record = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    (data_shard,) = record["data_shards"]
    assert uid in data_shard["uids"]
    assert data_shard["loss"] == record["grad_norm"] == "NaN"
    assert record["learning_rate"] > 0
    steps = [json.loads(path.read_text())["step"] for path in tmp_path.glob("run/ray/train/checkpoint_*/training.json")]
    assert max(steps, default=0) < record["update"]
    updates = list(range(1, record["update"]))  # each is reported, for a checkpoint is written after each
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == updates
    assert list(_shown_losses(tmp_path / "run")) == updates, "what led to it must be shown"
    assert not (tmp_path / "run" / "drafter.json").exists()


def _poison(cache: Path) -> str:
    """Make the last hidden states of one chat NaN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = sorted((cache / "shards").glob("*.parquet"))[0]
    source = pq.ParquetFile(path)
    groups = [source.read_row_group(number) for number in range(source.num_row_groups)]
    table = groups[-1]
    index = table.schema.get_field_index("hidden.-1")
    values = table.column(index).to_pylist()
    values[0] = b"\xff\x7f" * (len(values[0]) // 2)  # bfloat16
    groups[-1] = table.set_column(index, table.schema.field(index), pa.array(values, pa.binary()))
    with pq.ParquetWriter(path, source.schema_arrow) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=group.num_rows)
    return table.column("uid")[0].as_py()


def test_a_run_starts_from_the_target_s_layers(tiny_target: Path, tiny_cache: Path, tmp_path: Path) -> None:
    """A drafter of all layers agrees with the target from the first update on; the run knows what it began with."""
    from moray.cluster.training.distill import distill

    layer = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}
    drafter = {"type": "independent", "num_layers": 3, "hidden_size": 64, "head_dim": 16, "layer": layer}

    def asked(layers: list[int]) -> DistillConfig:
        values = _config(tiny_target, tiny_cache, tmp_path / "run", max_steps=2, logging_steps=1).model_dump()
        values |= {"drafter": drafter | {"embeddings": "frozen"}, "init": {"layers": layers}}
        return validate(DistillConfig, values | {"losses": {"feature": 0.0, "kl": 1.0}})

    folder = distill(asked([0, 1, 2]))
    first = read_metrics(folder)[0]
    assert first["kl"] < 0.01
    assert first["accuracy"] > 0.95
    with pytest.raises(MismatchError, match=r"holds a run with init\.layers"):
        is_complete(asked([0, 2, 1]))
