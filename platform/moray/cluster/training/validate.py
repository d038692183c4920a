"""Validation on Ray: checkpoints are validated by tasks beside training, one at a time, and the last one in any case.

Ray Train starts the task of a checkpoint that was reported with `validation=True`, keeps the checkpoint until it has
been validated, and takes up what a kill cut short when the run goes on. It cannot promise everything (its list of
checkpoints may be lost, a task may fail unseen), so the checkpoint that counts is validated at the end if need be.
"""

import os
from pathlib import Path
from typing import Any

import ray
import ray.train

from moray.cluster.errors import own_errors
from moray.cluster.training.configs import DistillConfig, TrainingConfig
from moray.distill.tracking.metrics import read_metrics, read_validation, write_validation
from moray.errors import ConfigError
from moray.progress import Progress
from moray.provenance import read_json


def validation_of(config: TrainingConfig, output: Path) -> ray.train.ValidationConfig | None:
    """What Ray Train is to do with a checkpoint that is reported for validation; None if none will be."""
    if config.validation is None or config.validation.every_checkpoints is None:
        return None
    validate: Any = validate_checkpoint  # Ray's own type wants any keyword
    return ray.train.ValidationConfig(
        validate,
        ray.train.ValidationTaskConfig(fn_kwargs={"config": config.model_dump_json(), "output": str(output)}),
        ray_remote_kwargs=_resources(config),
    )


def is_validated(config: TrainingConfig, step: int) -> bool:
    """Whether the checkpoint of this step is validated beside training."""
    if config.validation is None or config.validation.every_checkpoints is None:
        return False
    return step % (config.validation.every_checkpoints * config.train.save_steps) == 0


def check_validation(config: TrainingConfig) -> None:
    """Refuse chats that are not there, and a validator for which this machine has no room beside the workers.

    Raises:
        ConfigError: no such file; or too few CPUs or GPUs.
        DataError: no chat that begins with a question.
    """
    if config.validation is None:
        return
    from moray.bench.validation import read_prompts

    read_prompts(config.validation)
    if 0 < config.validation.gpus < config.target.tensor_parallel:
        raise ConfigError(
            f"validation.gpus is {config.validation.gpus:g}, but target.tensor_parallel is "
            f"{config.target.tensor_parallel}: give as many, or 0 to validate in one process on the CPU"
        )
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        return  # a cluster may grow
    workers, present = config.workers, ray.cluster_resources()
    beside = 0 if config.validation.every_checkpoints is None else workers.min_workers
    for name, field, own, taken in (
        ("CPU", "cpus", config.validation.cpus, beside * workers.cpus_per_worker),
        ("GPU", "gpus", config.validation.gpus, beside * workers.resources.get("GPU", 0.0)),
    ):
        if own + taken > present.get(name, 0):
            raise ConfigError(
                f"validation.{field}={own:g} beside the workers' {taken:g} {name}s are more than this machine's "
                f"{present.get(name, 0):g}; lower them, or give validation.every_checkpoints=null to validate the last "
                "checkpoint alone, when the workers have gone"
            )


def validate_last(config: TrainingConfig, checkpoint: ray.train.Checkpoint, output: Path) -> None:
    """Validate a run's last checkpoint unless that is done already. Waits for it.

    Raises:
        MorayError: what speaks against it.
    """
    if config.validation is None:
        return
    with checkpoint.as_directory() as folder:
        step = int(read_json(Path(folder) / "training.json")["step"])
    if any(row["step"] == step for row in read_validation(output)):
        return
    task: Any = ray.remote(validate_checkpoint).options(**_resources(config))
    with own_errors(), Progress(f"validate the checkpoint of step {step} on held-out chats"):
        ray.get(task.remote(checkpoint, config=config.model_dump_json(), output=str(output)))


def validate_checkpoint(checkpoint: ray.train.Checkpoint, config: str, output: str) -> dict[str, float]:
    """Measure the drafter of a checkpoint and add its row to the run's validation.jsonl. Runs in a task of its own."""
    import torch

    from moray.bench.validation import Validator
    from moray.drafters.loading import load_drafters
    from moray.targets.model import Target
    from moray.text import ChatTokenizer

    settings = DistillConfig.model_validate_json(config)
    validation = settings.validation
    assert validation is not None
    torch.set_num_threads(validation.threads)
    # Whatever the target's own settings: GPUs are for the workers.
    overrides = {"device": "cuda"} if validation.gpus else {"device": "cpu", "tensor_parallel": 1}
    target = Target.load(settings.target.model_copy(update=overrides))
    tokenizer = ChatTokenizer.load(settings.target.model, settings.target.template)
    with checkpoint.as_directory() as folder:
        (drafter,) = load_drafters((folder,), target, tokenizer).values()
        progress = read_json(Path(folder) / "training.json")
    figures = Validator(target, tokenizer, validation).validate(drafter, settings.losses)
    row = {"step": int(progress["step"]), "tokens": int(progress["tokens"]), **figures}
    write_validation(Path(output), row)
    return row


def describe_validation(output: Path) -> str | None:
    """One line on the last validated checkpoint; None if there is none."""
    rows = read_validation(output)
    if not rows:
        return None
    row, trained = rows[-1], read_metrics(output)
    seen = f", training said {trained[-1]['simulated_tau']:.2f}" if trained else ""
    return (
        f"validation, step {row['step']}: real tau {row['real_tau']:.2f}, simulated {row['simulated_tau']:.2f} "
        f"(gap {row['tau_gap']:+.2f}{seen}), loss {row['loss']:.3f}, {row['chats']} chats"
    )


def _resources(config: TrainingConfig) -> dict[str, float]:
    assert config.validation is not None
    return {"num_cpus": config.validation.cpus, "num_gpus": config.validation.gpus}
