"""Checkpoints of drafters and of training runs: safetensors and JSON, written atomically, never pickled.

drafter.safetensors   trainable weights and buffers
drafter.json          its configuration, its target's sizes and fingerprints
training.safetensors  optimiser state           (resumable checkpoints only)
training.json         updates, tokens, seconds  (resumable checkpoints only)
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from moray.distill.loop import Progress
from moray.distill.optim import Optimiser
from moray.drafters.base import Drafter
from moray.drafters.configs import DRAFTER_CONFIG, DrafterConfig
from moray.errors import DataError, MismatchError
from moray.targets.head import TargetHead
from moray.targets.spec import TargetSpec

_FORMAT = 2


def save_drafter(folder: Path, drafter: Drafter, text_fingerprint: str) -> None:
    """Write a drafter that decodes and can be trained further.

    Args:
        folder: made if need be.
        drafter: its frozen target parts are not saved.
        text_fingerprint: of the tokenizer and chat template it was trained with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    _atomically(folder / "drafter.safetensors", lambda path: save_file(tensors, path))
    description = {
        "format": _FORMAT,
        "drafter": DRAFTER_CONFIG.dump_python(drafter.config, mode="json"),  # type: ignore[arg-type]
        "target": drafter.spec.model_dump(mode="json"),
        "text_fingerprint": text_fingerprint,
    }
    _atomically(folder / "drafter.json", lambda path: path.write_text(json.dumps(description, indent=2)))


def read_drafter_config(folder: Path) -> tuple[DrafterConfig, TargetSpec, str]:
    """Configuration, target sizes and text fingerprint of a saved drafter.

    Raises:
        DataError: no drafter there, or its description is damaged.
    """
    path = folder / "drafter.json"
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if description["format"] != _FORMAT:
            raise DataError(
                f"'{path}' has format {description['format']}, this version reads {_FORMAT}; train the drafter again"
            )
        return (
            DRAFTER_CONFIG.validate_json(json.dumps(description["drafter"])),
            TargetSpec.model_validate_json(json.dumps(description["target"])),
            description["text_fingerprint"],
        )
    except FileNotFoundError:
        raise DataError(
            f"'{folder}' holds no drafter: drafter.json is missing; train one with pipelines.distill"
        ) from None
    except (json.JSONDecodeError, KeyError, ValidationError) as error:
        raise DataError(f"'{path}' is damaged: {' '.join(str(error).split())[:200]}") from None


def load_drafter(folder: Path, head: TargetHead, text_fingerprint: str) -> Drafter:
    """Rebuild a saved drafter for the target that `head` belongs to, in eval mode.

    Raises:
        MismatchError: it was trained for another target, tokenizer or chat template; both values are named.
        DataError: missing or damaged files.
    """
    config, spec, trained_text = read_drafter_config(folder)
    _check_same("target", spec.fingerprint, head.spec.fingerprint, folder)
    _check_same("tokenizer and chat template", trained_text, text_fingerprint, folder)
    drafter = config.build(head)
    load_weights(folder, drafter)
    return drafter.to(head.weight.device).eval()


def load_weights(folder: Path, drafter: Drafter) -> None:
    """Fill a drafter with saved weights; they must match exactly."""
    path = folder / "drafter.safetensors"
    try:
        drafter.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(
            f"'{path}' does not hold this drafter's weights: {' '.join(str(error).split())[:200]}"
        ) from None


def save_training(folder: Path, optimiser: Optimiser, progress: Progress) -> None:
    """Write what a run needs, beside its drafter, to go on exactly where it was."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu() for name, tensor in optimiser.state_dict().items()}
    _atomically(folder / "training.safetensors", lambda path: save_file(state, path))
    _atomically(folder / "training.json", lambda path: path.write_text(json.dumps(asdict(progress))))


def load_training(folder: Path, optimiser: Optimiser) -> Progress:
    """Restore an optimiser and say how far the run was."""
    try:
        optimiser.load_state_dict(load_file(folder / "training.safetensors"))
        return Progress(**json.loads((folder / "training.json").read_text(encoding="utf-8")))
    except (OSError, SafetensorError, json.JSONDecodeError, TypeError) as error:
        raise DataError(f"checkpoint '{folder}' cannot be resumed: {' '.join(str(error).split())[:200]}") from None


def whole_checkpoint_step(folder: Path) -> int | None:
    """Updates made up to a resumable checkpoint, or None if not all of its files are there in full."""
    try:
        for name in ("drafter.safetensors", "training.safetensors"):
            with safe_open(folder / name, framework="pt"):  # compares the file's size with what its header says
                pass
        json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
        return int(json.loads((folder / "training.json").read_text(encoding="utf-8"))["step"])
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def _check_same(what: str, trained: str, given: str, folder: Path) -> None:
    if trained != given:
        raise MismatchError(
            f"drafter '{folder}' was trained for another {what}: fingerprint {trained}, this one has {given}; "
            f"train a drafter for this {what} or point `target` at the right one"
        )


def _atomically(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    temporary.replace(path)
