"""The demo target's input: its tokenizer, and its chats as rows of tokens without padding.

The tokenizer is a byte-level BPE trained on the chats themselves, with a chat template that marks what the assistant
says. This module does not know the model or how it is trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moray.targets.demo.chats import DemoChat
from moray.targets.demo.config import DemoModelConfig

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


@dataclass(frozen=True)
class PackedRows:
    """Whole chats concatenated in rows of equal length, so that no compute is spent on padding."""

    tokens: Int[Tensor, "row token"]
    is_response: Bool[Tensor, "row token"]
    positions: Int[Tensor, "row token"]
    """Start at zero for each chat."""

    def batch(self, step: int, num_rows: int) -> "PackedRows":
        """Rows of one step; after the last row it starts again."""
        index = torch.arange(step * num_rows, (step + 1) * num_rows) % len(self.tokens)
        return PackedRows(self.tokens[index], self.is_response[index], self.positions[index])

    def share(self, rank: int, size: int) -> "PackedRows":
        """Every `size`-th row, for one of `size` processes."""
        return PackedRows(self.tokens[rank::size], self.is_response[rank::size], self.positions[rank::size])


def build_tokenizer(chats: Sequence[DemoChat], config: DemoModelConfig) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the chats' text and give it special tokens and a chat template."""
    bpe = Tokenizer(models.BPE())
    # One token per digit: the model then adds digit by digit, and numbers take no vocabulary.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for chat in chats for turn in chat.turns for text in turn), trainer)
    pad, begin, end, *roles = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, chats: Sequence[DemoChat], row_length: int, num_tokens: int) -> PackedRows:
    """Concatenate chats in rows of `row_length` until there are `num_tokens` tokens or no chats are left.

    A chat that does not fit into the rest of a row starts the next one; only a chat longer than a whole row is cut. The
    few remaining positions of a row are padding and are never trained on.
    """
    token_rows: list[list[int]] = [[]]
    response_rows: list[list[int]] = [[]]
    position_rows: list[list[int]] = [[]]
    for tokens, is_response in _encode(tokenizer, chats):
        if len(token_rows[-1]) + len(tokens) > row_length:
            if len(token_rows) * row_length >= num_tokens:
                break
            token_rows.append([])
            response_rows.append([])
            position_rows.append([])
        token_rows[-1] += tokens[:row_length]
        response_rows[-1] += is_response[:row_length]
        position_rows[-1] += range(min(row_length, len(tokens)))
    for row, flags, positions in zip(token_rows, response_rows, position_rows, strict=True):
        missing = row_length - len(row)
        row += [tokenizer.get_vocab()[SPECIAL_TOKENS[0]]] * missing
        flags += [0] * missing
        positions += range(missing)
    return PackedRows(
        torch.tensor(token_rows), torch.tensor(response_rows, dtype=torch.bool), torch.tensor(position_rows)
    )


def _encode(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[DemoChat], chunk: int = 256
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and response mask of each chat, with the template that decoding uses too."""
    for start in range(0, len(chats), chunk):
        conversations = [chat.as_row()["messages"] for chat in chats[start : start + chunk]]
        encoded: Any = tokenizer.apply_chat_template(
            conversations,  # type: ignore[arg-type]
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        yield from zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
