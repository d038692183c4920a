"""Makes a log of continuations that another program has written: those of "Decoding Speculative Decoding".

Its released code keeps a target's greedy continuations as printed tensors, one for each prompt of a file of JSON Lines:

    tensor([[ 1576, 29871,  ...
               306,   526]], device='cuda:0')
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moray.bench.replay.configs import ImportConfig
from moray.bench.replay.log import LOG_FILE, Continuation, LogHeader, as_line, count_tokens, write_target
from moray.bench.replay.record import write_head, write_taps
from moray.bench.specbench import Question, read_questions
from moray.decoding.params import SamplingParams
from moray.errors import ConfigError, DataError, MismatchError
from moray.progress import Progress
from moray.provenance import replace_file
from moray.targets.model import Target
from moray.targets.spec import TargetSpec
from moray.text import ChatTokenizer

_BEGIN, _END = "tensor([[", "]]"


def import_log(config: ImportConfig) -> dict[str, Any]:
    """Write the log; with a target also what drafters read of it.

    Raises:
        ConfigError: a file, the tokenizer or the target cannot be read.
        DataError: the outputs are not printed tensors, there are more of them than prompts, or they hold tokens that
            the tokenizer does not have.
        MismatchError: `output` holds another log.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    source = config.target.model if config.target is not None else str(config.tokenizer)
    template = "plain" if config.target is None else config.target.template
    tokenizer = ChatTokenizer.load(source, template)
    target = None
    if config.target is not None:
        with Progress(f"load target {config.target.model}"):
            target = Target.load(config.target)
    eos_ids = {*tokenizer.eos_ids, *(() if target is None else target.eos_ids)}
    questions = read_questions(config.prompts)
    highest = max(tokenizer.tokenizer.get_vocab().values())
    num_ids = highest + 1 if target is None else target.spec.vocab_size
    entries = list(_entries(config, questions, tokenizer, eos_ids, num_ids))
    header = LogHeader(
        target="" if target is None else target.spec.fingerprint,
        text_fingerprint=tokenizer.fingerprint,
        params=SamplingParams(),
        eos_ids=tuple(sorted(eos_ids)),
    )
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(map(as_line, [header, *entries]))
    path = folder / LOG_FILE
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise MismatchError(f"'{path}' is another log: give another output")
    agreement = None
    if target is None or config.target is None:
        tokenizer.tokenizer.save_pretrained(folder)
        write_target(folder, None, _spec_of_text(entries, num_ids), 0, "float32")
    else:
        _check_context(entries, target)
        agreement = _greedy_agreement(target, entries)
        write_taps(config, folder, target, entries)
        write_head(config, config.target, folder, target, template)
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return {
        "continuations": len(entries),
        "prompts": len(questions),
        "tokens": count_tokens(entries),
        "agreement": agreement,
        "output": config.output,
    }


def read_tensors(path: Path) -> Iterator[tuple[int, list[int]]]:
    """The rows of a file of printed tensors, each with the number of its first line.

    Raises:
        DataError: it holds no tensor, or one that is cut short, abbreviated by torch, or not made of whole numbers.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"outputs '{path}' cannot be read as text: {error}") from None
    begin, parts, found = 0, list[str](), False
    for number, line in enumerate(lines, 1):
        rest = line
        while rest:
            if not parts:
                before, mark, rest = rest.partition(_BEGIN)
                if "tensor(" in before:
                    raise DataError(
                        f"line {number} of '{path}' has a tensor that does not begin with {_BEGIN}: a row of token ids "
                        "is needed for every prompt"
                    )
                if not mark:
                    break
                begin = number
            inside, mark, after = rest.partition(_END)
            parts.append(inside)
            rest = after
            if not mark:
                break
            found = True
            for row in " ".join(parts).split("],"):
                yield begin, _numbers(row.replace("[", " "), path, begin)
            parts = []
    if parts:
        raise DataError(f"the tensor in line {begin} of '{path}' is cut short: copy the file again")
    if not found:
        raise DataError(f"'{path}' holds no tensor([[...]]): give a text file of printed tensors of token ids")


def _numbers(text: str, path: Path, line: int) -> list[int]:
    if "..." in text:
        raise DataError(
            f"the tensor in line {line} of '{path}' was abbreviated with '...': print it after "
            "torch.set_printoptions(threshold=10**9)"
        )
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise DataError(f"the tensor in line {line} of '{path}' is not made of token ids: {error}") from None
    if not found:
        raise DataError(f"the tensor in line {line} of '{path}' is empty: every prompt needs at least one token")
    return found


def _entries(
    config: ImportConfig,
    questions: Sequence[Question],
    tokenizer: ChatTokenizer,
    eos_ids: set[int],
    num_ids: int,
) -> Iterator[Continuation]:
    """Prompts with their continuations, each cut after the token that ends it."""
    path = Path(config.outputs)
    for index, (line, tokens) in enumerate(read_tensors(path)):
        if index == len(questions):
            raise DataError(
                f"'{path}' has more continuations than '{config.prompts}' has prompts ({len(questions)}); the first "
                f"one too many is in line {line}: give the prompts that they were written for"
            )
        strange = [token for token in tokens if not 0 <= token < num_ids]
        if strange:
            raise DataError(
                f"the tensor in line {line} of '{path}' has token {strange[0]}, but the tokenizer or the target has "
                f"only {num_ids}: give those that wrote it"
            )
        end = next((place + 1 for place, token in enumerate(tokens) if token in eos_ids), len(tokens))
        yield Continuation(
            uid=questions[index].question_id,
            sequence=index,
            prompt=tuple(tokenizer.encode_text(questions[index].turns[0])),
            tokens=tuple(tokens[:end]),
            finish_reason="stop" if tokens[end - 1] in eos_ids else "length",
        )


def _check_context(entries: Sequence[Continuation], target: Target) -> None:
    longest = max(entries, key=lambda entry: len(entry.prompt) + len(entry.tokens))
    length = len(longest.prompt) + len(longest.tokens)
    if length > target.spec.max_positions:
        raise ConfigError(
            f"continuation '{longest.uid}' ends at token {length}; target.model holds {target.spec.max_positions}: "
            "give the target that wrote it"
        )


@torch.inference_mode()
def _greedy_agreement(target: Target, entries: Sequence[Continuation]) -> float:
    """Share of the continuations' tokens that are the target's likeliest: 1, up to rounding, if it wrote them."""
    equal = total = 0
    with Progress("compare with the target", len(entries), unit="continuations") as progress:
        for entry in entries:
            tokens = torch.tensor([[*entry.prompt, *entry.tokens]], device=target.device)
            positions = torch.arange(tokens.shape[1], device=target.device)[None]
            hidden = target.forward(tokens, positions, None, target.new_cache(tokens.shape[1])).last
            first = len(entry.prompt)
            best = target.logits(hidden[0, first - 1 : -1]).argmax(dim=-1)
            equal += int((best == tokens[0, first:]).sum())
            total += len(entry.tokens)
            progress.advance()
    return equal / total


def _spec_of_text(entries: Sequence[Continuation], num_ids: int) -> TargetSpec:
    """Stands for the sizes of a target of which only the text is known."""
    longest = max(len(entry.prompt) + len(entry.tokens) for entry in entries)
    return TargetSpec(
        family="llama",
        num_layers=1,
        hidden_size=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=1,
        vocab_size=num_ids,
        max_positions=longest,
        rope_theta=10000.0,
        norm_eps=1e-5,
        fingerprint="",
    )
