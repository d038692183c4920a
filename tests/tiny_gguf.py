"""GGUF files of tiny models, written with llama.cpp's own library from a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = ["It was 1984, or 2026; it's the 3rd time.", "def f(x):\n\n    return x + 12345", "the cat sat on the mat"] * 3


def small_tokenizer(num_tokens: int) -> Tokenizer:
    """A byte-level BPE of exactly so many tokens that sets digits apart, as SmolLM2's does."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() == num_tokens
    return tokenizer


def write_gguf(
    file: Path,
    folder: Path,
    tokenizer: Tokenizer,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    left_out: tuple[str, ...] = (),
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does.

    Args:
        file: to write.
        folder: config.json and weights.
        tokenizer: of the file.
        fields: more keys of the header, or other values.
        tensors: more tensors, by their names in the file.
        left_out: names of tensors in the file that are not written.
        kind: how projections and embeddings are quantised; None for float32.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    name = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(file, name)
    header = {
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "general.license": "mit",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | (fields or {})
    for key, value in header.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    _add_tokenizer(writer, tokenizer, header)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for ours, values in (load_file(folder / "model.safetensors")).items():
        theirs = _name(ours)
        if theirs in left_out:
            continue
        part = ours.split(".")[-2]
        if name == "llama" and part in heads:
            values = _neighbours(values, heads[part])
        if kind is not None and values.ndim == 2:
            writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, values)
    for theirs, values in (tensors or {}).items():
        writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, header: dict[str, Any]) -> None:
    described = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    if "tokenizer.ggml.model" not in header:
        writer.add_tokenizer_model("gpt2")
    if "tokenizer.ggml.pre" not in header:
        writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
    writer.add_chat_template(TEMPLATE)


def _name(ours: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    outer, _, kind = ours.rpartition(".")
    if outer in OUTER:
        return f"{OUTER[outer]}.{kind}"
    _, _, layer, part = outer.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def _neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: pairs side by side, where transformers has the halves of a head."""
    rows = values.shape[0] // heads
    paired = values.reshape(heads, 2, rows // 2, *values.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(paired.reshape(values.shape))
