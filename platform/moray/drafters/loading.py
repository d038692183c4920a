"""Builds the drafters that a configuration names, ready to decode in the target's precision."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moray.drafters.base import Drafter
from moray.drafters.checkpoint import drafter_files, load_drafter, read_contract
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.configs import PretrainedConfig, ReadyConfig, TrainedConfig, UsableConfig, drafter_name
from moray.errors import ConfigError, MismatchError
from moray.progress import Progress
from moray.provenance import sha256_of_files
from moray.targets.head import TargetHead
from moray.targets.loading import describe_nonfinite
from moray.targets.model import Target
from moray.targets.spec import fingerprint, resolve_folder
from moray.text import ChatTokenizer

_LOGGER = logging.getLogger(__name__)


def load_drafters(
    entries: tuple[str | UsableConfig, ...], target: Target, tokenizer: ChatTokenizer
) -> dict[str, Drafter]:
    """Load drafters for one target, in the order given, by the names of their folders or types.

    Raises:
        ConfigError: two have the same name, or one was not trained for the requested N.
        MismatchError: a drafter belongs to another target, tokenizer or template.
    """
    with Progress("load drafters"):
        return build_drafters(entries, lambda num_layers: TargetHead.of(target, num_layers), tokenizer)


def num_head_layers(entries: tuple[str | UsableConfig, ...]) -> int:
    """How many of the target's last layers the drafters run themselves: the maximum over all drafters."""
    folders = [folder_of(entry) for entry in entries if isinstance(entry, str | TrainedConfig)]
    return max((read_contract(folder).drafter.num_target_layers for folder in folders), default=0)


def build_drafters(
    entries: tuple[str | UsableConfig, ...], head_of: Callable[[int], TargetHead], tokenizer: ChatTokenizer
) -> dict[str, Drafter]:
    """Like `load_drafters`, but without the target itself: `head_of(n)` gives its head with its last n layers."""
    drafters: dict[str, Drafter] = {}
    for entry in entries:
        name = drafter_name(entry)
        if name in drafters:
            raise ConfigError(
                f"drafters holds two called '{name}', which is the row's name; rename a folder, or give `name` to one "
                "that stands there as {type: ...}"
            )
        if isinstance(entry, str | TrainedConfig):
            folder = folder_of(entry)
            head = head_of(read_contract(folder).drafter.num_target_layers)
            drafter = load_drafter(folder, head, tokenizer.fingerprint)
        else:
            head = head_of(0)
            drafter = _from_config(entry, head, tokenizer)
        if isinstance(entry, TrainedConfig) and entry.num_target_layers is not None:
            drafter.fix_num_target_layers(entry.num_target_layers)
        drafter.cast(head.weight.dtype)
        problem = describe_nonfinite(drafter.named_parameters())
        if problem:  # float16 ends at 65504
            raise ConfigError(
                f"target.dtype does not hold the weights of drafter '{name}', which is run in it: {problem}; use "
                "bfloat16 or float32"
            )
        chosen = drafter.pack()
        if chosen:
            _LOGGER.info("drafter %s: %s", name, chosen)
        drafters[name] = drafter
    return drafters


def build_untrained_drafter(config: DrafterConfigBase, target: Target, seed: int = 0) -> Drafter:
    """Build a drafter with random weights, packed, on the target's device and in its dtype, to time its cost.

    It seeds torch's global generator.
    """
    torch.manual_seed(seed)
    drafter = config.build(TargetHead.of(target, config.num_target_layers)).eval().to(target.device)
    drafter.cast(target.dtype)
    drafter.pack()
    return drafter


def fingerprints_of(entries: tuple[str | UsableConfig, ...]) -> dict[str, str]:
    """Hashes of the drafters' files, by name, to tell apart drafters with the same name."""
    found, field = {}, "drafter.model"
    for entry in entries:
        if isinstance(entry, str | TrainedConfig):
            found[drafter_name(entry)] = sha256_of_files(drafter_files(folder_of(entry)))
        elif isinstance(entry, PretrainedConfig):
            found[drafter_name(entry)] = fingerprint(resolve_folder(entry.model, field=field), field)
    return found


def folder_of(entry: str | TrainedConfig) -> Path:
    """The folder of a trained drafter."""
    return Path(entry if isinstance(entry, str) else entry.folder)


def _from_config(config: ReadyConfig, head: TargetHead, tokenizer: ChatTokenizer) -> Drafter:
    if isinstance(config, PretrainedConfig):
        theirs, ours = _ordinary_tokens(ChatTokenizer.load(config.model, "plain")), _ordinary_tokens(tokenizer)
        if theirs != ours:
            strange = min(theirs ^ ours)
            raise MismatchError(
                f"drafters holds model '{config.model}', whose vocabulary is not the target's, first at {strange}: a "
                "model with the target's tokenizer is needed"
            )
    return config.build(head).eval()


def _ordinary_tokens(tokenizer: ChatTokenizer) -> set[tuple[str, int]]:
    """Tokens and ids without added tokens, which models of one family may name differently."""
    added = tokenizer.tokenizer.get_added_vocab()
    return {(token, index) for token, index in tokenizer.tokenizer.get_vocab().items() if token not in added}
