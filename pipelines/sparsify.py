"""Make a target sparse: train routers that let each token run through some of its layers, on Ray Train.

    python -m pipelines.sparsify configs/targets/demo.yaml configs/sparse/demo.yaml

The chats' activations of the dense target are cached first (pipelines.cache_activations, with hidden depth -1). The
output is an ordinary model folder with routers beside it, which every other command takes as `target.model`. After a
kill, the same command resumes from the last checkpoint.
"""

from moray.cluster.training.configs import SparsifyConfig
from moray.config import run_entry_point


def main(config: SparsifyConfig) -> None:
    """Train or resume training, then write the sparse target."""
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


CONFIG = SparsifyConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
