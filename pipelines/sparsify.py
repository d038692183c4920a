"""Make a target sparse: train routers that let each token run through some of its layers, on Ray Train.

    python -m pipelines.sparsify configs/targets/demo.yaml configs/sparse/demo.yaml

The chats' activations of the dense target are cached first (pipelines.cache_activations, with hidden depth -1). The
output is an ordinary model folder with routers beside it, which every other command takes as `target.model`. After a
kill, the same command resumes from the last checkpoint.

A predictor lets the later layers verify only the nodes of a draft that are likely to be accepted (`select`, SpaDec). It
is trained last, with a drafter that was trained for the sparse target, and is written into the target's folder:

    python -m pipelines.sparsify predictor configs/sparse/predictor-smollm2.yaml
"""

import sys

from moray.bench.recording import reported
from moray.bench.sparse.configs import PredictorConfig
from moray.cluster.training.configs import SparsifyConfig
from moray.commands import Command, run_commands


def main(config: SparsifyConfig) -> None:
    """Train routers that let each token skip layers, or resume that, then write the sparse target."""
    from pathlib import Path

    from moray.cluster.session import ray_session
    from moray.cluster.training.resume import is_complete
    from moray.cluster.training.sparsify import write_target

    output = Path(config.output)
    if is_complete(config) and (output / "config.json").is_file():
        print(f"{config.output} is complete for this configuration: nothing to do")
        return
    if not is_complete(config):
        with ray_session(config.ray):
            from moray.cluster.training.distill import distill

            distill(config)
    write_target(config)
    print(f"sparse target: {config.output}")


def main_predictor(config: PredictorConfig) -> None:
    """Train the predictor of accepted nodes of a sparse target, from drafts of its own answers."""
    from moray.bench.sparse.predictor import train_predictor
    from moray.console import open_console

    def train() -> dict[str, object]:
        figures = train_predictor(config)
        open_console().print(
            f"predictor at layer {figures['layer']}: AUC {figures['auc']:.3f} on {figures['num_held_out']:,} held-out "
            f"nodes, of which {figures['share_accepted']:.0%} were accepted",
            highlight=False,
        )
        return figures

    reported(config.report, train)


CONFIG = SparsifyConfig
COMMANDS = {
    "": Command(SparsifyConfig, main),
    "predictor": Command(PredictorConfig, main_predictor),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
