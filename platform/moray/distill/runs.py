"""A training run's folder: whose it is, and whether it is finished."""

from pathlib import Path
from typing import Any

from moray.config import Config
from moray.errors import MismatchError
from moray.provenance import RUN_FILE, read_run_yaml, write_run_yaml

_IRRELEVANT = ("ray", "output")


def claim_run(output: str, config: Config) -> bool:
    """Start a run, or go on with one of the same configuration; returns whether it is already complete.

    Raises:
        MismatchError: the folder holds another run; names the first differing key and both values.
    """
    folder = Path(output)
    if not (folder / RUN_FILE).is_file():
        write_run_yaml(folder, config)
        return False
    present = _flatten(read_run_yaml(folder)["config"])
    wanted = _flatten(config.model_dump(mode="json"))
    for key in sorted(present.keys() | wanted.keys()):
        if key.split(".")[0] not in _IRRELEVANT and present.get(key) != wanted.get(key):
            raise MismatchError(
                f"'{output}' holds a run with {key} = {present.get(key)}, now it is {wanted.get(key)}; "
                "give another output or remove the folder"
            )
    return (folder / "drafter.json").is_file()


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
