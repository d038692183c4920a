"""Runs the comparison: all engines answer each prompt in turn, while the others are stopped."""

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moray.bench.loading import first_prompts
from moray.bench.peers.answering import PeerRow, Settings
from moray.bench.peers.bandwidth import copy_bandwidth, weight_bytes
from moray.bench.peers.config import INSTALLED, PeerConfig, PeersBenchmarkConfig
from moray.bench.peers.figures import Answers, rows_of
from moray.bench.peers.gguf_file import write_gguf
from moray.bench.peers.process import EngineProcess
from moray.bench.recording import record
from moray.bench.specbench import read_questions
from moray.errors import ConfigError, DataError
from moray.progress import Progress
from moray.targets.model import read_eos_ids
from moray.targets.spec import TargetSpec, read_spec, resolve_folder
from moray.text import ChatTokenizer

_WARM_UP_TOKENS = 16


@dataclass
class _PeerRun:
    """A row's answers, and the process that generates them."""

    answers: Answers
    process: EngineProcess | None = None
    row: int = 0
    """The row's number in that process."""

    @property
    def peer(self) -> PeerConfig:
        return self.answers.peer


def benchmark_peers(config: PeersBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every row that this machine can run; rows that failed carry the reason.

    Raises:
        ConfigError: the target or the questions cannot be read.
        DataError: no row could be measured.
    """
    questions = read_questions(config.questions, config.num_questions)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    folder, spec = resolve_folder(config.target.model), read_spec(config.target.model)
    prompts = first_prompts(questions, tokenizer, spec.max_positions - config.max_new_tokens, config.questions)
    eos_ids = sorted({*read_eos_ids(config.target.model), *tokenizer.eos_ids})
    with Progress("measure the memory's bandwidth", console=console):
        bandwidth = copy_bandwidth(config.threads)
    with ExitStack() as stack:
        runs = _start(config, folder, spec, max(map(len, prompts)), eos_ids, stack, console)
        _ask(config, runs, prompts, eos_ids, console)
    rows = [run.answers for run in runs]
    if all(row.failure for row in rows):
        raise DataError(f"no row could be measured; the first: {rows[0].peer.label}: {rows[0].failure}")
    limits = {dtype: bandwidth / weight_bytes(folder, dtype) for dtype in ("float32", "bfloat16")}
    return {
        "rows": rows_of(rows, limits),
        "copy_bandwidth_bytes_per_second": bandwidth,
        "plain_limit_tokens_per_second": limits,
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
    } | record(config)


def _start(
    config: PeersBenchmarkConfig,
    folder: Path,
    spec: TargetSpec,
    longest_prompt: int,
    eos_ids: list[int],
    stack: ExitStack,
    console: Console,
) -> list[_PeerRun]:
    """Load the engines one after another, each in its own process, which is stopped after loading."""
    runs = [_PeerRun(Answers(peer)) for peer in config.peers]
    groups: dict[tuple[str, ...], list[_PeerRun]] = {}
    for run in runs:
        alone = () if run.peer.engine in INSTALLED else (run.peer.label,)
        groups.setdefault((run.peer.engine, run.peer.dtype, *alone), []).append(run)
    environments = Path(config.environments)
    work = environments / "models" / spec.fingerprint[:16]
    with Progress("start engines", len(groups), unit="engines", console=console) as progress:
        for members in groups.values():
            peer = members[0].peer
            try:
                settings = Settings(
                    model=str(_model_for(peer, folder, spec, work)),
                    work=str(work.absolute()),
                    dtype=peer.dtype,
                    threads=config.threads,
                    max_length=longest_prompt + config.max_new_tokens,
                    eos_ids=eos_ids,
                    rows=[PeerRow(run.peer.drafter, run.peer.depth, run.peer.adaptive) for run in members],
                    template=config.target.template,
                )
                log = environments / "logs" / (peer.label.replace(", ", "-").replace(" ", "-") + ".log")
                process = EngineProcess(peer.engine, _python(peer, environments), asdict(settings), log)
                stack.callback(process.close)
                process.wait_until_loaded(config.start_seconds)
                for number, run in enumerate(members):
                    run.process, run.row, run.answers.version = process, number, process.version
                    run.answers.failure = process.failures.get(number)
            except (ConfigError, DataError) as error:
                for run in members:
                    run.answers.failure = str(error)
            progress.advance(1)
    return runs


def _python(peer: PeerConfig, environments: Path) -> str:
    if peer.engine in INSTALLED:
        return sys.executable
    python = environments / peer.engine / "bin" / "python"
    if not (environments / peer.engine / ".installed").is_file():
        raise ConfigError(f"not installed in '{environments / peer.engine}'; run: make peers")
    return str(python.absolute())


def _model_for(peer: PeerConfig, folder: Path, spec: TargetSpec, work: Path) -> Path:
    if peer.engine != "llama-cpp":
        return folder.absolute()
    path = work / f"{peer.dtype}.gguf"
    if not path.is_file():
        write_gguf(folder, spec, peer.dtype, path)
    return path.absolute()


def _ask(
    config: PeersBenchmarkConfig, runs: list[_PeerRun], prompts: list[list[int]], eos_ids: list[int], console: Console
) -> None:
    """Ask all rows in turn for each prompt, reversing the order every other time; skip a row once it has failed."""
    with Progress("answer", len(prompts) * len(runs), unit="answers", console=console) as progress:
        for run in runs:
            _answer(config, run, prompts[0][::-1], _WARM_UP_TOKENS)  # shares no prefix with any prompt
        for number, prompt in enumerate(prompts):
            for run in runs if number % 2 == 0 else reversed(runs):
                found = _answer(config, run, prompt, config.max_new_tokens)
                if found is not None:
                    tokens, seconds = found
                    # Some engines include the end-of-sequence token in the answer, others do not.
                    run.answers.tokens.append(tokens[:-1] if tokens and tokens[-1] in eos_ids else tokens)
                    run.answers.seconds.append(seconds)
                    run.answers.drafted.append(run.process.drafted if run.process else None)
                progress.advance(1)


def _answer(
    config: PeersBenchmarkConfig, run: _PeerRun, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], float] | None:
    if run.process is None or run.answers.failure is not None:
        return None
    try:
        return run.process.answer(run.row, prompt, max_new_tokens, config.answer_seconds)
    except DataError as error:
        run.answers.failure = str(error)
        return None
