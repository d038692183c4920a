"""Small drafters of every kind: configured, built, and taught a text by heart."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from one_step import as_data_shard
from tiny_batches import batch_of, taps_of
from tiny_targets import TinyTarget
from transformers import AutoModelForCausalLM

from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, MuonConfig, TrainConfig
from moray.distill.loop import Progress, Span, train
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.drafters.base import Drafter
from moray.drafters.config_base import BlockConfig, DrafterConfigBase
from moray.drafters.configs import (
    DrafterConfig,
    DynamicMoAConfig,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    MedusaConfig,
    MoAConfig,
    NgramConfig,
    PretrainedConfig,
)
from moray.targets.head import TargetHead

_ATTENTION = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96)
_LAYERS = BlockConfig(num_heads=2, num_kv_heads=1, intermediate_size=48)
DRAFTERS: dict[str, list[DrafterConfigBase]] = {
    "moa": [
        MoAConfig(
            type="moa",
            target_layers=layers,
            mask_width=(4, 7),
            layer_stride=stride,
            layer_self_attention=_LAYERS,
            self_attention=_ATTENTION,
            cross_attention=_ATTENTION,
        )
        for layers, stride in ((0, 1), (1, 1), (2, 2))
    ],
    "dynamic-moa": [
        DynamicMoAConfig(
            type="dynamic-moa",
            target_layers=layers,
            mask_width=(4, 7),
            layer_self_attention=_LAYERS,
            self_attention=_ATTENTION,
            cross_attention=_ATTENTION,
        )
        for layers in ((0, 1, 2), (1, 2))
    ],
    "eagle": [
        EagleConfig(type="eagle", layer=_ATTENTION),
        EagleConfig(
            type="eagle",
            layer=_ATTENTION,
            draft_vocab_size=60,
            ttt_steps=3,
            bias=False,
            reads_first_token=False,
        ),
    ],
    "eagle3": [Eagle3Config(type="eagle3", layer=_ATTENTION, draft_vocab_size=90, ttt_steps=3)],
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
SEVERAL_LAYER_COUNTS = [name for name in VARIANTS if len(VARIANTS[name].layer_counts) > 1]


def union_members() -> set[str]:
    """The `type` of every member of the drafter union, however many there are."""

    def classes(annotation: Any) -> list[Any]:
        inner = get_args(annotation)
        return [annotation] if isinstance(annotation, type) else [c for part in inner for c in classes(part)]

    members = [c for c in classes(DrafterConfig) if isinstance(c, type) and issubclass(c, DrafterConfigBase)]
    return {get_args(member.model_fields["type"].annotation)[0] for member in members}


def build(tiny: TinyTarget, config: DrafterConfigBase, seed: int = 0) -> Drafter:
    """A random drafter that shares the target's head; a pretrained one is the target with noise on its weights."""
    if isinstance(config, PretrainedConfig):
        config = config.model_copy(update={"model": str(noisy_copy(tiny))})
    torch.manual_seed(seed)
    drafter = config.build(TargetHead.of(tiny.target, config.num_target_layers)).to(tiny.target.device)
    text = torch.tensor([tiny.prompt(length=32)], device=tiny.target.device)
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
    """Distill until the drafter knows this sequence nearly by heart; what cannot be trained stays as it is."""
    if drafter.num_parameters == 0:
        return drafter
    batch = batch_of(tiny.target, [sequence] * 3, prompt_length, drafter.needs)
    muon = MuonConfig(type="muon", lr=0.02)
    is_medusa = isinstance(drafter.config, MedusaConfig)  # whose heads are no matrices
    optim = AdamWConfig(type="adamw", lr=3e-3, betas=(0.9, 0.95)) if is_medusa else muon
    optimiser = Optimiser(drafter, optim, LinearSchedule(type="linear", warmup_steps=5, min_lr_ratio=0.1))
    span = Span(first=Progress(), total_steps=steps, steps_per_epoch=steps, epochs=1)
    config = TrainConfig(logging_steps=steps, save_steps=steps)
    losses = losses_for(drafter)
    replicas = Replicas(drafter, optimiser, losses, config)
    updates = ([as_data_shard(batch)] for _ in range(steps))
    train(replicas, updates, span, losses, config, lambda *_: None, lambda _: None)
    return drafter


def taught_by(tiny: TinyTarget, sequence: list[int], prompt_length: int) -> Callable[[str], Drafter]:
    """taught_by(...)(variant): a drafter that has been overfitted on a text, once however often it is asked for."""

    @cache
    def make(variant: str) -> Drafter:
        return overfit(tiny, build(tiny, VARIANTS[variant]), sequence, prompt_length)

    return make
