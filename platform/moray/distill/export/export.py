"""Exports a drafter: one folder in the style of the Hugging Face hub, from which a drafter replica runs.

config.json            model type, contract (see `drafters.contract`), the target's config.json, RoPE, dtype
model.safetensors      "drafter.*": the drafter's weights and buffers, including its draft vocabulary
                       "head.*": the target's frozen parts under their names in the target
tokenizer files        with the chat template that the drafter was trained with, to prepare text
generation_config.json of the target
README.md              a model card

There is only safetensors and JSON: loading executes nothing from the folder. With format=hf the folder holds what other
engines read (see `drafters.published`).
"""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moray.distill.export.config import ExportConfig
from moray.distill.export.model_card import model_card
from moray.drafters.base import Drafter
from moray.drafters.checkpoint import DRAFTER_PREFIX, EXPORTED_TYPE, fill, is_exported, load_drafter, read_contract
from moray.drafters.contract import Contract
from moray.drafters.published.folders import published_form
from moray.errors import ConfigError, DataError
from moray.provenance import read_json, versions, write_json_atomically
from moray.targets.head import TargetHead
from moray.targets.loading import describe_nonfinite
from moray.targets.model import pick_device
from moray.targets.spec import resolve_folder
from moray.text import ChatTokenizer

HEAD_PREFIX = "head."
CONTRACT = "moray.json"
"""Contract of a drafter in a folder for other engines, which ignore the file."""


def export_drafter(config: ExportConfig) -> Path:
    """Write the folder, all of it or nothing; return its path.

    Raises:
        DataError: there is no finished drafter, or `output` holds something else.
        MismatchError: `target` is not what the drafter was trained for.
        ConfigError: `output` is the drafter's own folder, or `dtype` cannot hold its weights.
    """
    folder, output = Path(config.drafter), Path(config.output)
    contract = read_contract(folder)
    _check_output(folder, output, contract)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    target = config.target.model_copy(update={"device": "cpu"})
    drafter = load_drafter(folder, TargetHead.load(target, contract.drafter.num_target_layers), tokenizer.fingerprint)
    if config.dtype is not None:
        drafter.cast(getattr(torch, config.dtype))
        problem = describe_nonfinite(drafter.named_parameters())
        if problem:
            raise ConfigError(f"dtype is '{config.dtype}', which does not hold the drafter's weights: {problem}")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}.tmp")
    before = temporary.with_suffix(".old")
    temporary.mkdir()
    try:
        if config.format == "hf":
            _write_published(temporary, config, drafter, contract, tokenizer)
        else:
            save_file(_tensors(drafter, config), temporary / "model.safetensors", metadata={"format": "pt"})
            _write_text_files(temporary, config, tokenizer)
            write_json_atomically(temporary / "config.json", _description(drafter, config, contract))
        (temporary / "README.md").write_text(model_card(config, contract, drafter, temporary), encoding="utf-8")
        shutil.copymode(temporary / "README.md", temporary / "model.safetensors")  # safetensors makes files private
        if output.exists():  # `_check_output`: empty, or an export of the same drafter
            output.replace(before)
        temporary.replace(output)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"output '{output}' cannot be written: {reason}; name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if before.exists() and not output.exists():
            before.replace(output)
        shutil.rmtree(before, ignore_errors=True)
    return output


def load_exported(folder: Path, device: str = "auto") -> Drafter:
    """Load a drafter with its head from an exported folder, in eval mode; the target's folder is not needed.

    To use it with a loaded target, or if it was exported without the head, call `load_drafter`.

    Raises:
        DataError: no exported drafter is there, it has no head, or files are damaged.
        MismatchError: the drafter would read other taps than it was trained on.
    """
    if not is_exported(folder):
        raise DataError(f"'{folder}' holds no exported drafter; write one with pipelines.export")
    contract = read_contract(folder)
    description = read_json(folder / "config.json")
    try:
        tensors = load_file(folder / "model.safetensors", device=str(pick_device(device)))
    except (OSError, SafetensorError) as error:
        raise DataError(f"'{folder}' has no usable model.safetensors: {' '.join(str(error).split())[:200]}") from None
    own, head = (
        {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (DRAFTER_PREFIX, HEAD_PREFIX)
    )
    if not head:
        raise DataError(
            f"'{folder}' was exported without the target's head, which drafting needs: export with include_head=true, "
            "or load the drafter for a target"
        )
    layers = contract.drafter.num_target_layers
    drafter = contract.drafter.build(TargetHead.restore(description["target_config"], contract.target, layers, head))
    contract.check_taps(folder, drafter.needs)
    drafter = drafter.to(drafter.head.weight.device)
    parameters = dict(drafter.named_parameters())
    drafter.cast(next((own[name].dtype for name in parameters if name in own), torch.float32))
    fill(drafter, own, folder / "model.safetensors")
    return drafter.eval()


def _check_output(folder: Path, output: Path, contract: Contract) -> None:
    if output.resolve() == folder.resolve():
        raise ConfigError(f"output is '{output}', the drafter's own folder; name another one")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if (output / CONTRACT).is_file():
        known = read_json(output / CONTRACT) == contract.describe()
    elif is_exported(output):
        known = read_contract(output) == contract
    else:
        raise DataError(f"output '{output}' exists and holds something else than an export; name another folder")
    if not known:
        raise DataError(f"output '{output}' holds an export of another drafter; name another folder or remove it")


def _tensors(drafter: Drafter, config: ExportConfig) -> dict[str, Tensor]:
    tensors = {DRAFTER_PREFIX + name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    if config.include_head:
        dtype = getattr(torch, config.dtype or config.target.dtype)
        tensors |= {HEAD_PREFIX + name: tensor.to(dtype) for name, tensor in drafter.head.tensors().items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _write_published(
    folder: Path, config: ExportConfig, drafter: Drafter, contract: Contract, tokenizer: ChatTokenizer
) -> None:
    """Write what other engines read. The contract stands beside it, for a later export to the same folder."""
    published = published_form(drafter)
    dtype = config.dtype or "float32"
    tensors = {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in published.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json_atomically(folder / "config.json", {**published.config, "dtype": dtype, "torch_dtype": dtype})
    write_json_atomically(folder / CONTRACT, contract.describe())
    if contract.drafter.type == "independent":  # a model of its own; the others use the target's
        _write_text_files(folder, config, tokenizer)


def _description(drafter: Drafter, config: ExportConfig, contract: Contract) -> dict[str, Any]:
    target_config = read_json(resolve_folder(config.target.model) / "config.json")
    target_config.pop("_name_or_path", None)
    head_dtype = config.dtype or config.target.dtype
    return {
        "model_type": EXPORTED_TYPE,
        "architectures": [type(drafter).__name__],
        "dtype": config.dtype or "float32",
        "vocab_size": contract.target.vocab_size,
        "hidden_size": contract.target.hidden_size,
        "max_position_embeddings": contract.target.max_positions,
        "rope_parameters": target_config.get("rope_parameters"),
        "contract": contract.describe(),
        "head": {"num_layers": drafter.head.num_layers, "dtype": head_dtype} if config.include_head else None,
        "target_config": target_config,
        "versions": versions(),
    }


def _write_text_files(folder: Path, config: ExportConfig, tokenizer: ChatTokenizer) -> None:
    """Write tokenizer, chat template and generation settings; reading them back must give the same tokens."""
    tokenizer.tokenizer.save_pretrained(folder)
    again = ChatTokenizer.load(str(folder.absolute())).fingerprint
    if again != tokenizer.fingerprint:
        raise DataError(
            f"the tokenizer of target.model '{config.target.model}' does not survive saving: fingerprint "
            f"{tokenizer.fingerprint} before, {again} after; save it again with AutoTokenizer and train on that"
        )
    generation = resolve_folder(config.target.model) / "generation_config.json"
    if generation.is_file():
        values = json.loads(generation.read_text(encoding="utf-8"))
        write_json_atomically(folder / generation.name, values)
