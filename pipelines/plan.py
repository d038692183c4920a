"""Predict tokens per second of drafters, chains, trees and batches, without running them: from acceptance and costs.

    python -m pipelines.plan costs configs/targets/smollm2.yaml configs/plans/costs-smollm2.yaml
    python -m pipelines.plan configs/plans/smollm2.yaml
    python -m pipelines.plan check configs/targets/smollm2.yaml configs/plans/smollm2.yaml
    python -m pipelines.plan shapes configs/targets/smollm2.yaml configs/plans/shapes-smollm2.yaml

Acceptance comes from `pipelines.replay` with max_depth, or is given as rates. Costs come from `plan costs`, or from a
YAML file that describes another machine. `plan check` measures the same rows and says how far the predictions are off.
`plan shapes` times drafters of equal size, from deep and narrow to shallow and wide.
"""

import sys

from moray.bench.plan.configs import CostsConfig, PlanCheckConfig, PlanConfig, ShapesConfig
from moray.commands import Command, run_commands


def main(config: PlanConfig) -> None:
    """Predict all rows; write plan.json, report.html and best.yaml."""
    from pathlib import Path

    from moray.bench.plan.page import print_plan, write_plan_page
    from moray.bench.plan.planner import plan
    from moray.console import open_console

    result = plan(config)
    write_plan_page(Path(config.output) / "report.html", result)
    print_plan(result, open_console())
    if result["not_planned"]:
        print(f"not planned, because costs has no trees of this kind: {'; '.join(result['not_planned'])}")
    print(f"plan: {config.output}")


def main_costs(config: CostsConfig) -> None:
    """Measure what passes and drafts cost on this machine, and write a YAML file of seconds."""
    from moray.bench.plan.measure import measure

    result = measure(config)
    if result["has_drifted"]:
        print(
            f"warning: costs differ by {result['drift']:.0%} between the two halves of the measurement; other work "
            "runs on this machine: measure again"
        )
    print(f"costs: {config.output} (the two halves of the measurement differ by {result['drift']:.1%})")


def main_check(config: PlanCheckConfig) -> None:
    """Measure the rows of a plan, and compare."""
    from moray.bench.lossless import check_lossless
    from moray.bench.plan.check import check
    from moray.bench.plan.page import print_check
    from moray.bench.recording import reported
    from moray.console import open_console

    result = reported(config.report, lambda: check(config))
    print_check(result, open_console())
    if result["costs_threads"] not in (None, result["threads"]):
        print(
            f"warning: costs were measured with {result['costs_threads']} threads, these rows with "
            f"{result['threads']}: give threads={result['costs_threads']}"
        )
    check_lossless((f"{row['name']}, {row['batch']} at a time", row["lossless"]) for row in result["rows"])


def main_shapes(config: ShapesConfig) -> None:
    """Measure what a step of an independent drafter costs by its shape."""
    from moray.bench.plan.page import print_shapes
    from moray.bench.plan.shapes import measure_shapes
    from moray.bench.recording import reported
    from moray.console import open_console

    print_shapes(reported(config.report, lambda: measure_shapes(config)), open_console())
    print(f"shapes: {config.output}")


CONFIG = PlanConfig
COMMANDS = {
    "": Command(PlanConfig, main),
    "costs": Command(CostsConfig, main_costs),
    "check": Command(PlanCheckConfig, main_check),
    "shapes": Command(ShapesConfig, main_shapes),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
