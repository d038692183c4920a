"""Search a sparse tree for one drafter and target: measure hit rates, then pick the nodes most likely to be right."""

import textwrap
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.configs import TreeSearchConfig
from moray.bench.loading import load_target, nothing_fits
from moray.bench.recording import record
from moray.bench.reports.wording import number
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.progress import track
from moray.provenance import write_text_atomically
from moray.trees.search import best_paths, expected_tau
from moray.trees.shapes import SparseShape
from pipelines.benchmarks.hit_rates import HitCounter, count_questions

_SHOWN_RANKS = 6


def search_tree(config: TreeSearchConfig, console: Console) -> dict[str, Any]:
    """Measure a drafter's hit rates and choose the tree with the largest expected tau.

    Raises:
        ConfigError: `ranks` exceeds the size of the target's vocabulary.
        DataError: no prompt fits into the target's context, or the drafter was never right.
    """
    questions, tokenizer, target = load_target(config)
    if config.ranks > target.spec.vocab_size:
        raise ConfigError(
            f"ranks is {config.ranks}; the target's vocabulary has {target.spec.vocab_size} tokens: give at most that"
        )
    ((name, drafter),) = load_drafters((config.drafter,), target, tokenizer).items()
    max_model_len = min(target.spec.max_positions, config.max_model_len)
    counter = HitCounter(target, drafter, config.levels, config.ranks, max_model_len)
    eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
    turns = sum(len(question.turns) for question in questions)
    asked = count_questions(counter, questions, tokenizer, config.max_new_tokens, eos_ids)
    num_tokens = sum(track(asked, "answers", turns, unit="turns", console=console))
    if not num_tokens:
        raise nothing_fits(config.questions, max_model_len)
    measured = counter.measured
    paths = best_paths(measured.rates, config.nodes)
    if not paths:
        raise DataError(
            f"drafter {name} never had the target's next token among its {config.ranks} likeliest, so no tree is worth "
            "drafting; train it, or give more ranks"
        )
    shape = SparseShape(type="sparse", paths=tuple(paths))
    return {
        "drafter": name,
        "tree": shape.name,
        "expected_tau": expected_tau(measured.rates, paths),
        "paths": [list(path) for path in paths],
        "rates": [list(row) for row in measured.rates],
        "num_positions": list(measured.num_positions),
        "num_tokens": num_tokens,
    } | record(config)


def tree_yaml(result: dict[str, Any]) -> str:
    """Format the tree as a YAML file for commands with a key `trees`."""
    about = (
        f"{result['tree']} for {result['drafter']}, found by pipelines.benchmark tree: the nodes with the largest "
        f"products of its hit rates on {result['num_tokens']} tokens of greedy answers to "
        f"{result['settings']['questions']} (arXiv 2401.10774, section 2.3.3). Expected tau: "
        f"{result['expected_tau']:.3f}."
    )
    comment = textwrap.wrap(one_line(about), 118, break_long_words=False, initial_indent="# ", subsequent_indent="# ")
    by_level = sorted(result["paths"], key=lambda path: (len(path), path))
    words = ", ".join(str(path).replace(" ", "") for path in by_level)
    rows = textwrap.wrap(words, 112, break_long_words=False, break_on_hyphens=False)
    return "\n".join(
        [*comment, "trees:", "  - type: sparse", "    paths: [", *(f"      {row}" for row in rows), "    ]", ""]
    )


def print_tree(result: dict[str, Any], console: Console) -> None:
    """Print the hit rates, then the tree and its expected tau."""
    title = f"How often {result['drafter']}'s candidate of a rank is the target's next token"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    shown = min(_SHOWN_RANKS, len(result["rates"][0]))
    for column in ("level", "positions", *(f"rank {rank}" for rank in range(shown)), "any"):
        table.add_column(column, justify="right")
    for level, (row, positions) in enumerate(zip(result["rates"], result["num_positions"], strict=True), start=1):
        cells = [number(rate, 2) for rate in (*row[:shown], sum(row))]
        table.add_row(str(level), str(positions), *cells)
    console.print(table)
    depth = max(map(len, result["paths"]))
    console.print(
        f"{result['tree']}: {depth} levels, expected tau {result['expected_tau']:.3f} if levels were independent",
        highlight=False,
    )


def print_yaml(result: dict[str, Any], console: Console) -> None:
    """Print the tree as YAML, ready to copy."""
    console.print(Text(tree_yaml(result)), soft_wrap=True)


def write_tree(result: dict[str, Any], path: Path) -> None:
    """Write the tree as YAML, atomically."""
    write_text_atomically(path, tree_yaml(result))
