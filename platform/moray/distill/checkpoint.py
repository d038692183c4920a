"""Resumable checkpoints of training: a drafter (`drafters.checkpoint`) and, next to it, written atomically:

training.safetensors  optimizer state
training.json         updates, tokens, seconds
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moray.distill.loop import Progress
from moray.distill.optim import Optimiser
from moray.distill.parallel import Parallel
from moray.errors import DataError
from moray.provenance import replace_file
from moray.targets.loading import describe_nonfinite


def save_training(folder: Path, optimiser_state: Mapping[str, Tensor], progress: Progress) -> None:
    """Write, next to the drafter, what a run needs to continue exactly where it was."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu() for name, tensor in optimiser_state.items()}
    replace_file(folder / "training.safetensors", lambda path: save_file(state, path))
    replace_file(folder / "training.json", lambda path: path.write_text(json.dumps(asdict(progress))))


def load_training(folder: Path, optimiser: Optimiser | Parallel) -> Progress:
    """Restore an optimizer's state; return how far the run had come."""
    try:
        state = load_file(folder / "training.safetensors")
        problem = describe_nonfinite(state.items())
        if problem:
            raise DataError(
                f"checkpoint '{folder}' cannot be resumed: {problem} of the optimiser; start again with another output"
            )
        optimiser.load_state_dict(state)
        return Progress(**json.loads((folder / "training.json").read_text(encoding="utf-8")))
    except (OSError, SafetensorError, json.JSONDecodeError, TypeError) as error:
        raise DataError(f"checkpoint '{folder}' cannot be resumed: {' '.join(str(error).split())[:200]}") from None


def whole_checkpoint_step(folder: Path) -> int | None:
    """Number of updates up to a resumable checkpoint, or None if any of its files is missing or incomplete."""
    try:
        for name in ("drafter.safetensors", "training.safetensors"):
            with safe_open(folder / name, framework="pt"):  # compares the file's size with its header
                pass
        json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
        return int(json.loads((folder / "training.json").read_text(encoding="utf-8"))["step"])
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
