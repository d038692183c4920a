"""Let the target answer a set of chats itself: on-policy data for drafters, on Ray Data.

    python -m pipelines.regenerate configs/targets/demo.yaml configs/regenerate/demo.yaml

Killed at any instant, the same command goes on with the parts that are missing.
"""

from moray.cluster.configs import RegenerateConfig
from moray.config import run_entry_point


def main(config: RegenerateConfig) -> None:
    """Answer all chats, or the rest of them."""
    from moray.cluster.session import ray_session

    with ray_session(config.ray):
        from moray.cluster.regenerate import regenerate

        num_chats = regenerate(config)
    print(f"{config.output}: {num_chats:,} chats answered by {config.target.model}")


CONFIG = RegenerateConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
