"""Turns a finished run of pipelines.sparsify into a target."""

from itertools import islice
from pathlib import Path

from moray.activations.format.store import CacheStore
from moray.activations.reading.chats import chat_tokens
from moray.cluster.training.configs import SparsifyConfig
from moray.distill.sparse.learner import SparseLearner
from moray.distill.sparse.merge import write_sparse_target
from moray.drafters.checkpoint import load_weights
from moray.progress import Progress
from moray.targets.head import TargetHead


def write_target(config: SparsifyConfig) -> None:
    """Write the sparse target into the run's folder.

    Raises:
        DataError: the run's weights are damaged.
    """
    folder = Path(config.output)
    learner = SparseLearner(config.sparse, TargetHead.load(config.target, config.num_head_layers))
    load_weights(folder, learner)
    chats = list(islice(chat_tokens(CacheStore(config.activations)), config.sparse.calibration_chats))
    with Progress("write the sparse target"):
        write_sparse_target(folder, config.target, config.sparse, learner, chats)
