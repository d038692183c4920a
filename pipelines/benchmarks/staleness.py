"""How tau depends on stale memory: drafts made with memory that ends some tokens before the root.

The target generates each answer once with plain greedy decoding. The drafter then follows the answer as in decoding and
drafts a chain below each root, except that for the last `lag` tokens before the root it has only the token ids and not
their memory:

    text          t0 .. t4   t5   t6   t7        t0..t4 and their memory given to `extend`, t7 the root, lag 2
    step          level 0: t5  level 1: t6  level 2: t7  level 3: d1  level 4: d2     drafted from t7 on
    counted       d1 d2 d3 up to the first mismatch with the answer; the next root is the true token after the match

After that the answers are fixed: the target only reads each one again for its memory, and acceptance is a comparison of
tokens.

Running ahead drafts with memory like this (see `decoding.remote.ahead`); a lag of 0 is ordinary decoding.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moray.bench.configs import StalenessConfig
from moray.bench.loading import load_target, nothing_fits
from moray.bench.recording import record
from moray.bench.reports.wording import interval, number
from moray.bench.specbench import Question
from moray.bench.spread import ratio_interval, ratio_of_ratios_interval
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.observed import taps_of_text
from moray.decoding.params import SamplingParams
from moray.drafters.base import Drafter
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError
from moray.progress import track
from moray.text import ChatTokenizer

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's greedy answer to it."""

    prompt: list[int]
    tokens: list[int]


class LateDrafter:
    """Drafts chains along known texts with stale memory."""

    def __init__(self, runner: TargetRunner, drafter: Drafter, depth: int, max_lag: int) -> None:
        """
        Args:
            runner: the target's, with slots for the longest text.
            drafter: the drafter to measure; it gets its own state.
            depth: tokens per chain.
            max_lag: largest lag that `count` will be called with.

        Raises:
            ConfigError: the drafter cannot draft that deep.
        """
        deepest = depth + max_lag
        if drafter.max_depth is not None and drafter.max_depth < deepest:
            raise ConfigError(
                f"drafters holds a {type(drafter).__name__.lower()}, which drafts {drafter.max_depth} levels; depth "
                f"{depth} and a lag of {max_lag} need {deepest}: leave it out, or give less of either"
            )
        self._runner = runner
        self._drafter = drafter
        self._depth = depth
        self._state = drafter.new_state(runner.cache.num_slots, deepest)
        self._text = torch.empty(0, dtype=torch.long, device=drafter.head.weight.device)
        self._first_root = 0
        self._memory: dict[str, Tensor] = {}

    @torch.inference_mode()
    def take(self, answer: Answer) -> None:
        """Run the target over a whole text and keep the observed memory; later calls of `count` refer to this text."""
        self._text = torch.tensor([*answer.prompt, *answer.tokens], device=self._text.device)
        self._first_root = len(answer.prompt)
        pieces: dict[str, list[Tensor]] = {}
        text = [*answer.prompt, *answer.tokens[:-1]]
        for _, taps in taps_of_text(self._runner, text, self._drafter.observed):
            for name, rows in self._drafter.observe(taps).items():
                pieces.setdefault(name, []).append(rows)
        self._memory = {name: torch.cat(rows, dim=1) for name, rows in pieces.items()}

    @torch.inference_mode()
    def count(self, lag: int) -> list[int]:
        """Count how many draft tokens match the answer in each cycle.

        The last root is the last one followed by a whole chain of answer tokens, so that every match can be checked.
        """
        self._drafter.reset(self._state)
        accepted: list[int] = []
        known, num_kept, root = 0, 0, self._first_root
        while root + self._depth < self._text.shape[0]:
            end = root - lag
            part = {name: rows[:, known:end] for name, rows in self._memory.items()}
            self._drafter.extend(self._state, self._text[known:end], part, num_kept)
            known = end
            accepted.append(self._agreement(known, root))
            root += 1 + accepted[-1]
            num_kept = min(1 + accepted[-1], lag + self._depth)  # nodes that were expanded in sequence and are true
        return accepted

    def _agreement(self, known: int, root: int) -> int:
        """Count the leading draft tokens below a root that match the answer; the state covers tokens before `known`."""
        drafted: list[Tensor] = []
        for level in range(root + self._depth - known):
            position = known + level
            token = self._text[position : position + 1] if position <= root else drafted[-1]
            logits = self._drafter.step(self._state, token, None, level)
            if logits is None:
                break
            if position >= root:
                drafted.append(logits.argmax(dim=-1))
        if not drafted:
            return 0
        truth = self._text[root + 1 : root + 1 + len(drafted)]
        return int((torch.cat(drafted) == truth).long().cumprod(dim=0).sum())


def benchmark_staleness(config: StalenessConfig, console: Console) -> dict[str, Any]:
    """Measure tau at every lag for each drafter.

    Raises:
        ConfigError: a drafter cannot draft as deep as depth and lag together require.
        DataError: no prompt fits into the context and is longer than the largest lag.
    """
    questions, tokenizer, target = load_target(config)
    drafters = load_drafters(config.drafters, target, tokenizer)
    max_model_len = min(target.spec.max_positions, config.max_model_len)
    runner = runner_for(target, max_model_len, 0)
    max_lag = max(config.lags)
    late = {name: LateDrafter(runner, drafter, config.depth, max_lag) for name, drafter in drafters.items()}
    decoder = SpeculativeDecoder(target, None, max_model_len=max_model_len, runner=runner)
    asked = _answers(config, decoder, questions, tokenizer)
    answers = list(track(asked, "answers", len(questions), unit="answers", console=console))
    if not answers:
        raise nothing_fits(config.questions, max_model_len - config.max_new_tokens)
    rows = []
    for name, drafter in late.items():
        counts: dict[int, list[tuple[float, float]]] = {lag: [] for lag in config.lags}
        for answer in track(answers, name, len(answers), unit="answers", console=console):
            drafter.take(answer)
            for lag, pairs in counts.items():
                accepted = drafter.count(lag)
                pairs.append((float(sum(accepted) + len(accepted)), float(len(accepted))))
        rows += _rows(name, counts)
    return {"rows": rows, "num_answers": len(answers), "num_tokens": sum(len(a.tokens) for a in answers)} | record(
        config
    )


def _answers(
    config: StalenessConfig,
    decoder: SpeculativeDecoder,
    questions: Collection[Question],
    tokenizer: ChatTokenizer,
) -> Iterator[Answer]:
    """Yield the target's answers to the first turns, skipping answers too short for a single root."""
    eos_ids = {*decoder.target.eos_ids, *tokenizer.eos_ids}
    for question in questions:
        prompt = tokenizer.encode_prompt([{"role": "user", "content": question.turns[0]}])
        if max(config.lags) < len(prompt) <= decoder.max_model_len - config.max_new_tokens:
            tokens = decoder.generate(prompt, _GREEDY, config.max_new_tokens, eos_ids).tokens
            if len(tokens) > config.depth:
                yield Answer(prompt, tokens)


def _rows(name: str, counts: Mapping[int, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Rows with tau = (accepted + 1 per cycle) / cycles over all answers, and intervals from resampling answers."""
    taus = {lag: sum(above for above, _ in pairs) / sum(below for _, below in pairs) for lag, pairs in counts.items()}
    return [
        {
            "drafter": name,
            "lag": lag,
            "num_cycles": int(sum(below for _, below in pairs)),
            "tau": taus[lag],
            "tau_interval": ratio_interval(pairs),
            "relative": taus[lag] / taus[0],
            "relative_interval": ratio_of_ratios_interval(pairs, counts[0]),
        }
        for lag, pairs in counts.items()
    ]


def print_staleness(result: dict[str, Any], console: Console) -> None:
    """Print the rows as a table."""
    title = f"tau of chains of {result['settings']['depth']} whose memory ends `lag` tokens before the root"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("drafter", "lag", "cycles", "tau", "95 %", "relative", "95 %"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for row in result["rows"]:
        table.add_row(
            row["drafter"],
            str(row["lag"]),
            str(row["num_cycles"]),
            number(row["tau"]),
            interval(row["tau_interval"]),
            number(row["relative"]),
            interval(row["relative_interval"]),
        )
    console.print(table)
    console.print(f"{result['num_answers']} answers, {result['num_tokens']} tokens", highlight=False)
