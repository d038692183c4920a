"""Tiny real targets of every supported family, made and saved to disk in no time."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moray.targets.demo.data import CHAT_TEMPLATE, SPECIAL_TOKENS
from moray.targets.model import Target
from moray.targets.sparse.routing import Router, build_routers, save_routers
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import RoutingSpec, TargetConfig, read_spec

DEVICE: Any = os.environ.get("MORAY_TEST_DEVICE", "cpu")
"""Where the targets of the contract tests run: cpu, or cuda."""
VOCABULARY = 97
MAX_POSITIONS = 512
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "seed": 1},
    "qwen2": {"family": "qwen2"},  # biases in q, k and v
    "qwen3": {"family": "qwen3"},  # norms on q and k
    "tied": {"family": "llama", "tie_word_embeddings": True},
}


def save_target(folder: Path, family: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """A random target on disk whose biases and norms are random too, so that leaving one out shows."""
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **defaults | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class TinyTarget:
    """A loaded target, where it lies, and some prompts for it."""

    name: str
    folder: Path
    target: Target
    known: dict[Any, list[int]] = field(default_factory=dict)
    """Answers that plain decoding has given already."""
    stock: dict[str, Any] = field(default_factory=dict)
    """The same weights in an unmodified model that our code never touches."""
    generated: dict[Any, list[int]] = field(default_factory=dict)
    """Answers that the unmodified model has given already."""

    @property
    def config(self) -> TargetConfig:
        return TargetConfig(model=str(self.folder), device=DEVICE)

    def prompt(self, seed: int = 0, length: int = 9) -> list[int]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(self.target.spec.vocab_size, (length,), generator=generator).tolist()

    def hugging_face(self, prompt: list[int], max_new_tokens: int, eos_ids: list[int] | None = None) -> list[int]:
        """What `generate` of transformers gives, greedily; a model of its own, with the stock attention."""
        key = (tuple(prompt), max_new_tokens, tuple(eos_ids or ()))
        if key not in self.generated:
            self.generated[key] = self._generate(prompt, max_new_tokens, eos_ids)
        return self.generated[key]

    def _generate(self, prompt: list[int], max_new_tokens: int, eos_ids: list[int] | None) -> list[int]:
        tokens = torch.tensor([prompt])
        if self.name not in self.stock:
            self.stock[self.name] = AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager")
        output = self.stock[self.name].generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos_ids,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()


def load_target(folder: Path, name: str = "llama", **sizes: Any) -> TinyTarget:
    """Save a target and load it as users do."""
    options = dict(TARGETS[name])
    save_target(folder, options.pop("family"), **options | sizes)
    return TinyTarget(name, folder, Target.load(TargetConfig(model=str(folder), device=DEVICE)))


def make_sparse(folder: Path, seed: int = 0, num_bits: int | None = None, last_layers: int = 0) -> Path:
    """Give a saved target random routers, each of which lets half of the tokens run that reach it."""
    routing = RoutingSpec(first_layer=1, last_layers=last_layers, router_size=16, router_bits=num_bits, share=0.5)
    torch.manual_seed(seed)
    routers = build_routers(read_spec(str(folder)), routing)
    text, positions = torch.randint(VOCABULARY, (1, 256)), torch.arange(256)[None]
    for router in routers.values():
        assert isinstance(router, Router)
        router.inner.weight.data.mul_(8 if num_bits is None else 1)
        router.outer.weight.data.mul_(20)
    for layer, router in routers.items():  # the first layers first, for the others see what they let through
        assert isinstance(router, Router)
        save_routers(folder, routers, routing)
        target = Target.load(TargetConfig(model=str(folder), device=DEVICE), packs=False)
        assert isinstance(target, SparseTarget)
        read: list[torch.Tensor] = []
        loaded = target.routers[int(layer)]
        margin = loaded.margin
        loaded.margin = lambda x, read=read, margin=margin: (read.append(x[0]), margin(x))[1]
        target.forward(text.to(DEVICE), positions.to(DEVICE), None, target.new_cache(256))
        router.outer.bias.data[1] -= margin(read[0]).median().item()
    save_routers(folder, routers, routing)
    return folder


def load_sparse_target(folder: Path, num_bits: int | None = None, last_layers: int = 0, **sizes: Any) -> TinyTarget:
    """A random target of four layers with random routers, loaded as users do."""
    save_target(folder, **sizes)
    make_sparse(folder, num_bits=num_bits, last_layers=last_layers)
    return TinyTarget("sparse", folder, Target.load(TargetConfig(model=str(folder), device=DEVICE)))


def save_chat_target(folder: Path, seed: int = 0) -> Path:
    """A random Llama of three layers with a byte-level tokenizer and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
