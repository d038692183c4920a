"""Train the demo's target and write its chats and questions, in a minute or two on two CPU cores.

    python -m pipelines.train_demo_target configs/targets/demo-training.yaml

Writes a Hugging Face folder `<output>/target`, UltraChat-like `<output>/chats/{train,heldout}.jsonl` and
Spec-Bench-like `<output>/questions.jsonl`. A finished output of the same configuration is kept; an interrupted one is
made from scratch.
"""

from moray.config import run_entry_point
from moray.targets.demo.config import DemoTargetConfig


def main(config: DemoTargetConfig) -> None:
    """Train unless the output is complete, then print the result."""
    from moray.console import open_console
    from moray.provenance import write_run_yaml
    from moray.targets.demo.make import read_result, train_demo_target

    console = open_console()
    result = read_result(config)
    if result is None:
        result = train_demo_target(config, console)
        write_run_yaml(config.output / "target", config, config.seed)
    else:
        console.print(f"demo target in {config.output}/target is complete: nothing to do")
    console.print(
        f"held-out loss {result.heldout_loss:.3f}, accuracy {result.heldout_accuracy:.3f} "
        f"({result.num_steps} steps, {result.seconds:.0f} s)"
    )
    console.print(f"[bold]user:[/] {result.sample_question}\n[bold]target:[/] {result.sample_answer}", highlight=False)


CONFIG = DemoTargetConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
