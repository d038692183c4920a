"""A GGUF file as a target: converted once into a Hugging Face folder beside it, from which everything else reads.

The dequantised weights are the target: losslessness is against them, not against llama.cpp's arithmetic. What the
file says and is not understood here (a rotary scaling, an expert, a tensor) is refused by name: left out, it would
make a different model without a word.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moray.errors import ConfigError
from moray.explain import one_line
from moray.models.families import FAMILIES, gguf_architectures
from moray.progress import Progress

RECORD = "gguf.json"
"""In a converted folder: what it was made from."""

_FORMAT = 1
"""Of the conversion: a folder of another number is made again."""
_SHARD_BYTES = 2 << 30
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0)
"""Of the published Llama 3.1, 3.2 and 3.3, whose other rotary parameters are the same."""
_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
"""What is read, or says nothing about the result, of the keys that begin with the architecture."""


@dataclass(frozen=True)
class _Sizes:
    """What the header says of the shapes."""

    family: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


def converted_folder(file: Path, field: str = "target.model") -> Path:
    """The Hugging Face folder of a GGUF file: `NAME.gguf.hf` beside it, made at the first call.

    Raises:
        ConfigError: the file cannot be read, holds what is not supported, or its folder cannot be written.
    """
    folder = file.with_name(file.name + ".hf")
    stamp = file.stat()
    known = _record(folder)
    same = {"format": _FORMAT, "bytes": stamp.st_size}
    if same.items() <= known.items() and known.get("mtime_ns") == stamp.st_mtime_ns:
        return folder
    with Progress(f"hash {file.name}"):
        sha256 = hash_file(file)
    record = same | {"file": file.name, "mtime_ns": stamp.st_mtime_ns, "sha256": sha256}
    if same.items() <= known.items() and known.get("sha256") == sha256:  # copied, or touched
        return folder
    try:
        _convert(file, folder, record, field)
    except OSError as error:
        raise ConfigError(
            f"{field} '{file}' cannot be converted into '{folder}': {one_line(str(error))}; put the file where that "
            "folder can be written"
        ) from None
    return folder


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _convert(file: Path, folder: Path, record: dict[str, Any], field: str) -> None:
    from gguf import GGUFReader

    where = f"{field} '{file}'"
    try:
        reader: Any = GGUFReader(file)
        header = {name: value.contents() for name, value in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is no GGUF file that can be read: {one_line(str(error))}; fetch it again") from None
    sizes, config = _model_config(header, reader.tensors, where)
    from moray.models.gguf_tokenizer import save_tokenizer

    made = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=file.parent))
    try:
        with Progress(f"convert {file.name}", total=len(reader.tensors), unit="tensors") as progress:
            _save_weights(reader.tensors, sizes, made, where, progress.advance)
        _write_json(made / "config.json", config)
        special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        _write_json(made / "generation_config.json", special)
        save_tokenizer(file, header, made, where)
        license_name = header.get("general.license")
        _write_json(made / RECORD, record | {"license": license_name, "name": header.get("general.name")})
        made.chmod(0o755)  # other users may read what is no secret
        for path in made.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:  # another process was as fast
            if _record(folder).get("sha256") != record["sha256"]:
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _model_config(header: Mapping[str, Any], tensors: list[Any], where: str) -> tuple[_Sizes, dict[str, Any]]:
    """transformers' config.json of what the header describes."""
    architecture = str(header.get("general.architecture"))
    families = gguf_architectures()
    if architecture not in families:
        raise ConfigError(f"{where} is of the architecture '{architecture}'; supported are {', '.join(families)}")
    given = {
        name.removeprefix(f"{architecture}."): value
        for name, value in header.items()
        if name.startswith(f"{architecture}.")
    }
    for name in sorted(given.keys() - _KNOWN):
        if given[name]:
            raise ConfigError(f"{where} has {architecture}.{name} = {given[name]!r:.60}, which is not supported")
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors}

    def need(name: str) -> Any:
        if name not in given:
            raise ConfigError(
                f"{where} has no {architecture}.{name}, without which a model cannot be made; fetch it again"
            )
        return given[name]

    if "token_embd.weight" not in shapes:
        raise ConfigError(f"{where}: tensor 'token_embd.weight' is missing; fetch it again")
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(given.get("attention.key_length", hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if int(given.get(name, head_dim)) != head_dim:
            raise ConfigError(
                f"{where} has {architecture}.{name} = {given[name]}; supported is {head_dim}, the width of a head"
            )
    sizes = _Sizes(families[architecture], heads, int(given.get("attention.head_count_kv", heads)), head_dim)
    rope = {"rope_theta": float(given.get("rope.freq_base", 10_000.0))} | _rope_scaling(given, tensors, sizes, where)
    config: dict[str, Any] = {
        "architectures": [FAMILIES[sizes.family].causal_lm],
        "model_type": sizes.family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),  # 1e-05, not 9.99...e-06
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    if not FAMILIES[sizes.family].has_fixed_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    for name, ours in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if (value := header.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[ours] = int(value)
    named = (header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = sorted({int(value) for value in named if value is not None})
    if len(ends) > 1:
        config["eos_token_id"] = ends
    return sizes, config


def _rope_scaling(given: Mapping[str, Any], tensors: list[Any], sizes: _Sizes, where: str) -> dict[str, Any]:
    """Kind of the rotary embedding and its parameters."""
    frequencies = next((tensor.data for tensor in tensors if tensor.name == _ROPE_FREQUENCIES), None)
    kind = str(given.get("rope.scaling.type", "none"))
    original = given.get("rope.scaling.original_context_length")
    if frequencies is not None and kind == "none":
        return _llama3(np.asarray(frequencies, np.float32), float(given["rope.freq_base"]), sizes.head_dim, where)
    if frequencies is None and kind == "none":
        return {"rope_type": "default"}
    if frequencies is None and kind in ("linear", "yarn") and "rope.scaling.factor" in given:
        more = {} if original is None or kind == "linear" else {"original_max_position_embeddings": int(original)}
        return {"rope_type": kind, "factor": float(given["rope.scaling.factor"])} | more
    raise ConfigError(
        f"{where} has the rotary scaling '{kind}'{' with factors of its own' if frequencies is not None else ''}; "
        "supported are none, linear, yarn and Llama 3's"
    )


def _llama3(found: np.ndarray, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Llama 3's parameters, of which the file keeps the outcome: a factor of every frequency.

    A wavelength above 8192 is stretched by `factor`, one below 2048 is left, and between the two the share changes in
    proportion to the frequency (the published `llama3` scaling).
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for factor in _LLAMA3_FACTORS:
        share = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0, 1)
        if found.shape == share.shape and np.allclose(found, 1 / ((1 - share) / factor + share), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise ConfigError(f"{where} has factors of its rotary frequencies that are none of Llama 3's; not supported")


def _save_weights(tensors: list[Any], sizes: _Sizes, folder: Path, where: str, advance: Callable[[int], None]) -> None:
    """Dequantise tensor by tensor into shards of at most 2 GiB, or one tensor."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}

    def flush() -> None:
        if waiting:
            save_file(waiting, folder / f"model-{len(shards):05d}.safetensors", metadata={"format": "pt"})
            shards.append(list(waiting))
            waiting.clear()

    for name, values in _weights(tensors, sizes, where):
        if waiting and sum(one.nbytes for one in waiting.values()) + values.nbytes > _SHARD_BYTES:
            flush()
        waiting[name] = values
        advance(1)
    flush()
    if len(shards) == 1:
        (folder / "model-00000.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {name: f"model-{number:05d}.safetensors" for number, names in enumerate(shards) for name in names}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _weights(tensors: list[Any], sizes: _Sizes, where: str) -> Iterator[tuple[str, np.ndarray]]:
    """transformers' names, and values in float32 (float16 where the file has that)."""
    from gguf import dequantize

    for tensor in tensors:
        if tensor.name == _ROPE_FREQUENCIES:
            continue
        name = _name(tensor.name, where)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"{where}: tensor '{tensor.name}' is stored as {tensor.tensor_type.name}, which cannot be dequantised: "
                f"{one_line(str(error))}"
            ) from None
        heads = {"q_proj": sizes.num_heads, "k_proj": sizes.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None and FAMILIES[sizes.family].gguf_rotates_neighbours:
            values = _halves(values, heads)
        yield name, np.ascontiguousarray(values)


def _name(name: str, where: str) -> str:
    """transformers' name of a tensor."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTER and parts[1] == "weight":
        return f"{OUTER[parts[0]]}.weight"
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in PARTS:
        return f"model.layers.{parts[1]}.{PARTS[parts[2]]}.{parts[3]}"
    raise ConfigError(f"{where}: tensor '{name}' has no place in a model of this family")


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as transformers rotates them: the first half of a head against the second.

    See `Family.gguf_rotates_neighbours`.
    """
    rows = values.shape[0] // heads
    return values.reshape(heads, rows // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
