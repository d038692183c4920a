"""One trial: a trained drafter decodes with one tree and one draft vocabulary, and each rung asks more questions. Runs
in a Ray Tune actor, which keeps the target loaded for later trials.

Every answer is stored at once with its timings, and the figures of a rung cover all answers so far. A killed trial
therefore resumes with the next question.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from ray import tune

from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts
from moray.bench.answers import open_answers
from moray.bench.evaluation import measurement_fingerprints
from moray.bench.loading import load_target, nothing_fits
from moray.bench.runner import Runner
from moray.bench.specbench import Question
from moray.drafters.base import Drafter
from moray.drafters.loading import load_drafters
from moray.errors import DataError, MorayError, UnreachableError
from moray.targets.model import Target
from moray.text import ChatTokenizer
from moray.trees.shapes import ChainShape
from sweeps.decoding.combinations import Combination, Limits, combine
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.tuning.figures import figures
from sweeps.tuning.folders import ENDED, trial_folder
from sweeps.tuning.records import MeasuredFigures, TrialRow
from sweeps.tuning.spaces import Choices

Ask = Callable[[int], list[MeasuredFigures]]
"""ask(count) returns the figures of all combinations over the first `count` questions."""


def run_shape(choices: Choices, config: str, limits: Limits, sizes: Sequence[int], progress_actor: Any) -> None:
    """Ask the questions of each rung and report it to Ray Tune, until Tune stops this process or the last rung is done.

    Our own errors end the trial and are recorded in its folder; errors of the machine are raised, so that Tune retries.

    Args:
        choices: the choices as the searcher drew them.
        config: the sweep's configuration as JSON.
        limits: limits of the drafter.
        sizes: number of questions by rung.
        progress_actor: the sweep's progress actor.
    """
    sweep, combination = TuneDecodingConfig.model_validate_json(config), combine(choices, limits)
    folder = trial_folder(sweep.output, combination.choices)
    has_ended = folder.state in ENDED
    if not has_ended:
        folder.begin(combination.choices, drawn=choices)
    known = {row["rung"]: row for row in folder.rows}
    with ExitStack() as stack:
        ask: Ask | None = None
        for rung, size in enumerate(sizes):
            row: TrialRow | None = known.get(rung)
            if row is None and has_ended:
                return
            if row is None:
                progress_actor.watch.remote(folder.path.name, None, rung)
                try:
                    ask = ask or stack.enter_context(asking(config, [combination], folder.path, sizes[-1]))
                    (found,) = ask(size)
                    objective = found.get(sweep.objective)
                    if objective is None:
                        raise DataError(
                            f"{sweep.objective} is not known of {size} questions, whose answers are one token long: "
                            "give other questions, or fewer rungs"
                        )
                except UnreachableError:  # may be temporary: let Tune retry
                    raise
                except MorayError as error:
                    folder.end("failed", str(error))
                    return
                finally:
                    progress_actor.forget.remote(folder.path.name)
                row = {"rung": rung, "rung_questions": size, **found, "objective": objective}
                folder.add(row)
            if size == sizes[-1]:
                folder.end("finished")
            tune.report({key: value for key, value in row.items() if key != "answers"})


def measure_together(config: str, points: Sequence[Choices], folder: str, count: int) -> list[MeasuredFigures]:
    """Measure several combinations in this process, in turn on the same questions; returns their figures."""
    with asking(config, [Combination.of(choices) for choices in points], Path(folder), count) as ask:
        return ask(count)


@contextmanager
def asking(config: str, combinations: Sequence[Combination], folder: Path, most: int) -> Iterator[Ask]:
    """Load target and drafters, and provide an `Ask` that stores the answers in a folder.

    Args:
        config: the sweep's configuration as JSON.
        combinations: the combinations to ask in turn.
        folder: where to store the answers; created if missing.
        most: maximum number of questions that will be asked.

    Raises:
        MorayError: target, drafters and trees do not fit together, or no question fits into the context.
    """
    sweep = TuneDecodingConfig.model_validate_json(config)
    paths = tuple(dict.fromkeys(sweep.folders[one.drafter] for one in combinations))
    evaluation = sweep.evaluation(paths, tuple(one.tree for one in combinations), str(folder), most)
    questions, tokenizer, target = _load(config, most)
    drafters = _drafters(sweep, combinations, target, tokenizer)
    trees = {one.name: (one.tree,) for one in combinations}
    runner = Runner(target, drafters, tokenizer, evaluation, trees)
    sizes = {f"draft_vocab_size.{one.name}": str(drafters[one.name].vocabulary.size) for one in combinations}
    with open_answers(evaluation, measurement_fingerprints(evaluation, target, tokenizer) | sizes) as log:
        num_asked = 0

        def ask(count: int) -> list[MeasuredFigures]:
            nonlocal num_asked
            turns = sum(len(question.turns) for question in questions[:num_asked])
            for _ in runner.ask(questions[num_asked:count], log, turns):
                pass
            num_asked = count
            if not runner.measurement.asked:
                raise nothing_fits(evaluation.questions, runner.max_model_len)
            return figures(runner.measurement, evaluation)

        yield ask


@lru_cache(maxsize=1)
def _load(config: str, most: int) -> tuple[list[Question], ChatTokenizer, Target]:
    """Load questions, tokenizer and target once per process, shared by all its trials."""
    sweep = TuneDecodingConfig.model_validate_json(config)
    return load_target(sweep.evaluation(sweep.drafters, (ChainShape(type="chain", depth=1),), "", most))


def _drafters(
    sweep: TuneDecodingConfig, combinations: Sequence[Combination], target: Target, tokenizer: ChatTokenizer
) -> dict[str, Drafter]:
    """The drafter of each combination by the combination's name; each pair of drafter and vocabulary is loaded once."""
    loaded: dict[tuple[str, int | None], Drafter] = {}
    for one in combinations:
        if (one.drafter, one.draft_vocab_size) not in loaded:
            folder = sweep.folders[one.drafter]
            (drafter,) = load_drafters((folder,), target, tokenizer).values()
            if one.draft_vocab_size is not None:
                assert sweep.activations is not None
                counts = token_counts(CacheStore(sweep.activations), target.spec.vocab_size)
                drafter.restrict_vocabulary(torch.from_numpy(counts), one.draft_vocab_size)
            loaded[one.drafter, one.draft_vocab_size] = drafter
    return {one.name: loaded[one.drafter, one.draft_vocab_size] for one in combinations}
