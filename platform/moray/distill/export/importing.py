"""Makes a drafter of ours from one that others have published."""

from pathlib import Path
from typing import Any

from moray.distill.export.config import ImportDrafterConfig
from moray.drafters.checkpoint import save_drafter
from moray.drafters.published.folders import read_published
from moray.errors import DataError
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer


def import_drafter(config: ImportDrafterConfig) -> Any:
    """Write the drafter's folder; returns its configuration.

    Raises:
        ConfigError: the source belongs to a target of other sizes.
        DataError: the source is no known drafter or damaged, or `output` exists.
    """
    output = Path(config.output)
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise DataError(f"output '{output}' exists; name another folder, or remove it")
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    head = TargetHead.load(config.target.model_copy(update={"device": "cpu"}))
    drafter = read_published(Path(config.source), head)
    save_drafter(output, drafter, tokenizer.fingerprint)
    return drafter.config
