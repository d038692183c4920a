"""Drafters on disk: safetensors and JSON, written atomically, never pickled.

drafter.safetensors   trainable weights and buffers
drafter.json          configuration, and what the drafter was trained for (see `drafters.contract`)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moray.drafters.base import Drafter
from moray.drafters.contract import Contract
from moray.drafters.learner import Learner
from moray.errors import DataError
from moray.provenance import RUN_FILE, replace_file
from moray.targets.head import TargetHead
from moray.targets.loading import describe_difference, describe_nonfinite

EXPORTED_TYPE = "moray_drafter"
"""`model_type` in the config.json of an exported drafter (see `distill.export.export`)."""
DRAFTER_PREFIX = "drafter."
"""Prefix of a drafter's own weights in an exported model.safetensors."""


def save_drafter(folder: Path, drafter: Drafter, text_fingerprint: str) -> None:
    """Write a drafter that can decode and be trained further.

    Args:
        folder: created if it does not exist.
        drafter: its frozen target parts are not saved.
        text_fingerprint: of the tokenizer and chat template that it was trained with.
    """
    save_learner(folder, drafter, text_fingerprint)


def save_learner(
    folder: Path, learner: Learner, text_fingerprint: str, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write anything that was trained; a learner that is not a drafter is described by its configuration and the sizes
    of its target. `weights` is its state dict if it was sharded over workers and had to be gathered."""
    folder.mkdir(parents=True, exist_ok=True)
    state = learner.state_dict() if weights is None else weights
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    replace_file(folder / "drafter.safetensors", lambda path: save_file(tensors, path))
    if isinstance(learner, Drafter):
        description = Contract.of(learner, text_fingerprint).describe()
    else:
        description = {"config": learner.config.model_dump(mode="json"), "target": learner.spec.model_dump(mode="json")}
    replace_file(folder / "drafter.json", lambda path: path.write_text(json.dumps(description, indent=2)))


def is_exported(folder: Path) -> bool:
    """Whether a folder holds a drafter that pipelines.export wrote, rather than a run or a checkpoint."""
    try:
        description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return not (folder / "drafter.json").exists() and description["model_type"] == EXPORTED_TYPE
    except (OSError, ValueError, KeyError, TypeError):
        return False


def drafter_files(folder: Path) -> tuple[Path, Path]:
    """Paths of the description and the weights of a drafter on disk, exported or not."""
    if is_exported(folder):
        return folder / "config.json", folder / "model.safetensors"
    return folder / "drafter.json", folder / "drafter.safetensors"


def read_contract(folder: Path) -> Contract:
    """Read the contract of a drafter on disk: its configuration, and what it was trained for.

    Raises:
        DataError: no drafter is there, its run is not finished, or its description is damaged.
    """
    path, _ = drafter_files(folder)
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Contract.parse(description["contract"] if is_exported(folder) else description, path)
    except OSError:
        if (folder / RUN_FILE).is_file():
            raise DataError(f"'{folder}' holds a run that is not finished: run its pipelines.distill again") from None
        raise DataError(
            f"'{folder}' holds no drafter: drafter.json is missing; train one with pipelines.distill"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"'{path}' is damaged: {' '.join(str(error).split())[:200]}") from None


def load_drafter(folder: Path, head: TargetHead, text_fingerprint: str) -> Drafter:
    """Load a saved or exported drafter for the target that `head` belongs to, in eval mode.

    Raises:
        MismatchError: it was trained for another target, tokenizer, chat template or other taps; names both values.
        DataError: files are missing or damaged.
    """
    contract = read_contract(folder)
    contract.check_target(folder, head.spec, text_fingerprint)
    drafter = contract.drafter.build(head)
    contract.check_taps(folder, drafter.needs)
    load_weights(folder, drafter)
    return drafter.to(head.weight.device).eval()


def load_weights(folder: Path, drafter: Learner) -> None:
    """Load saved weights into a drafter; they must match exactly.

    Raises:
        DataError: see `fill`, or the file cannot be read.
    """
    _, path = drafter_files(folder)
    prefix = DRAFTER_PREFIX if is_exported(folder) else ""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a mapping
            state = {name[len(prefix) :]: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"'{path}' does not hold this drafter's weights: {' '.join(str(error).split())[:200]}"
        ) from None
    fill(drafter, state, path)


def fill(drafter: Learner, state: dict[str, Tensor], path: Path) -> None:
    """Give a drafter the weights and buffers that `path` holds.

    Raises:
        DataError: a tensor is missing, unexpected, not finite or of the wrong shape.
    """
    wanted = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    problem = describe_difference({name: tensor.shape for name, tensor in state.items()}, wanted)
    problem = problem or describe_nonfinite(state.items())
    if problem:
        raise DataError(
            f"'{path}' does not hold this drafter's weights: {problem}; take another checkpoint or train it again"
        )
    drafter.load_state_dict(state)
