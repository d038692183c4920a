"""Distill a drafter from cached activations, on Ray Train.

    python -m pipelines.distill configs/targets/demo.yaml configs/drafters/moa-demo.yaml

After a kill, the same command resumes from the last checkpoint.
"""

from moray.cluster.training.configs import DistillConfig
from moray.config import run_entry_point


def main(config: DistillConfig) -> None:
    """Train or resume training, then print where the drafter is."""
    from moray.bench.validation import read_prompts
    from moray.cluster.session import ray_session
    from moray.cluster.training.resume import is_complete
    from moray.data.ultrachat import check_files
    from moray.models import check_path

    check_path(config.target.model)  # this and the checks below report what is missing before Ray starts
    if is_complete(config):
        print(f"{config.output} is complete for this configuration: nothing to do")
        return
    if config.source.type != "disk":
        check_files(config.source.chats)
    if config.validation is not None:
        read_prompts(config.validation)
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
