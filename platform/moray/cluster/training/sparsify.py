"""Turns a finished run of pipelines.sparsify into a target."""

from pathlib import Path

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
    with Progress("write the sparse target"):
        write_sparse_target(folder, config.target, config.sparse, learner)
