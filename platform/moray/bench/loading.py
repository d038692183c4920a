"""From what a configuration names to drafters that decode."""

from pathlib import Path

from moray.distill.checkpoint import load_drafter, read_drafter_config
from moray.drafters.base import Drafter
from moray.drafters.configs import DrafterConfig, PretrainedConfig, TrainedConfig
from moray.errors import ConfigError, MismatchError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.text import ChatTokenizer


def load_drafters(
    entries: tuple[str | DrafterConfig, ...], target: Target, tokenizer: ChatTokenizer
) -> dict[str, Drafter]:
    """Drafters for one target, in the order given, by the names of their folders, models or types.

    Raises:
        ConfigError: two have the same name, or one would have to be trained first.
        MismatchError: a drafter belongs to another target, tokenizer or template.
    """
    drafters: dict[str, Drafter] = {}
    for entry in entries:
        name = _name(entry)
        if name in drafters:
            raise ConfigError(f"drafters holds two called '{name}'; rename a folder, it is the row's name")
        drafter = (
            _from_folder(Path(entry), target, tokenizer)
            if isinstance(entry, str)
            else _from_config(entry, target, tokenizer)
        )
        drafter.cast(target.dtype)
        drafters[name] = drafter
    return drafters


def _name(entry: str | DrafterConfig) -> str:
    if isinstance(entry, PretrainedConfig):
        return Path(entry.model).name
    return Path(entry).name if isinstance(entry, str) else entry.type


def _from_folder(folder: Path, target: Target, tokenizer: ChatTokenizer) -> Drafter:
    num_layers = read_drafter_config(folder)[0].num_target_layers
    return load_drafter(folder, TargetHead.of(target, num_layers), tokenizer.fingerprint)


def _from_config(config: DrafterConfig, target: Target, tokenizer: ChatTokenizer) -> Drafter:
    if isinstance(config, TrainedConfig):
        raise ConfigError(
            f"drafters holds the sizes of a drafter of type '{config.type}', which must be trained: name the folder "
            "that pipelines.distill wrote"
        )
    if isinstance(config, PretrainedConfig):
        vocabulary = ChatTokenizer.load(config.model, "plain").tokenizer.get_vocab()
        ours = tokenizer.tokenizer.get_vocab()
        if vocabulary != ours:
            strange = next(iter(sorted(set(vocabulary.items()) ^ set(ours.items()))))
            raise MismatchError(
                f"drafter.model '{config.model}' has another vocabulary than the target, first at {strange}: a model "
                "with the target's tokenizer is needed"
            )
    return config.build(TargetHead.of(target)).eval()
