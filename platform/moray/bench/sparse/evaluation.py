"""Evaluates sparse targets: quality of each target on the same chats, and speed of each decoding method, in turn."""

from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.loading import first_prompts
from moray.bench.reports.wording import number, times
from moray.bench.sparse.configs import SparseEvaluationConfig
from moray.bench.sparse.quality import Quality, measure_quality, read_texts
from moray.bench.sparse.speed import DecodingMethod
from moray.bench.specbench import read_questions
from moray.decoding.engine.node_selection import selector_of
from moray.decoding.generate import SpeculativeDecoder
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError, MismatchError
from moray.progress import Progress
from moray.targets.model import Target
from moray.targets.sparse.measured import MEASURED, Measured
from moray.targets.sparse.predictor import load_predictor
from moray.targets.sparse.target import SparseTarget
from moray.text import ChatTokenizer


def evaluate_sparse(config: SparseEvaluationConfig, console: Console) -> dict[str, Any]:
    """Measure all targets and rows, and print both tables.

    Raises:
        ConfigError: a target or drafter cannot be loaded.
        MismatchError: a target has another tokenizer than the first.
        DataError: no chat or question fits.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    names = list(config.targets)
    tokenizers = {name: ChatTokenizer.load(one.model, one.template) for name, one in config.targets.items()}
    first = tokenizers[names[0]]
    for name, tokenizer in tokenizers.items():
        if tokenizer.fingerprint != first.fingerprint:
            raise MismatchError(f"targets.{name} has another tokenizer or template than targets.{names[0]}")
    targets: dict[str, Target] = {}
    with Progress("load targets", len(names)) as progress:
        for name, one in config.targets.items():
            targets[name] = Target.load(one, f"targets.{name}.model")
            progress.advance()
    methods = _methods(config, targets, first)
    quality = _quality(config, targets, first)
    _print_quality(quality, console)
    _decode(config, methods, first)
    rows = [method.figures(methods[0]) for method in methods]
    _print_rows(rows, console)
    _save_measured(targets, quality)
    return {
        "quality": {name: asdict(figures) for name, figures in quality.items()},
        "rows": rows,
        "settings": config.model_dump(mode="json"),
    }


def _quality(
    config: SparseEvaluationConfig, targets: dict[str, Target], tokenizer: ChatTokenizer
) -> dict[str, Quality]:
    texts = read_texts(config.chats, tokenizer, config.max_chats, config.max_length, config.skip_chats)
    found: dict[str, Quality] = {}
    dense_best = None
    num_dense_layers = next(iter(targets.values())).spec.num_layers
    with Progress("perplexity", len(targets)) as progress:
        for name, target in targets.items():
            found[name], best = measure_quality(target, texts, dense_best, num_dense_layers)
            dense_best = best if dense_best is None else dense_best
            progress.advance()
    return found


def _save_measured(targets: dict[str, Target], quality: dict[str, Quality]) -> None:
    """Write what was measured beside each sparse target, so that a server can tell.

    Raises:
        ConfigError: a target's folder cannot be written.
    """
    dense = next(iter(quality.values()))
    for name, target in targets.items():
        if isinstance(target, SparseTarget):
            own = quality[name]
            measured = Measured(
                fingerprint=target.spec.fingerprint,
                share=own.share,
                agreement=own.agreement,
                perplexity=own.perplexity,
                dense_perplexity=dense.perplexity,
                num_tokens=own.num_tokens,
            )
            try:
                measured.save(target.folder)
            except OSError as error:
                reason = f"cannot be written: {error.strerror}; its figures are printed above"
                raise ConfigError(f"targets.{name}: '{target.folder / MEASURED}' {reason}") from None


def _methods(
    config: SparseEvaluationConfig, targets: dict[str, Target], tokenizer: ChatTokenizer
) -> list[DecodingMethod]:
    plain = {
        name: DecodingMethod(name, name, target, SpeculativeDecoder(target, None)) for name, target in targets.items()
    }
    methods = list(plain.values())
    for index, row in enumerate(config.rows):
        target = targets[row.target]
        ((name, drafter),) = load_drafters((row.drafter,), target, tokenizer).items()
        selector = selector_of(target, row.select, row.tree, f"rows[{index}].select")
        decoder = SpeculativeDecoder(target, drafter, row.tree, selector=selector)
        auc = None
        if selector is not None and row.select != "drafter":
            assert isinstance(target, SparseTarget)
            auc = load_predictor(target.folder, target.spec, f"rows[{index}].select").auc
        label = f"{row.target} + {name} {row.tree.name}" + (f" {row.select}" if row.select != "all" else "")
        methods.append(DecodingMethod(label, row.target, target, decoder, plain[row.target], auc))
    return methods


def _decode(config: SparseEvaluationConfig, methods: list[DecodingMethod], tokenizer: ChatTokenizer) -> None:
    questions = read_questions(config.questions, config.num_questions)
    room = min(method.target.spec.max_positions for method in methods) - config.max_new_tokens
    prompts = first_prompts(questions, tokenizer, room, config.questions)
    for method in methods:  # not measured: kernels, costs of adaptive trees
        method.decoder.generate(prompts[0], method.params, 8, tokenizer.eos_ids)
    with Progress("decode", len(methods) * len(prompts) * config.rounds) as progress:
        for turn in range(config.rounds):
            for index, prompt in enumerate(prompts):
                order = methods if turn == 0 else _plain_first(methods[:: -1 if turn % 2 else 1])
                for method in order:
                    method.answer(index, prompt, config.max_new_tokens, tokenizer.eos_ids)
                    progress.advance()


def _plain_first(methods: list[DecodingMethod]) -> list[DecodingMethod]:
    """The same order, but every target alone before its rows with drafters, which are compared with it."""
    return sorted(methods, key=lambda method: method.plain is not None)


def _print_quality(quality: dict[str, Quality], console: Console) -> None:
    table = Table(title="quality beside the dense target", box=box.SIMPLE_HEAD)
    for heading in ("target", "perplexity", "agreement", "reference match", "share of layers", "of KV", "8 tokens"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for name, one in quality.items():
        table.add_row(
            name,
            number(one.perplexity),
            f"{one.agreement:.3f}",
            f"{one.reference_match:.3f}",
            f"{one.share:.3f}",
            f"{one.kv_share:.3f}",
            f"{one.pass_share:.3f}",
        )
    console.print(table)
    console.print("8 tokens: share of the layers that a pass over eight tokens in a row reads", highlight=False)


def _print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    speed = Table(title="speed; lossless is against the row's own target", box=box.SIMPLE_HEAD)
    for heading in ("way", "tokens/s", "speed-up", "tau", "lossless"):
        speed.add_column(heading, justify="left" if heading == "way" else "right")
    work = Table(title="work of the target", box=box.SIMPLE_HEAD)
    for heading in ("way", "layers read", "weights read", "tokens run", "kept nodes", "operations", "as dense"):
        work.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        equal = row["num_answers"] - row["num_different"]
        ties = row["num_different"] - row["num_unexplained"]
        speed.add_row(
            row["name"],
            number(row["tokens_per_second"]),
            times(row["speedup"]),
            f"{row['tau']:.2f}",
            f"{equal} of {row['num_answers']}" + (f", {ties} at a tie" if ties else ""),
        )
        keys = ("layers_read", "weights_read", "rows_run", "kept_nodes", "operations")
        figures = ("" if row[key] is None else f"{row[key]:.2f}" for key in keys)
        work.add_row(row["name"], *figures, f"{row['same_as_dense']} of {row['num_answers']}")
    console.print(speed)
    console.print(work)
    console.print(
        "Speed-ups are over the first target alone, the dense one. Layers and weights read and tokens run are means of "
        "a pass, over all layers and weights of the dense target. Operations are those for each token, over those of "
        "the dense target alone. Kept nodes are verified to the end. As dense: answers equal to the dense target's.",
        highlight=False,
    )
