"""The folder of a resumable run: which run it belongs to, and whether it may be resumed."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moray.config import Config, flatten, validate
from moray.errors import ConfigError, MismatchError
from moray.provenance import RUN_FILE, read_run_yaml, write_run_yaml
from moray.renamed import with_current_names
from moray.runs_folder import as_runs

_IRRELEVANT = (
    "ray",
    "output",
    "train.logging_steps",
    "train.keep_checkpoints",
    "train.save_steps",
    "train.activation_checkpointing",
    "parallel",
    "source.capture",
    "workers.cpus_per_worker",
    "workers.gpus_per_worker",
    "trackers",
    "validation",
    "workers.max_failures",
    "workers.num_workers",
    "workers.prefetch_windows",
    "workers.threads_per_worker",
    "workers.use_gpu",
)
"""Keys, and groups of keys, that may differ between a run and its resumption: no weight depends on them, except through
the order in which floating-point numbers are added."""

_RENAMED_FINGERPRINTS = {"lanes": "data_shards"}
"""Names of fingerprints before version 0.2, with their present names."""


def check_run(
    folder: Path,
    config: Config,
    fingerprints: Mapping[str, str],
    in_the_way: str = "the folder",
    irrelevant: Collection[str] = _IRRELEVANT,
) -> None:
    """Reject a folder that holds a run of another configuration or target; a folder without a run is fine.

    Args:
        folder: of the run.
        config: the configuration to run there now.
        fingerprints: of the current inputs.
        in_the_way: what to remove to start over, if that is less than the folder.
        irrelevant: keys, and groups of keys, that may differ; by default those of a distillation.

    Raises:
        MismatchError: names the first differing key and both values.
    """
    if not (folder / RUN_FILE).is_file():
        return
    record = read_run_yaml(folder)
    recorded = {_RENAMED_FINGERPRINTS.get(name, name): value for name, value in record["fingerprints"].items()}
    present = {**recorded_config(type(config), record["config"]), "fingerprint": recorded}
    wanted = {**config.model_dump(mode="json"), "fingerprint": dict(fingerprints)}
    if (found := first_difference(present, wanted, irrelevant)) is not None:
        key, before, now = found
        raise MismatchError(
            f"'{folder}' holds a run with {key} = {before}, now it is {now}; give another output or remove {in_the_way}"
        )


def first_difference(
    present: Mapping[str, Any], wanted: Mapping[str, Any], irrelevant: Collection[str]
) -> tuple[str, Any, Any] | None:
    """The first dotted key, in alphabetical order, in which two nested settings differ, with both values.

    Args:
        present: recorded settings.
        wanted: current settings.
        irrelevant: keys, and groups of keys, that may differ.
    """
    before, now = flatten(present), flatten(wanted)
    for key in sorted(before.keys() | now.keys()):
        is_relevant = not any(key == name or key.startswith(f"{name}.") for name in irrelevant)
        if is_relevant and as_runs(before.get(key)) != as_runs(now.get(key)):
            return key, before.get(key), now.get(key)
    return None


def recorded_config(config_class: type[Config], values: dict[str, Any]) -> dict[str, Any]:
    """A configuration that a run recorded, possibly with an earlier version, converted to the current names and keys.

    Values that are not a valid configuration of this class get the current names and are otherwise unchanged.
    """
    try:
        return validate(config_class, values, notice=False).model_dump(mode="json")
    except ConfigError:
        return with_current_names(config_class, values, notice=False)


def begin_run(folder: Path, config: Config, seed: int | None, fingerprints: Mapping[str, str]) -> None:
    """Record which run this folder belongs to. Call it once the configuration has proved to work, before writing
    anything."""
    if not (folder / RUN_FILE).is_file():
        write_run_yaml(folder, config, seed, fingerprints)
