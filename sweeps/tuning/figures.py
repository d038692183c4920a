"""The figures that trials keep of a measurement, per drafter and tree."""

from dataclasses import dataclass

from moray.bench.configs import EvaluateConfig
from moray.bench.runner import Measurement
from sweeps.tuning.records import MeasuredFigures


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


def figures(measurement: Measurement, config: EvaluateConfig) -> list[MeasuredFigures]:
    """Figures of every drafter and tree over all answers so far, with the answers themselves; `config` must have a
    single temperature."""
    from moray.bench.summary import summarise

    rows = summarise(measurement, config.samplings, config.target.dtype)["rows"]
    plain, *drafted = measurement.methods
    found: list[MeasuredFigures] = []
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
        found.append(
            {
                "tau": row["tau"],
                "tau_spread": row["tau_spread"],
                "speedup": row["speedup_vs_plain"],
                "speedup_spread": row["speedup_spread"],
                "tokens_per_second": row["tokens_per_second"],
                "draft_steps": row["draft_steps"],
                "draft_cost": row["draft_cost"],
                "verify_cost": row["verify_cost"],
                "efficiency": row["efficiency"],
                "lossless": row["lossless"],
                "num_prompts": row["num_prompts"],
                "num_tokens": row["num_tokens"],
                "answers": answers,
            }
        )
    return found
