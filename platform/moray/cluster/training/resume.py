"""Whether a distillation may begin, go on, or is done: decided before anything is started, without Ray."""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.schema import column_values
from moray.activations.format.store import CacheStore
from moray.cluster.training.configs import TrainingConfig
from moray.distill.initial import initial_fingerprint
from moray.distill.runs import begin_run, check_run
from moray.errors import MismatchError
from moray.provenance import RUN_FILE, read_run_yaml
from moray.targets.spec import TargetConfig, TargetSpec, read_spec
from moray.text import ChatTokenizer, fingerprint_parts

_Config = TypeVar("_Config", bound=TrainingConfig)


def is_complete(config: TrainingConfig) -> bool:
    """Whether the result of this configuration is there already; refuses what cannot begin or go on.

    Raises:
        MismatchError: the cache was made from another target, or the folder holds another run.
        DataError: there is no complete cache.
    """
    folder = Path(config.output).absolute()
    check_run(folder, with_recorded_precision(config), run_fingerprints(config))
    return (folder / "drafter.json").is_file()


def with_recorded_precision(config: _Config) -> _Config:
    """With train.precision=auto, a run that has begun keeps the precision that it began with."""
    output = Path(config.output).absolute()
    if config.train.precision != "auto" or not (output / RUN_FILE).is_file():
        return config
    recorded = read_run_yaml(output)["config"].get("train", {}).get("precision", config.train.precision)
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": recorded})})


def begin_or_resume(config: TrainingConfig) -> None:
    """Note that `config.output` belongs to this run. Call it when nothing speaks against it any more."""
    begin_run(Path(config.output).absolute(), config, config.train.seed, run_fingerprints(config))


def withdraw(config: TrainingConfig) -> None:
    """Take `begin_or_resume` back."""
    (Path(config.output).absolute() / RUN_FILE).unlink(missing_ok=True)


def run_fingerprints(config: TrainingConfig) -> dict[str, str]:
    """Of what a distillation reads: target, text and, where they are cached already, activations.

    Raises:
        MismatchError: the cache was made from another target.
        DataError: there is no complete cache.
    """
    initial = _initial_fingerprint(config)
    if config.source.type != "disk":
        text = ChatTokenizer.load(config.target.model, config.target.template).fingerprint
        return {"target": read_spec(config.target.model).fingerprint, "text": text, **initial}
    manifest = read_manifest(CacheStore(config.activations))
    spec = read_spec(config.target.model)
    check_same_target(manifest, spec, config.activations, config.target)
    return {
        "target": spec.fingerprint,
        "text": manifest.plan.text_fingerprint,
        "training_data": _data_fingerprint(manifest),
        **initial,
    }


def _initial_fingerprint(config: TrainingConfig) -> dict[str, str]:
    """Of what the run starts from. A run that has begun no longer needs that drafter: if it is gone, the recorded
    fingerprint stands."""
    init, output = config.initial_weights, Path(config.output).absolute()
    if init is None:
        return {}
    has_begun = (output / RUN_FILE).is_file()
    if has_begun and init.drafter is not None and not Path(init.drafter).exists():
        known = read_run_yaml(output)["fingerprints"].get("initial_weights")
        return {} if known is None else {"initial_weights": known}
    return {"initial_weights": initial_fingerprint(init)}


def _data_fingerprint(manifest: Manifest) -> str:
    """Hash of what is cached: its columns and the hashes of its shards."""
    parts = [column_values(manifest.columns), sorted((name, shard.sha256) for name, shard in manifest.shards.items())]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def check_same_target(manifest: Manifest, spec: TargetSpec, activations: str, target: TargetConfig) -> None:
    """Refuse a cache of another target, tokenizer or template."""
    cached = manifest.plan.target.fingerprint
    if cached != spec.fingerprint:
        raise MismatchError(
            f"activations '{activations}' were cached from a target with fingerprint {cached}; "
            f"target.model '{target.model}' has {spec.fingerprint}: cache again or point to the right one"
        )
    text = fingerprint_parts(ChatTokenizer.load(target.model, target.template).fingerprint)
    for name, before in fingerprint_parts(manifest.plan.text_fingerprint).items():
        if before != text[name]:
            raise MismatchError(
                f"activations '{activations}' were cached with another {name}: fingerprint {before}, the "
                f"target's now has {text[name]}; cache again or set target.template"
            )
