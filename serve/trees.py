"""Checks before any replica starts that the drafters can draft the application's tree."""

from moray.decoding.planning.fitting import fit_shape
from moray.drafters.checkpoint import read_contract
from moray.drafters.configs import TrainedConfig
from moray.drafters.loading import folder_of
from serve.config import ServeConfig


def check_trees(config: ServeConfig) -> None:
    """Refuse a tree that is too deep for a drafter.

    Trained drafters whose folders are not on this machine are skipped here; their replicas make the same check.

    Raises:
        ConfigError: the tree is too deep; the message names the tree, the drafter and the maximum depth.
    """
    for name, entry in config.drafters.items():
        if not isinstance(entry, str | TrainedConfig):
            fit_shape(config.engine.tree, name, entry.max_depth)
        elif folder_of(entry).is_dir():
            fit_shape(config.engine.tree, name, read_contract(folder_of(entry)).drafter.max_depth)
