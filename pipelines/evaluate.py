"""Measure drafters against plain decoding and Hugging Face `generate`, and check that their output is lossless.

    python -m pipelines.evaluate configs/targets/demo.yaml configs/evaluations/demo.yaml

Writes answers.jsonl, report.json and report.html into `output` and prints the table. The exit code is 1 if a text that
must equal plain decoding's differs. After a kill, the same command resumes where it stopped. To compare two reports,
also as JSON with `--json out.json`:

    python -m pipelines.evaluate compare a.json b.json

Sparse targets (pipelines.sparsify) beside their dense one, quality and speed:

    python -m pipelines.evaluate sparse configs/evaluations/sparse-smollm2.yaml
"""

import sys
from pathlib import Path

from moray.bench.configs import CompareConfig, EvaluateConfig
from moray.bench.recording import reported
from moray.bench.sparse.configs import SparseEvaluationConfig
from moray.commands import Command, run_commands


def main(config: EvaluateConfig) -> None:
    """Load the target and the drafters, ask all questions, then write and print the report."""
    from moray.bench.evaluation import evaluate
    from moray.bench.lossless import check_lossless, row_name
    from moray.bench.reports.console import print_report
    from moray.bench.reports.report import write_report
    from moray.console import open_console

    console = open_console()
    report = evaluate(config, console)
    json_path, html_path = write_report(report, Path(config.output))
    print_report(report, console)
    console.print(f"report: {json_path} and {html_path}")
    check_lossless((row_name(row), row["lossless"]) for row in report["rows"])


def main_compare(config: CompareConfig) -> None:
    """Print two reports side by side, row by row; ratios are b / a."""
    from moray.bench.reports.compare import compare, print_comparison, write_comparison
    from moray.console import open_console

    comparison = compare(Path(config.a), Path(config.b))
    print_comparison(comparison, open_console())
    if config.report:
        write_comparison(comparison, Path(config.report))


def main_sparse(config: SparseEvaluationConfig) -> None:
    """Measure sparse targets beside their dense one: quality on held-out chats, and speed with and without drafts."""
    from moray.bench.lossless import check_lossless
    from moray.bench.sparse.evaluation import evaluate_sparse
    from moray.bench.sparse.page import render_sparse
    from moray.console import open_console

    console = open_console()
    result = reported(config.report, lambda: evaluate_sparse(config, console))
    if config.report:
        page = Path(config.report).with_suffix(".html")
        page.write_text(render_sparse(result), encoding="utf-8")
        console.print(f"report: {config.report} and {page}")
    exact = {name for name, target in config.targets.items() if target.dtype == "float32"}
    check_lossless((row["name"], not row["num_unexplained"]) for row in result["rows"] if row["target"] in exact)


CONFIG = EvaluateConfig
COMMANDS = {
    "": Command(EvaluateConfig, main),
    "compare": Command(CompareConfig, main_compare, files=("a", "b")),
    "sparse": Command(SparseEvaluationConfig, main_sparse),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
