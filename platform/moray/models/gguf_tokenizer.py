"""The tokenizer of a GGUF file, as a tokenizer.json that cuts text as the model's own tokenizer does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moray.errors import ConfigError
from moray.explain import one_line

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Kinds of tokenizer.ggml.pre that set every digit apart and split the rest as GPT-2 does."""
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "jina-es", "mpt", "olmo"})
"""Kinds that split as GPT-2 does, which is what transformers makes of a byte-level vocabulary."""


def save_tokenizer(file: Path, header: Mapping[str, Any], folder: Path, where: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        file: the GGUF file.
        header: its fields.
        folder: where to.
        where: field and file, for errors.

    Raises:
        ConfigError: there is no tokenizer, or it splits text in a way that is not known here.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    model, kind = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    known = _DIGITS_APART | _AS_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if model == "gpt2" and kind not in known:
        raise ConfigError(
            f"{where} has tokenizer.ggml.pre = {kind!r}, a way to split text that is not known here; known are "
            f"{', '.join(sorted(known))}"
        )
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"{where} has tokenizer.ggml.model = {model!r}; supported are 'gpt2' and 'llama'")
    try:
        architecture, described, settings = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(architecture, described)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} holds a tokenizer that cannot be read: {one_line(str(error))}") from None
    if kind in _DIGITS_APART:
        _split_digits(backend)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: settings[name] for name in names if settings.get(name) is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    if settings.get("chat_template"):
        tokenizer.chat_template = settings["chat_template"]
    tokenizer.save_pretrained(folder)
    num_tokens = len(described["tokens"])
    if len(tokenizer) != num_tokens:
        raise ConfigError(f"{where} describes {num_tokens} tokens, of which a tokenizer of {len(tokenizer)} was made")


def _split_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
