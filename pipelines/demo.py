"""Run the whole chain stage by stage, as a user would type it.

    python -m pipelines.demo configs/demo.yaml

Each stage is one of the other entry points, shown with its arguments. Finished training and caching is not repeated:
an interrupted demo resumes where it stopped.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from moray.bench.configs import LiveConfig
from moray.cluster.configs import RayConfig
from moray.config import Config, load_config, run_entry_point
from moray.errors import ConfigError


class DemoConfig(Config):
    """The stages to run, and the prompt to decode at the end."""

    stages: tuple[tuple[str, ...], ...] = Field(min_length=1)
    """Commands to run in order; each is a list of an entry point of pipelines and its arguments."""
    live: LiveConfig | None = None
    """Prompt to decode in the terminal after the stages; null for none."""
    ray: RayConfig = RayConfig()


def main(config: DemoConfig) -> None:
    """Run all stages in one Ray session, then decode one prompt live."""
    from moray.bench.live import show_live
    from moray.cluster.session import ray_session
    from moray.console import open_console

    stages = [(name, arguments, *load_stage(name, arguments)) for name, *arguments in config.stages]
    console = open_console()
    begin = time.perf_counter()
    seconds: dict[str, float] = {}
    with ray_session(config.ray):
        for name, arguments, run, stage_config in stages:
            started = time.perf_counter()
            console.rule(name)
            command = f"$ python -m pipelines.{name} {' '.join(arguments)}"
            console.print(command, style="bold", highlight=False, markup=False)
            run(stage_config)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
    if config.live is not None:
        console.rule("one prompt, live")
        show_live(config.live, console)
    console.rule("time")
    parts = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    console.print(f"{parts}; {time.perf_counter() - begin:.0f} s in all", highlight=False)


def load_stage(name: str, arguments: Sequence[str]) -> tuple[Callable[[Any], None], Config]:
    """Load a stage's `main` and its configuration, so that all stages are checked before the first one runs."""
    names = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__", "benchmark", "demo"}
    if name not in names:
        raise ConfigError(f"stages names '{name}'; the stages are {', '.join(sorted(names))}")
    module = importlib.import_module(f"pipelines.{name}")
    return module.main, load_config(module.CONFIG, arguments)


CONFIG = DemoConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
