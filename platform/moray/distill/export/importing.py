"""Makes a drafter of ours from one that others have published."""

import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError

from moray.distill.export.config import ImportDrafterConfig
from moray.drafters.checkpoint import save_drafter
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.published.folders import read_published
from moray.errors import DataError
from moray.explain import one_line
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer


def import_drafter(config: ImportDrafterConfig) -> DrafterConfigBase:
    """Write the drafter's folder; returns its configuration.

    Raises:
        ConfigError: the source belongs to a target of other sizes.
        DataError: the source is no known drafter or damaged, or `output` exists.
    """
    output = Path(config.output)
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise DataError(f"output '{output}' exists; name another folder, or remove it")
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    head = TargetHead.load(config.target.model_copy(update={"device": "cpu"}), config.target_layers or 0)
    drafter = read_published(Path(config.source), head, config.target_layers)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_drafter(temporary, drafter, tokenizer.fingerprint)
        temporary.replace(output)
    except (OSError, SafetensorError) as error:
        raise DataError(f"output '{output}' cannot be written: {one_line(str(error))}; name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return drafter.config
