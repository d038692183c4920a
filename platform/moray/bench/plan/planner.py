"""The plan: every drafter, depth and batch predicted, and the best of each batch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from moray.bench.plan.configs import PlanConfig
from moray.bench.plan.costs import CycleCostTable
from moray.bench.plan.throughput import Prediction, decode, expected
from moray.bench.replay.chains import ChainMatches
from moray.bench.replay.configs import ReplayConfig
from moray.config import validate
from moray.drafters.configs import UsableConfig
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.provenance import write_json_atomically

PLAIN = "plain"
"""Name of the rows without a drafter."""


@dataclass(frozen=True)
class ReplayedChains:
    """What a replay says of each drafter's chains, and where drafters and log are."""

    log: str
    entries: dict[str, str | UsableConfig]
    """By drafter: its folder, or its configuration."""
    depth: dict[str, int]
    """By drafter: depth up to which its chains were replayed."""
    continuations: dict[str, list[ChainMatches]]
    """By drafter."""


def read_replay(path: str, drafters: Sequence[str], num_continuations: int | None) -> ReplayedChains:
    """Read the JSON file of `pipelines.replay`.

    Raises:
        ConfigError: there is no such file, it has no chains of all depths, or a drafter is not in it.
        DataError: it is damaged.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        chains, settings = found.get("chains", []), validate(ReplayConfig, found["settings"])
        names = [row["drafter"] for row in chains]
        entries = dict(zip(names, settings.drafters, strict=True)) if chains else {}
        depth = {row["drafter"]: int(row["depth"]) for row in chains}
        continuations = {
            row["drafter"]: [ChainMatches(**each) for each in row["continuations"]][:num_continuations]
            for row in chains
        }
    except OSError as error:
        raise ConfigError(
            f"replay '{path}' cannot be read ({error.strerror}); `pipelines.replay --json` makes one"
        ) from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(
            f"replay '{path}' is not what `pipelines.replay --json` writes ({one_line(str(error))}): replay again"
        ) from None
    if not chains:
        raise ConfigError(f"replay '{path}' has no chains of all depths: replay with max_depth=8")
    for name in drafters:
        if name not in continuations:
            raise ConfigError(
                f"drafters has '{name}', replay '{path}' only {', '.join(names)}: name one of those, or replay it too"
            )
    chosen = drafters or names
    for name in chosen:
        if not any(each.matched for each in continuations[name]):
            raise ConfigError(f"replay '{path}' has no continuation of two tokens or more: record longer answers")
    return ReplayedChains(
        settings.log,
        {name: entries[name] for name in chosen},
        {name: depth[name] for name in chosen},
        {name: continuations[name] for name in chosen},
    )


def plan(config: PlanConfig) -> dict[str, Any]:
    """Predict all rows, and write plan.json and best.yaml.

    Raises:
        ConfigError: a batch is beyond the costs, or a drafter has none.
    """
    costs = CycleCostTable.load(config.costs)
    rows, replayed = [], None
    if config.replay is not None:
        replayed = read_replay(config.replay, config.drafters, config.num_continuations)
        check_batches(config, replayed)
        for batch in config.batches:
            rows += rows_of_replay(config, costs, replayed, batch)
    else:
        for batch in config.batches:
            rows += _rows_of_rates(config, costs, batch)
    for batch in config.batches:
        own = [row for row in rows if row["batch"] == batch]
        plain = own[0]["tokens_per_second"]
        for row in own:
            row["break_even_tau"] = row["tau"] * plain / row["tokens_per_second"]
    best = [best_row([row for row in rows if row["batch"] == batch]) for batch in config.batches]
    result = {"rows": rows, "best": best, "machine": costs.machine, "settings": config.model_dump(mode="json")}
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(folder / "plan.json", result)
    _write_best(folder / "best.yaml", best[0], None if replayed is None else replayed.entries)
    return result


def check_batches(config: PlanConfig, replayed: ReplayedChains) -> None:
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


def best_row(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The row of most tokens per second; plain decoding is one of them."""
    return max(rows, key=lambda row: row["tokens_per_second"])


def predict(costs: CycleCostTable, replayed: ReplayedChains, drafter: str, depth: int, batch: int) -> dict[str, Any]:
    """One row; with depth 0, plain decoding of the same continuations."""
    texts = replayed.continuations[drafter] if depth else next(iter(replayed.continuations.values()))
    return _row(drafter if depth else PLAIN, depth, batch, decode(costs, drafter, depth, batch, texts))


def depths_of(costs: CycleCostTable, drafter: str, most: int) -> Iterable[int]:
    """Depths of chains that have costs.

    Raises:
        ConfigError: no depth has costs.
    """
    found = [depth for depth in range(1, most + 1) if costs.can_draft(drafter, depth)]
    if not found:
        raise ConfigError(
            f"costs has no drafts of '{drafter}', or no passes of 2 tokens: measure both, or leave it out of drafters"
        )
    return found


def rows_of_replay(
    config: PlanConfig, costs: CycleCostTable, replayed: ReplayedChains, batch: int
) -> Iterable[dict[str, Any]]:
    """All rows of one batch, plain decoding first."""
    yield predict(costs, replayed, PLAIN, 0, batch)
    for name, deepest in replayed.depth.items():
        for depth in depths_of(costs, name, min(config.max_depth, deepest)):
            yield predict(costs, replayed, name, depth, batch)


def _rows_of_rates(config: PlanConfig, costs: CycleCostTable, batch: int) -> Iterable[dict[str, Any]]:
    yield _row(PLAIN, 0, batch, expected(costs, PLAIN, 0, batch, ()))
    for name in config.drafters or tuple(config.acceptance):
        if name not in config.acceptance:
            raise ConfigError(
                f"drafters has '{name}', acceptance only {', '.join(config.acceptance)}: give rates for it too"
            )
        rates = config.acceptance[name]
        for depth in depths_of(costs, name, min(config.max_depth, len(rates))):
            yield _row(name, depth, batch, expected(costs, name, depth, batch, rates))


def _row(drafter: str, depth: int, batch: int, prediction: Prediction) -> dict[str, Any]:
    return {"drafter": drafter, "depth": depth, "batch": batch, **asdict(prediction)}


def _write_best(path: Path, best: dict[str, Any], entries: Mapping[str, str | UsableConfig] | None) -> None:
    """Settings of the best row of the first batch, to give to `pipelines.evaluate` after its own files."""
    if not best["depth"]:
        text = f"# For {best['batch']} at a time, plain decoding is the fastest: no drafter pays here.\n"
    else:
        text = f"# The fastest for {best['batch']} at a time, as planned: {best['drafter']}; plan.json has all rows.\n"
        settings: dict[str, Any] = {"trees": [{"type": "chain", "depth": best["depth"]}]}
        if entries is not None:
            entry = entries[best["drafter"]]
            settings["drafters"] = [entry if isinstance(entry, str) else entry.model_dump(mode="json")]
        text += yaml.safe_dump(settings, sort_keys=False)
    path.write_text(text, encoding="utf-8")
