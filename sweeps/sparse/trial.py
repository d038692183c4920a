"""One trial: a sparse target is trained to its end, written, and compared with the dense one. Runs in a Ray Tune actor.

The figures are stored in the trial's folder, and reported again after any kind of crash.
"""

import time
from pathlib import Path
from typing import Any, cast

import ray
from ray import tune

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.cluster.errors import own_errors
from moray.cluster.progress_actor import ProgressActor
from moray.cluster.training.configs import SparsifyConfig
from moray.cluster.training.distill import hand_out, train_until
from moray.cluster.training.outline import outline_learner, run_length
from moray.distill.finite import NONFINITE_FILE
from moray.distill.tracking.metrics import read_metrics
from moray.errors import MorayError, UnreachableError
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.tuning.folders import ENDED, TrialFolder, trial_folder
from sweeps.tuning.records import SparseFigures, TrialRow
from sweeps.tuning.spaces import Choices

_DRIVER = "DEFAULT"
"""Scheduling strategy outside the placement group of Tune's actor, which has no room for anything else."""
SIZE_KEY = "rung"
"""There is one rung."""


def run_sparse_trial(choices: Choices, config: str, progress_actor: Any) -> None:
    """Train, measure, and report to Ray Tune.

    Our own errors end the trial and are recorded in its folder; errors of the machine are raised, so that Tune retries.

    Args:
        choices: the trial's choices.
        config: the sweep's configuration as JSON.
        progress_actor: the sweep's progress actor.
    """
    sweep = SparseSweepConfig.model_validate_json(config)
    folder = trial_folder(sweep.output, choices)
    has_ended = folder.state in ENDED
    if not has_ended:
        folder.begin(choices)
    if not folder.rows:
        if has_ended:
            return
        try:
            folder.add(_train_and_measure(sweep, sweep.trial(choices, str(folder.path)), folder, progress_actor))
        except UnreachableError:  # may be temporary: let Tune retry
            raise
        except MorayError as error:
            folder.end("diverged" if (folder.path / NONFINITE_FILE).is_file() else "failed", str(error))
            return
    folder.end("finished")
    (row,) = folder.rows
    tune.report({key: value for key, value in row.items() if key != "answers"})


def _train_and_measure(
    sweep: SparseSweepConfig, config: SparsifyConfig, folder: TrialFolder, sweep_progress: Any
) -> TrialRow:
    begin, name = time.time(), folder.path.name
    num_updates = run_length(config, read_manifest(CacheStore(config.activations)), outline_learner(config))
    progress_actor: Any = ProgressActor.options(num_cpus=0, scheduling_strategy=_DRIVER).remote()  # type: ignore[attr-defined]
    sweep_progress.watch.remote(name, progress_actor, 0)
    try:
        hand_out(train_until(config, num_updates, progress_actor), folder.path)
        sweep_progress.watch.remote(name, None, 0)
        quality = sweep.quality
        task: Any = ray.remote(write_and_measure).options(
            num_cpus=quality.cpus, num_gpus=quality.gpus, scheduling_strategy=_DRIVER
        )
        with own_errors():
            figures: Any = ray.get(task.remote(config.model_dump_json(), quality.model_dump_json()))
    finally:
        ray.kill(progress_actor)
        sweep_progress.forget.remote(name)
    trained = read_metrics(folder.path)[-1]
    row: dict[str, Any] = {
        "rung": 0,
        "training_tokens": int(trained["tokens"]),
        "training_seconds": float(trained["seconds"]),
        "loss": trained["loss"],
        "seconds": time.time() - begin,
        "objective": figures["agreement"],
        "answers": [],
        **figures,
    }
    return cast(TrialRow, row)


def write_and_measure(config: str, quality: str) -> SparseFigures:
    """Write the sparse target of a trained run (JSON), and compare it with the dense target (JSON of a
    `SparseQualityConfig`). Runs in a Ray task.

    Raises:
        DataError: the weights are damaged, or the file of chats is.
    """
    import torch

    from moray.bench.sparse.quality import measure_quality, read_texts
    from moray.cluster.training.sparsify import write_target
    from moray.targets.model import Target
    from moray.text import ChatTokenizer
    from sweeps.sparse.configs import SparseQualityConfig

    run, settings = SparsifyConfig.model_validate_json(config), SparseQualityConfig.model_validate_json(quality)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = {"device": "cuda" if settings.gpus else "cpu"}  # overrides the target's: other GPUs are for the workers
    run = run.model_copy(update={"target": run.target.model_copy(update=device)})
    write_target(run)
    dense = Target.load(run.target)
    sparse = Target.load(run.target.model_copy(update={"model": str(Path(run.output))}))
    tokenizer = ChatTokenizer.load(run.target.model, run.target.template)
    texts = read_texts(settings.chats, tokenizer, settings.max_chats, settings.max_length, settings.skip_chats)
    before, best = measure_quality(dense, texts, None)
    found, _ = measure_quality(sparse, texts, best, dense.spec.num_layers)
    return {
        "perplexity": found.perplexity,
        "dense_perplexity": before.perplexity,
        "agreement": found.agreement,
        "share": found.share,
        "pass_share": found.pass_share,
    }
