"""Writes a target as a GGUF file without a vocabulary, which is enough for llama.cpp to decode token ids."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from moray.errors import ConfigError
from moray.models.families import FAMILIES
from moray.models.gguf_file import OUTER, PARTS
from moray.progress import Progress
from moray.targets.spec import TargetSpec


def write_gguf(folder: Path, spec: TargetSpec, dtype: Literal["float32", "bfloat16"], path: Path) -> None:
    """Write the weights of a Hugging Face folder in llama.cpp's layout, matrices in `dtype` and vectors in float32.

    Args:
        folder: folder of the target.
        spec: sizes of the target.
        dtype: number format of the matrices.
        path: the file to write; it is written atomically.

    Raises:
        ConfigError: the target has rotary scaling, sliding windows or a tensor that GGUF has no name for.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    if spec.rope_scaling != "default" or spec.sliding_window is not None:
        raise ConfigError(
            f"target.model '{folder}' has {'a rotary scaling' if spec.rope_scaling != 'default' else 'sliding windows'}"
            "; GGUF files are written for targets without: leave out the peers with engine llama-cpp"
        )
    kind = GGMLQuantizationType.F32 if dtype == "float32" else GGMLQuantizationType.BF16
    temporary = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer = GGUFWriter(temporary, FAMILIES[spec.family].gguf_architecture)
        _write_header(writer, spec)
        for name, values in _tensors(folder, spec):
            _add(writer, name, values, kind if values.ndim > 1 else GGMLQuantizationType.F32)
        with Progress(f"write {path.name}"):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(writer: Any, spec: TargetSpec) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)


def _tensors(folder: Path, spec: TargetSpec) -> Any:
    """Yield the tensors with llama.cpp's names and float32 values."""
    import torch
    from safetensors import safe_open

    from moray.targets.stored import weight_files

    layer_names = {theirs: ours for ours, theirs in PARTS.items()}
    outer_names = {theirs: ours for ours, theirs in OUTER.items()}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                values = tensors.get_tensor(name).to(torch.float32).numpy()
                stem, _, kind = name.rpartition(".")
                if stem in outer_names:
                    yield f"{outer_names[stem]}.{kind}", values
                    continue
                *_, layer, part = stem.split(".", 3) if stem.count(".") >= 3 else ("", "")
                if part not in layer_names:
                    raise ConfigError(
                        f"target.model '{folder}' has a tensor '{name}', for which GGUF has no name; leave out the "
                        "peers with engine llama-cpp"
                    )
                heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}.get(part)
                if heads is not None and FAMILIES[spec.family].gguf_rotates_neighbours:
                    values = _neighbours(values, heads)
                yield f"blk.{layer}.{layer_names[part]}.{kind}", values


def _neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """Invert `convert._halves`: reorder rows so that adjacent ones are rotated against each other."""
    rows = values.shape[0] // heads
    return values.reshape(heads, 2, rows // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _add(writer: Any, name: str, values: np.ndarray, kind: Any) -> None:
    from gguf.quants import quantize

    values = np.ascontiguousarray(values)
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
