"""Distill a drafter from cached activations, on Ray Train.

    python -m pipelines.distill configs/targets/demo.yaml configs/drafters/moa-demo.yaml

After a kill, the same command resumes from the last checkpoint.
"""

from moray.cluster.training.configs import DistillConfig
from moray.config import run_entry_point


def main(config: DistillConfig) -> None:
    """Train or resume training, then print where the drafter is."""
    from moray.cluster.session import ray_session
    from moray.cluster.training.resume import is_complete

    if is_complete(config):
        print(f"{config.output} is complete for this configuration: nothing to do")
        return
    with ray_session(config.ray):
        from moray.cluster.training.distill import distill
        from moray.cluster.training.validate import describe_validation

        folder = distill(config)
        validated = describe_validation(folder)
    if validated:
        print(validated)
    print(f"drafter: {folder}")


CONFIG = DistillConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
