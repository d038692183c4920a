"""Let the target answer a set of chats itself: on-policy data for drafters, on Ray Data.

    python -m pipelines.regenerate configs/targets/demo.yaml configs/regenerate/demo.yaml

After a kill, the same command resumes with the missing parts.
"""

from moray.cluster.caching.regenerate_config import RegenerateConfig
from moray.config import run_entry_point
from moray.drafters.configs import TrainedConfig


def main(config: RegenerateConfig) -> None:
    """Answer all chats that are still unanswered and print the totals."""
    from moray.cluster.session import ray_session
    from moray.data.ultrachat import check_files
    from moray.models import check_path

    check_files(config.chats)  # all three report what is missing before Ray starts
    check_path(config.target.model)
    if isinstance(config.drafter, str | TrainedConfig):
        from moray.drafters.checkpoint import read_contract  # imports torch
        from moray.drafters.loading import folder_of

        read_contract(folder_of(config.drafter))
    with ray_session(config.ray):
        from moray.cluster.caching.regenerate import regenerate

        total = regenerate(config)
    answers = total["finish_reasons"]
    print(
        f"{config.output}: {total['chats']:,} chats of {total['rows']:,} answered by {config.target.model}; "
        f"{sum(answers.values()):,} answers, {answers.get('length', 0):,} of them cut off by max_new_tokens"
    )
    for what in ("dropped", "shortened"):
        if total[what]:
            print(f"{what}: " + ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in total[what].items()))


CONFIG = RegenerateConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
