"""The figures that trials keep of a measurement, per drafter and tree."""

from dataclasses import dataclass
from typing import Any

from moray.bench.configs import EvaluateConfig
from moray.bench.runner import Measurement

FIGURES = {
    "tau": "tau",
    "tau_spread": "tau_spread",
    "speedup": "speedup_vs_plain",
    "speedup_spread": "speedup_spread",
    "tokens_per_second": "tokens_per_second",
    "draft_steps": "draft_steps",
    "draft_cost": "draft_cost",
    "verify_cost": "verify_cost",
    "efficiency": "efficiency",
    "lossless": "lossless",
    "num_prompts": "num_prompts",
    "num_tokens": "num_tokens",
}
"""Names of figures in sweeps, and in an evaluation's report."""


@dataclass(frozen=True)
class Answer:
    """Tokens, times and cycles of one answer, to compare trials prompt by prompt."""

    tokens: int
    seconds: float
    plain_seconds: float
    cycles: int
    emitted: float

    def row(self) -> list[float]:
        """The values as a list, as stored in a trial's folder."""
        return [self.tokens, self.seconds, self.plain_seconds, self.cycles, self.emitted]


def figures(measurement: Measurement, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Figures of every drafter and tree over all answers so far, with the answers themselves; `config` must have a
    single temperature."""
    from moray.bench.summary import summarise

    rows = summarise(measurement, config.samplings, config.target.dtype)["rows"]
    plain, *drafted = measurement.methods
    found = []
    for row, method in zip(rows, drafted, strict=True):
        answers = [
            Answer(
                len(own.tokens),
                own.seconds + own.prefill_seconds,
                other.seconds + other.prefill_seconds,
                own.num_cycles,
                sum(own.emitted),
            ).row()
            for own, other in zip(method.generations, plain.generations, strict=True)
        ]
        found.append({ours: row[theirs] for ours, theirs in FIGURES.items()} | {"answers": answers})
    return found
