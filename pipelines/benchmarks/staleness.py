"""How tau depends on stale memory: decoding with drafts whose memory ends some tokens before the root.

Each lag decodes all answers on the engine, with drafts from `StaleDrafts`: for the last `lag` tokens before the root,
the drafter has only the token ids and not their memory.

    text          t0 .. t4   t5   t6   t7        t0..t4 and their memory given to `extend`, t7 the root, lag 2
    step          level 0: t5  level 1: t6  level 2: t7  level 3: d1  level 4: d2     the draft is d1 d2 d3

In float32 the answers are the same at every lag, because decoding is greedy and lossless. Running ahead drafts with
memory like this (see `decoding.remote.ahead`); a lag of 0 is ordinary decoding.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
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
from moray.decoding.engine.draft_source import DraftJob, LocalDrafts
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.generation import Generation, tau
from moray.decoding.params import SamplingParams
from moray.drafters.base import Drafter, Memory
from moray.drafters.common.rows import on_device
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError, DataError
from moray.progress import track
from moray.targets.model import Target
from moray.text import ChatTokenizer
from moray.trees.shapes import ChainShape
from moray.trees.tree import TokenTree, chain_of

_GREEDY = SamplingParams()


class StaleDrafts(LocalDrafts):
    """Greedy chains from a drafter whose memory ends `lag` tokens before the root."""

    def __init__(self, drafter: Drafter, max_model_len: int, depth: int, lag: int) -> None:
        """
        Args:
            drafter: may be shared.
            max_model_len: maximum number of tokens of a sequence.
            depth: maximum number of tokens of a chain.
            lag: number of tokens before the root without memory; a prompt must be longer.

        Raises:
            ConfigError: the drafter cannot draft that deep.
        """
        check_depth(drafter, depth, lag)
        super().__init__(drafter, max_model_len, depth + lag)
        self._lag = lag
        self._held: dict[int, tuple[Tensor, Memory]] = {}
        """Tokens of a sequence that the drafter's state does not have yet, and their memory."""
        self._num_kept: dict[int, int] = {}
        """How many nodes of a sequence's last draft were accepted since, root included."""
        self._num_expanded: dict[int, int] = {}
        """Levels of a sequence's last draft that its state holds, counted from the first held token."""

    def num_known(self, number: int) -> int:
        return super().num_known(number) + (self._held[number][0].shape[0] if number in self._held else 0)

    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        if number in self._held:
            held_tokens, held_memory = self._held[number]
            tokens = torch.cat((held_tokens, tokens))
            memory = {name: torch.cat((rows, memory[name]), dim=1) for name, rows in held_memory.items()}
        self._held[number] = tokens, memory
        self._num_kept[number] = self._num_kept.get(number, 0) + num_kept

    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        jobs = [self._jobs.pop(number) for number in numbers if number in self._jobs]
        return {job.number: self._chain(job) for job in jobs}

    def close(self, number: int) -> None:
        super().close(number)
        self._held.pop(number, None)
        self._num_kept.pop(number, None)
        self._num_expanded.pop(number, None)

    def _chain(self, job: DraftJob) -> TokenTree:
        """The draft below a root: through the tokens without memory level by level, then the likeliest tokens."""
        late = self._give_all_but_lag(job.number)
        root = on_device(late.device, [job.root])
        path = torch.cat((late, root))
        drafted: list[Tensor] = []
        for level in range(self._lag + job.shape.depth):
            token = path[level : level + 1] if level <= self._lag else drafted[-1]
            logits = self.drafter.step(self._states[job.number], token, None, level)
            if logits is None:
                break
            self._num_expanded[job.number] = level + 1
            if level >= self._lag:
                drafted.append(logits.argmax(dim=-1))
        return chain_of(torch.cat((root, *drafted)))

    def _give_all_but_lag(self, number: int) -> Int[Tensor, " lag"]:
        """Give a sequence's state all tokens but the last `lag`, which are returned."""
        tokens, memory = self._held.pop(number)
        count = tokens.shape[0] - self._lag
        true = self._lag + self._num_kept.pop(number, 0)  # of the last draft, which began with just these tokens
        kept = min(count, true, self._num_expanded.pop(number, 0))
        super().extend(number, tokens[:count], {name: rows[:, :count] for name, rows in memory.items()}, kept)
        self._held[number] = tokens[count:], {name: rows[:, count:] for name, rows in memory.items()}
        return tokens[count:]


def benchmark_staleness(config: StalenessConfig, console: Console) -> dict[str, Any]:
    """Measure tau at every lag for each drafter.

    Raises:
        ConfigError: a drafter cannot draft as deep as depth and lag together require.
        DataError: no prompt fits into the context and is longer than the largest lag, or no answer needs a draft.
    """
    questions, tokenizer, target = load_target(config)
    drafters = load_drafters(config.drafters, target, tokenizer)
    max_model_len = min(target.spec.max_positions, config.max_model_len)
    runner = runner_for(target, max_model_len, config.depth)
    for drafter in drafters.values():
        check_depth(drafter, config.depth, max(config.lags))
    prompts = _prompts(config, max_model_len, questions, tokenizer)
    if not prompts:
        raise nothing_fits(config.questions, max_model_len - config.max_new_tokens)
    eos_ids = {*target.eos_ids, *tokenizer.eos_ids}
    rows, num_tokens = [], 0
    for name, drafter in drafters.items():
        by_lag = {lag: stale_decoder(target, drafter, config.depth, lag, max_model_len, runner) for lag in config.lags}
        answers: dict[int, list[Generation]] = {lag: [] for lag in config.lags}
        for prompt in track(prompts, name, len(prompts), unit="answers", console=console):
            for lag, decoder in by_lag.items():
                answers[lag].append(decoder.generate(prompt, _GREEDY, config.max_new_tokens, eos_ids))
        if not any(answer.num_cycles for answer in answers[0]):
            raise DataError(f"every answer to questions '{config.questions}' ends with its first token; give others")
        rows += _rows(name, answers)
        num_tokens = sum(len(answer.tokens) for answer in answers[0])
    return {"rows": rows, "num_answers": len(prompts), "num_tokens": num_tokens} | record(config)


def check_depth(drafter: Drafter, depth: int, lag: int) -> None:
    """Refuse a drafter that cannot draft `depth` tokens below a root, `lag` tokens after its memory ends.

    Raises:
        ConfigError: says how deep it drafts.
    """
    if drafter.max_depth is not None and drafter.max_depth < depth + lag:
        raise ConfigError(
            f"drafters holds a {type(drafter).__name__.lower()}, which drafts {drafter.max_depth} levels; depth "
            f"{depth} and a lag of {lag} need {depth + lag}: leave it out, or give less of either"
        )


def stale_decoder(
    target: Target, drafter: Drafter, depth: int, lag: int, max_model_len: int, runner: TargetRunner | None = None
) -> SpeculativeDecoder:
    """A decoder whose drafter drafts chains of `depth` tokens with memory that ends `lag` tokens before the root.

    Raises:
        ConfigError: the drafter cannot draft that deep.
    """
    drafts = StaleDrafts(drafter, max_model_len, depth, lag)
    chain = ChainShape(type="chain", depth=depth)
    return SpeculativeDecoder(target, drafter, chain, max_model_len, runner, drafts=drafts)


def _prompts(
    config: StalenessConfig, max_model_len: int, questions: Collection[Question], tokenizer: ChatTokenizer
) -> list[list[int]]:
    """The first turns that fit into the context and are longer than every lag."""
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    return [prompt for prompt in prompts if max(config.lags) < len(prompt) <= max_model_len - config.max_new_tokens]


def _rows(name: str, answers: Mapping[int, Sequence[Generation]]) -> list[dict[str, Any]]:
    """Rows with tau over all answers at each lag, and intervals from resampling answers."""
    pairs = {
        lag: [(float(sum(one.emitted)), float(one.num_cycles)) for one in of_lag] for lag, of_lag in answers.items()
    }
    taus = {lag: tau(of_lag) for lag, of_lag in answers.items()}
    return [
        {
            "drafter": name,
            "lag": lag,
            "num_cycles": sum(one.num_cycles for one in answers[lag]),
            "tau": taus[lag],
            "tau_interval": ratio_interval(pairs[lag]),
            "relative": taus[lag] / taus[0],
            "relative_interval": ratio_of_ratios_interval(pairs[lag], pairs[0]),
        }
        for lag in answers
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
