"""The plan: every drafter, tree and batch predicted, and the best of each batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moray.bench.plan.configs import PlanConfig
from moray.bench.plan.costs import CycleCostTable, tree_key
from moray.bench.plan.replayed import PLAIN, PlannedDraft, ReplayedDrafts, chain, read_replay
from moray.bench.plan.throughput import PlanRow, Prediction, expected, simulate
from moray.drafters.configs import UsableConfig
from moray.errors import ConfigError
from moray.provenance import write_json_atomically

Row = tuple[PlannedDraft, PlanRow]
"""What is drafted, and its prediction as in plan.json."""


def plan(config: PlanConfig) -> dict[str, Any]:
    """Predict all rows, and write plan.json and best.yaml.

    Raises:
        ConfigError: a batch is beyond the costs, or a drafter has none.
    """
    costs = CycleCostTable.load(config.costs)
    replayed = None
    if config.replay is not None:
        replayed = read_replay(config.replay, config.drafters, config.trees, config.num_continuations)
        check_batches(config, replayed)
    batches: list[list[Row]] = []
    for batch in config.batches:
        rows = list(
            _rows_of_rates(config, costs, batch) if replayed is None else all_rows(config, costs, replayed, batch)
        )
        plain = rows[0][1]["tokens_per_second"]
        for _, row in rows:
            row["break_even_tau"] = row["tau"] * plain / row["tokens_per_second"]
        batches.append(rows)
    best = [best_row(rows) for rows in batches]
    planned = {row["name"] for rows in batches for _, row in rows}
    result = {
        "not_planned": [name for name in _names_of_trees(replayed) if name not in planned],
        "rows": [row for rows in batches for _, row in rows],
        "best": [row for _, row in best],
        "machine": costs.machine,
        "settings": config.model_dump(mode="json"),
    }
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(folder / "plan.json", result)
    _write_best(folder / "best.yaml", config.batches[0], best[0][0], None if replayed is None else replayed.entries)
    return result


def _names_of_trees(replayed: ReplayedDrafts | None) -> list[str]:
    trees = {} if replayed is None else replayed.trees
    return [PlannedDraft(name, tree.shape).name for name, own in trees.items() for tree in own]


def check_batches(config: PlanConfig, replayed: ReplayedDrafts) -> None:
    """Refuse batches of more sequences than there are continuations.

    Raises:
        ConfigError: names the batch.
    """
    count = min(map(len, replayed.continuations.values()))
    if max(config.batches) > count:
        raise ConfigError(
            f"batches has {max(config.batches)}, but there are {count} continuations to decode: give smaller batches, "
            "or replay more continuations"
        )


def best_row(rows: Sequence[Row]) -> Row:
    """The row of most tokens per second; plain decoding is one of them."""
    return max(rows, key=lambda row: row[1]["tokens_per_second"])


def predict(costs: CycleCostTable, replayed: ReplayedDrafts, draft: PlannedDraft, batch: int) -> PlanRow:
    """One row."""
    return _row(draft, batch, simulate(costs, draft, batch, replayed.cycles(draft)))


def depths_of(costs: CycleCostTable, drafter: str, max_depth: int) -> Iterable[int]:
    """Depths of chains that have costs.

    Raises:
        ConfigError: no depth has costs.
    """
    found = [depth for depth in range(1, max_depth + 1) if costs.can_draft(drafter, depth)]
    if not found:
        raise ConfigError(
            f"costs has no drafts of '{drafter}', or no passes of 2 tokens: measure both, or leave it out of drafters"
        )
    return found


def trees_of(
    config: PlanConfig, costs: CycleCostTable, replayed: ReplayedDrafts, drafter: str
) -> Iterator[PlannedDraft]:
    """The replayed trees of a drafter that have costs.

    Raises:
        ConfigError: a tree that `config.trees` names has none.
    """
    for tree in replayed.trees[drafter]:
        shape = tree.shape
        if costs.can_draft_tree(drafter, shape):
            yield PlannedDraft(drafter, shape)
        elif config.trees is not None:
            raise ConfigError(
                f"costs has no trees.{drafter}.{tree_key(shape)}, or no passes of {shape.num_nodes + 1} tokens: "
                "measure both with `pipelines.plan costs`, or leave the tree out of trees"
            )


def all_rows(config: PlanConfig, costs: CycleCostTable, replayed: ReplayedDrafts, batch: int) -> Iterator[Row]:
    """All rows of one batch, plain decoding first."""
    yield PLAIN, predict(costs, replayed, PLAIN, batch)
    for name, deepest in replayed.max_depths.items():
        drafts = [chain(name, depth) for depth in depths_of(costs, name, min(config.max_depth, deepest))]
        for draft in [*drafts, *trees_of(config, costs, replayed, name)]:
            yield draft, predict(costs, replayed, draft, batch)


def _rows_of_rates(config: PlanConfig, costs: CycleCostTable, batch: int) -> Iterator[Row]:
    yield PLAIN, _row(PLAIN, batch, expected(costs, PLAIN, batch, ()))
    for name in config.drafters or tuple(config.acceptance):
        if name not in config.acceptance:
            raise ConfigError(
                f"drafters has '{name}', acceptance only {', '.join(config.acceptance)}: give rates for it too"
            )
        rates = config.acceptance[name]
        for depth in depths_of(costs, name, min(config.max_depth, len(rates))):
            draft = chain(name, depth)
            yield draft, _row(draft, batch, expected(costs, draft, batch, rates))


def _row(draft: PlannedDraft, batch: int, prediction: Prediction) -> PlanRow:
    return {
        "name": draft.name,
        "drafter": draft.drafter,
        "tree": draft.tree,
        "depth": draft.depth,
        "is_chain": draft.is_chain,
        "batch": batch,
        "tokens_per_second": prediction.tokens_per_second,
        "tau": prediction.tau,
        "draft_share": prediction.draft_share,
    }


def _write_best(path: Path, batch: int, best: PlannedDraft, entries: Mapping[str, str | UsableConfig] | None) -> None:
    """Settings of the best row of the first batch, for `pipelines.evaluate` and for `plan` of the server."""
    if best.shape is None:
        text = f"# For {batch} at a time, plain decoding is the fastest: no drafter pays here.\n"
    else:
        text = f"# The fastest for {batch} at a time, as planned: {best.name}; plan.json has all rows.\n"
        settings: dict[str, Any] = {"trees": [best.shape.model_dump(mode="json")]}
        if entries is not None:
            entry = entries[best.drafter]
            settings["drafters"] = [entry if isinstance(entry, str) else entry.model_dump(mode="json")]
        text += yaml.safe_dump(settings, sort_keys=False)
    path.write_text(text, encoding="utf-8")
