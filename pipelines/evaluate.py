"""Measure drafters against plain decoding and Hugging Face `generate`, and check that nothing is lost.

    python -m pipelines.evaluate configs/targets/demo.yaml configs/evaluations/demo.yaml

Writes answers.jsonl, report.json and report.html into `output` and prints the table. Killed at any instant, the same
command goes on where it was. Two reports side by side, also as JSON with `--json out.json`:

    python -m pipelines.evaluate compare a.json b.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from moray.bench.configs import EvaluateConfig
from moray.config import run_command, run_entry_point


def main(config: EvaluateConfig) -> None:
    """Load the target and the drafters, ask all questions, write and print the report."""
    from rich.console import Console

    from moray.bench.console import print_report
    from moray.bench.evaluation import evaluate
    from moray.bench.report import write_report

    console = Console()
    report = evaluate(config, console)
    json_path, html_path = write_report(report, Path(config.output))
    print_report(report, console)
    console.print(f"report: {json_path} and {html_path}")


def compare_reports(arguments: Sequence[str]) -> None:
    """Print two reports side by side, and write the comparison if asked to."""
    from rich.console import Console

    from moray.bench.compare import compare, comparison_parser, print_comparison, write_comparison

    given = comparison_parser().parse_args(arguments)
    comparison = compare(given.a, given.b)
    print_comparison(comparison, Console())
    if given.json:
        write_comparison(comparison, given.json)


CONFIG = EvaluateConfig

if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        run_command(lambda: compare_reports(sys.argv[2:]))
    else:
        run_entry_point(CONFIG, __doc__ or "", main)
