"""Tiny real targets, drafters of every kind, and drafters that are right as often as a test wants."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.decoding.costs import Costs
from moray.decoding.params import SamplingParams
from moray.decoding.speculate import PlainDecoder, SpeculativeDecoder
from moray.decoding.stats import Generation
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, MuonConfig, TrainConfig
from moray.distill.loop import Progress, Span, train
from moray.distill.optim import Optimiser
from moray.drafters.base import Drafter, DraftOutput, DraftView, Memory
from moray.drafters.configs import (
    BlockConfig,
    DrafterConfig,
    DrafterConfigBase,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    MedusaConfig,
    MoAConfig,
    NgramConfig,
    PretrainedConfig,
)
from moray.targets.demo_data import CHAT_TEMPLATE, SPECIAL_TOKENS
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape, AnyShape, ChainShape, DynamicShape, FixedShape
from moray.trees.tree import PrefixMask

VOCABULARY = 97
MAX_POSITIONS = 512
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "seed": 1},
    "qwen2": {"family": "qwen2"},  # biases in q, k and v
    "qwen3": {"family": "qwen3"},  # norms on q and k
    "tied": {"family": "llama", "tie_word_embeddings": True},
}
SHAPES = {
    "chain": ChainShape(type="chain", depth=4),
    "fixed": FixedShape(type="fixed", branching=(3, 2, 1)),
    "dynamic": DynamicShape(type="dynamic", depth=4, breadth=3, nodes=14),
}
ADAPTIVE = {
    "adaptive chain": AdaptiveShape(type="adaptive", depth=4),
    "adaptive tree": AdaptiveShape(type="adaptive", depth=4, breadth=3, nodes=14),
}

_ATTENTION = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96)
_LAYERS = BlockConfig(num_heads=2, num_kv_heads=1, intermediate_size=48)
DRAFTERS: dict[str, list[DrafterConfigBase]] = {
    "moa": [
        MoAConfig(
            type="moa",
            target_layers=layers,
            mask_width=(4, 7),
            layer_self_attention=_LAYERS,
            self_attention=_ATTENTION,
            cross_attention=_ATTENTION,
        )
        for layers in (0, 1, 2)
    ],
    "eagle": [
        EagleConfig(type="eagle", layer=_ATTENTION),
        EagleConfig(type="eagle", layer=_ATTENTION, draft_vocab_size=60),
    ],
    "glide": [GlideConfig(type="glide", layer=_ATTENTION, num_cross_heads=4)],
    "medusa": [
        MedusaConfig(type="medusa", num_heads=6, draft_vocab_size=90),
        MedusaConfig(type="medusa", num_heads=6, num_blocks=2, projections="frozen"),
    ],
    "independent": [
        IndependentConfig(type="independent", num_layers=2, hidden_size=48, head_dim=16, layer=_ATTENTION),
        IndependentConfig(
            type="independent", hidden_size=64, head_dim=16, layer=_ATTENTION, embeddings="copied", draft_vocab_size=90
        ),
        IndependentConfig(type="independent", hidden_size=64, head_dim=16, layer=_ATTENTION, embeddings="frozen"),
    ],
    "pretrained": [PretrainedConfig(type="pretrained", model="made by build()")],
    "ngram": [NgramConfig(type="ngram", max_ngram=3)],
}
"""Small configurations of every member of the union: each of them must keep the whole contract."""

VARIANTS = {f"{kind}-{index}": config for kind, configs in DRAFTERS.items() for index, config in enumerate(configs)}
UNTRAINED = ("pretrained", "ngram")
TRAINED = [name for name in VARIANTS if not name.startswith(UNTRAINED)]
T_STEP = [name for name in VARIANTS if VARIANTS[name].verified_period is not None]
"""Variants whose cross-attention is trained with the T-step mask."""


def union_members() -> set[str]:
    """The `type` of every member of the drafter union, however many there are."""

    def classes(annotation: Any) -> list[Any]:
        inner = get_args(annotation)
        return [annotation] if isinstance(annotation, type) else [c for part in inner for c in classes(part)]

    members = [c for c in classes(DrafterConfig) if isinstance(c, type) and issubclass(c, DrafterConfigBase)]
    return {get_args(member.model_fields["type"].annotation)[0] for member in members}


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

    @property
    def config(self) -> TargetConfig:
        return TargetConfig(model=str(self.folder), device="cpu")

    def prompt(self, seed: int = 0, length: int = 9) -> list[int]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(self.target.spec.vocab_size, (length,), generator=generator).tolist()

    def hugging_face(self, prompt: list[int], max_new_tokens: int, eos_ids: list[int] | None = None) -> list[int]:
        """What `generate` of transformers gives, greedily; a model of its own, with the stock attention."""
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
    return TinyTarget(name, folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


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


def taps_of(target: Target, tokens: Tensor, needs: TapNeeds) -> Taps:
    """Taps of whole sequences [batch, seq] by one forward pass."""
    batch, seq = tokens.shape
    cache = target.new_cache(seq, batch)
    mask = torch.ones(seq, seq, dtype=torch.bool).tril()[None, None]
    positions = torch.arange(seq).expand(batch, seq)
    output = target.forward(tokens, positions, mask, cache, needs.hidden_depths)
    cache.commit(seq)
    kv = cache.flat(0, seq)[:, :, list(needs.kv_layers)].clone() if needs.kv_layers else None
    return Taps(kv, {depth: hidden.clone() for depth, hidden in output.hidden.items()})


def batch_of(target: Target, sequences: list[list[int]], prompt_length: int, needs: TapNeeds) -> TrainBatch:
    """Padded chats with their taps; everything after the first `prompt_length` tokens is the response."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    response = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        response[row, prompt_length : len(sequence)] = True
    return TrainBatch(tokens, response, torch.tensor([len(s) for s in sequences]), taps_of(target, tokens, needs))


def build(tiny: TinyTarget, config: DrafterConfigBase, seed: int = 0) -> Drafter:
    """A random drafter that shares the target's head; a pretrained one is the target with noise on its weights."""
    if isinstance(config, PretrainedConfig):
        config = config.model_copy(update={"model": str(noisy_copy(tiny))})
    torch.manual_seed(seed)
    drafter = config.build(TargetHead.of(tiny.target, config.num_target_layers))
    text = torch.tensor([tiny.prompt(length=32)])
    sample = taps_of(tiny.target, text, drafter.needs)
    drafter.set_scale({depth: float(hidden.square().mean().sqrt()) for depth, hidden in sample.hidden.items()})
    learnt = torch.tensor(tiny.hugging_face(tiny.prompt(), 40))  # what the tests teach drafters
    drafter.choose_vocabulary(torch.bincount(learnt, minlength=tiny.target.spec.vocab_size))
    return drafter.eval()


def noisy_copy(tiny: TinyTarget, noise: float = 0.1) -> Path:
    """The folder of a model like the target, which it is often but not always right about."""
    folder = tiny.folder.with_name(f"{tiny.folder.name}-noisy")
    if not folder.is_dir():
        model = AutoModelForCausalLM.from_pretrained(tiny.folder)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def losses_for(drafter: Drafter) -> LossConfig:
    """Losses that the drafter can be trained with."""
    return LossConfig(feature=float(drafter.config.predicts_features), kl=1.0)


def overfit(tiny: TinyTarget, drafter: Drafter, sequence: list[int], prompt_length: int, steps: int = 35) -> Drafter:
    """Distil until the drafter knows this sequence nearly by heart; what cannot be trained stays as it is."""
    if drafter.num_parameters == 0:
        return drafter
    batch = batch_of(tiny.target, [sequence] * 3, prompt_length, drafter.needs)
    muon = MuonConfig(type="muon", lr=0.02)
    is_medusa = isinstance(drafter.config, MedusaConfig)  # whose heads are no matrices
    optim = AdamWConfig(type="adamw", lr=3e-3, betas=(0.9, 0.95)) if is_medusa else muon
    optimiser = Optimiser(drafter, optim, LinearSchedule(type="linear", warmup_steps=5, final=0.1))
    span = Span(first=Progress(), total_steps=steps, steps_per_epoch=steps, epochs=1)
    config = TrainConfig(log_steps=steps, checkpoint_steps=steps)
    train(drafter, optimiser, [batch] * steps, span, losses_for(drafter), config, lambda *_: None, lambda _: None)
    return drafter


class MoodyCosts(Costs):
    """Costs that change at every look, whatever was accepted: so that depths and sizes do, down to no draft."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__([(1, 1.0)], [(1, 1.0)])
        object.__setattr__(self, "_random", random.Random(seed))

    def verify_seconds(self, num_tokens: int) -> float:
        seconds = 10 ** self._random.uniform(-1, 1)  # type: ignore[attr-defined]
        return seconds / 3 if num_tokens == 1 else seconds

    def draft_seconds(self, num_levels: int) -> float:
        return 0.0


@dataclass
class RehearsedState:
    """The drafter's own cache of the whole target, and the mask over it."""

    cache: KVCache
    mask: PrefixMask
    num_expanded: int = 0


class Rehearsed(Drafter[RehearsedState]):
    """The target itself as a drafter: right always, or with `noise` on its logits as often as wanted."""

    def __init__(self, target: Target, noise: float = 0.0) -> None:
        super().__init__(DrafterConfigBase(), TargetHead.of(target))
        self._target = target
        self._noise = noise

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds()

    def observe(self, taps: Taps) -> Memory:
        return {}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        raise NotImplementedError("never trained")

    def new_state(self, capacity: int, max_expanded: int) -> RehearsedState:
        slots = capacity + max_expanded
        mask = PrefixMask(max(capacity, max_expanded), slots + capacity, self._target.model.lm_head.weight)
        return RehearsedState(self._target.new_cache(slots), mask)

    def reset(self, state: RehearsedState) -> None:
        state.cache.reset()
        state.mask.reset()

    def extend(self, state: RehearsedState, tokens: Tensor, memory: Memory, num_kept: int = 0) -> None:
        new = tokens.shape[0]
        state.cache.length = state.mask.length
        self._pass(state, tokens, torch.ones(new, new, dtype=torch.bool).tril(), state.cache.length + torch.arange(new))
        state.cache.commit(new)
        state.mask.commit(new)

    def step(self, state: RehearsedState, tokens: Tensor, ancestors: Tensor | None, depth: int) -> Tensor:
        if depth == 0:
            state.num_expanded = 0
        committed, new = state.mask.length, tokens.shape[0]
        if ancestors is None:
            ancestors = torch.ones(new, state.num_expanded + new, dtype=torch.bool)
        state.cache.length = committed + state.num_expanded
        hidden = self._pass(state, tokens, ancestors, torch.full((new,), committed + depth))
        state.num_expanded += new
        logits = self._target.logits(hidden)
        generator = torch.Generator().manual_seed(committed + depth)
        return logits + self._noise * torch.randn(logits.shape[1], generator=generator)

    def _pass(self, state: RehearsedState, tokens: Tensor, block: Tensor, positions: Tensor) -> Tensor:
        return self._target.forward(tokens[None], positions[None], state.mask.view(block), state.cache).last[0]


def plainly(tiny: TinyTarget, prompt: list[int], params: SamplingParams, count: int, eos: tuple[int, ...] = ()) -> list:
    """What the target alone generates; remembered."""
    key = (tuple(prompt), params, count, eos)
    if key not in tiny.known:
        tiny.known[key] = PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, params, count, eos).tokens
    return tiny.known[key]


def speculate(
    tiny: TinyTarget,
    drafter: Drafter,
    shape: AnyShape,
    prompt: list[int],
    params: SamplingParams,
    count: int,
    eos: tuple[int, ...] = (),
) -> Generation:
    """One generation by a new decoder with a long context."""
    return SpeculativeDecoder(tiny.target, drafter, shape, MAX_POSITIONS).generate(prompt, params, count, eos)


def is_lossless(
    tiny: TinyTarget,
    drafter: Drafter,
    shape: AnyShape,
    params: SamplingParams,
    prompts: list[list[int]],
    count: int = 40,
) -> bool:
    """Whether one decoder gives the target's own tokens for every prompt in turn."""
    decoder = SpeculativeDecoder(tiny.target, drafter, shape, MAX_POSITIONS)
    return all(
        decoder.generate(prompt, params, count, ()).tokens == plainly(tiny, prompt, params, count) for prompt in prompts
    )
