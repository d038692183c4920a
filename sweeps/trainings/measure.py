"""Measures trained drafters in a Ray task: plain decoding and speculation in turn."""

from dataclasses import replace
from pathlib import Path

from moray.bench.configs import EvaluateConfig
from moray.bench.runner import Measurement, Method, Runner
from moray.drafters.base import Drafter
from moray.targets.model import Target
from moray.trees.shapes import AdaptiveShape
from sweeps.tuning.figures import Answer, figures
from sweeps.tuning.records import MeasuredFigures


def measure(evaluation: str, gpus: float, rounds: int, batch_size: int = 1) -> dict[str, MeasuredFigures]:
    """Measure every drafter of an evaluation (JSON) with one tree; returns figures and answers by drafter name.

    Runs in a Ray task. Every method decodes each prompt `rounds` times, greedily and therefore with the same answer,
    and the fastest time counts, because other load such as parallel trials can only make it slower. With a batch size
    above 1, speeds are those of the whole batch, and each round over all prompts counts as one answer.

    Raises:
        DataError: no prompt fits into the context, or fewer than `batch_size` do.
    """
    from moray.bench.loading import load_target, nothing_fits
    from moray.drafters.loading import load_drafters

    config = EvaluateConfig.model_validate_json(evaluation)
    device = "cuda" if gpus else "cpu"  # overrides the target's setting, because other GPUs are for the workers
    config = config.model_copy(update={"target": config.target.model_copy(update={"device": device})})
    questions, tokenizer, target = load_target(config)
    drafters: dict[str, Drafter] = load_drafters(config.drafters, target, tokenizer)
    runner = Runner(target, drafters, tokenizer, config)
    for _ in range(rounds):
        for _ in runner.ask(questions):
            pass
    if not runner.measurement.asked:
        raise nothing_fits(config.questions, runner.max_model_len)
    drafted = runner.measurement.methods[1:]
    found = {
        method.name: row
        for method, row in zip(drafted, figures(fastest(runner.measurement, rounds), config), strict=True)
    }
    if batch_size > 1:
        prompts = [tokenizer.encode_prompt([{"role": "user", "content": one.turns[0]}]) for one in questions]
        eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
        for name, drafter in drafters.items():
            batched = _batch_figures(target, drafter, prompts, eos_ids, config, rounds, batch_size)
            found[name] = {**found[name], **batched}
    return found


def _batch_figures(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    eos_ids: frozenset[int],
    config: EvaluateConfig,
    rounds: int,
    batch_size: int,
) -> MeasuredFigures:
    """Figures of batched decoding that replace those of a single sequence. They leave `lossless` as it is: sums depend
    on the shape of the batch, so near ties may fall either way (`equal_share` is the share of equal answers)."""
    from pipelines.benchmarks.batch_speedup import measure_batch_speedup

    (shape,) = config.trees
    assert not isinstance(shape, AdaptiveShape), "refused by DecodingConfig"
    fitting = [prompt for prompt in prompts if len(prompt) + config.max_new_tokens <= config.max_model_len]
    measured = measure_batch_speedup(
        target, drafter, shape, fitting, config.max_new_tokens, batch_size, eos_ids, config.sampling, rounds=rounds
    )
    emitted, tokens = measured.tau or 0.0, measured.num_tokens
    return {
        "tau": measured.tau,
        "tau_spread": None,
        "speedup": measured.speedup_vs_plain,
        "speedup_spread": list(measured.speedup_quartiles),
        "tokens_per_second": measured.drafted_tokens_per_second,
        "equal_share": measured.equal_share,
        "num_prompts": measured.num_prompts,
        "num_tokens": tokens,
        "answers": [Answer(tokens, after, before, 1, emitted).row() for before, after in measured.round_seconds],
    }


def fastest(measurement: Measurement, rounds: int) -> Measurement:
    """For each method and prompt, keep the fastest of its `rounds` answers."""
    count = len(measurement.asked) // rounds

    def best_of(method: Method) -> Method:
        def seconds(index: int) -> float:
            return method.generations[index].seconds + method.generations[index].prefill_seconds

        chosen = [min(range(first, len(method.generations), count), key=seconds) for first in range(count)]
        lossless = [all(method.lossless[first::count]) for first in range(count)]
        return replace(method.only(chosen), lossless=lossless)

    methods = [best_of(method) for method in measurement.methods]
    return Measurement(methods, measurement.asked[:count], measurement.num_skipped // rounds, measurement.notes)


def folder_key(folder: str) -> str:
    """The name under which `measure` returns the drafter in a folder."""
    return Path(folder).name
