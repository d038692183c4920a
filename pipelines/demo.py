"""The whole chain, stage after stage, as a user would type it.

    python -m pipelines.demo configs/demo.yaml

Each stage is one of the other entry points, shown with its arguments. Finished stages are not done again: an
interrupted demo goes on where it was.
"""

import importlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from moray.bench.configs import LiveConfig
from moray.cluster.configs import RayConfig
from moray.config import Config, load_config, run_entry_point

if TYPE_CHECKING:
    from rich.console import Console


class DemoConfig(Config):
    """Which stages to run, and what to decode at the end."""

    stages: tuple[tuple[str, ...], ...] = Field(min_length=1)
    """Name of an entry point of `pipelines`, then its arguments."""
    live: LiveConfig | None = None
    ray: RayConfig = RayConfig()


def main(config: DemoConfig) -> None:
    """Run all stages in one Ray session, then decode one prompt live."""
    from rich.console import Console

    from moray.bench.live import show_live
    from moray.cluster.session import ray_session

    console = Console()
    begin = time.perf_counter()
    seconds: dict[str, float] = {}
    with ray_session(config.ray):
        for name, *arguments in config.stages:
            started = time.perf_counter()
            run_stage(console, name, arguments)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
    if config.live is not None:
        console.rule("one prompt, live")
        show_live(config.live, console)
    console.rule("time")
    parts = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    console.print(f"{parts}; {time.perf_counter() - begin:.0f} s in all", highlight=False)


def run_stage(console: "Console", name: str, arguments: Sequence[str]) -> None:
    """Show a stage's command and run it in this process."""
    module = importlib.import_module(f"pipelines.{name}")
    console.rule(name)
    console.print(f"$ python -m pipelines.{name} {' '.join(arguments)}", style="bold", highlight=False, markup=False)
    module.main(load_config(module.CONFIG, arguments))


CONFIG = DemoConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
