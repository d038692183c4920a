"""Whether drafters can draft the application's tree, found out before a replica starts."""

from moray.decoding.planning.fitting import fit_shape
from moray.drafters.checkpoint import read_contract
from moray.drafters.configs import TrainedConfig
from moray.drafters.loading import folder_of
from serve.config import ServeConfig


def check_trees(config: ServeConfig) -> None:
    """Refuse a tree that is too deep for a drafter.

    Of trained drafters whose folders are not on this machine nothing is known here: their replicas check the same.

    Raises:
        ConfigError: naming the tree, its depth, the drafter and its most levels.
    """
    for name, entry in config.drafters.items():
        if not isinstance(entry, str | TrainedConfig):
            fit_shape(config.engine.tree, name, entry.max_depth)
        elif folder_of(entry).is_dir():
            fit_shape(config.engine.tree, name, read_contract(folder_of(entry)).drafter.max_depth)
