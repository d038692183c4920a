"""Measure drafters against plain decoding and Hugging Face `generate`, and check that nothing is lost.

    python -m pipelines.evaluate configs/targets/demo.yaml configs/evaluations/demo.yaml

Writes report.json and report.html into `output` and prints the table.
"""

from pathlib import Path

from moray.bench.configs import EvaluateConfig
from moray.config import run_entry_point


def main(config: EvaluateConfig) -> None:
    """Load the target and the drafters, ask all questions, write and print the report."""
    from rich.console import Console

    from moray.bench.evaluation import evaluate
    from moray.bench.report import print_report, write_report
    from moray.provenance import write_run_yaml

    console = Console()
    report = evaluate(config, console)
    folder = Path(config.output)
    write_run_yaml(folder, config, seed=config.sampling.seed)
    json_path, html_path = write_report(report, folder)
    print_report(report, console)
    console.print(f"report: {json_path} and {html_path}")


CONFIG = EvaluateConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
