"""How far a target's text is from the dense target's, on held-out chats: no decoding, one pass over each chat.

perplexity        exp of the mean negative log-likelihood of the responses' tokens
agreement         share of the response positions at which the likeliest token is the dense target's
reference match   share of the response positions at which the likeliest token is the response's own
share             mean share of the layers that a token runs through
kv share          keys and values that the cache has stored, over those of all tokens in all layers
pass share        mean share of the layers that eight tokens in a row need, as a draft of eight accepted tokens does
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.bench.perplexity import perplexity
from moray.data.ultrachat import BadRow, ChatsConfig, plan_chunks, read_chunk
from moray.errors import DataError
from moray.targets.model import Target
from moray.targets.sparse.cache import SparseCache
from moray.text import ChatTokenizer

_PASS_TOKENS = 8


@dataclass(frozen=True)
class Text:
    """One tokenised chat."""

    tokens: Int[Tensor, " seq"]
    predicts: Bool[Tensor, " seq"]
    """Positions whose next token is a response token."""


@dataclass(frozen=True)
class Quality:
    """One target on all texts."""

    perplexity: float
    agreement: float
    reference_match: float
    share: float
    kv_share: float
    pass_share: float
    num_tokens: int
    """Response tokens."""


def read_texts(
    path: str, tokenizer: ChatTokenizer, limit: int | None, max_length: int, num_skipped: int = 0
) -> list[Text]:
    """The first chats of a file, after `num_skipped` others.

    Raises:
        ConfigError: the file does not exist.
        DataError: no chat has a response.
    """
    texts: list[Text] = []
    num_left = num_skipped
    for chunk in plan_chunks(ChatsConfig(path=path)):
        for chat in read_chunk(chunk):
            if limit is not None and len(texts) == limit:
                return texts
            if isinstance(chat, BadRow):
                continue
            if num_left:
                num_left -= 1
                continue
            encoded = tokenizer.encode_chat(chat.messages, max_length)
            mask = torch.from_numpy(encoded.response_mask)
            predicts = torch.zeros_like(mask)
            predicts[:-1] = mask[1:]
            if predicts.any():
                texts.append(Text(torch.from_numpy(encoded.tokens).long(), predicts))
    if not texts:
        raise DataError(f"chats '{path}' holds no chat with a response after {num_skipped} chats; give others")
    return texts


@torch.inference_mode()
def measure_quality(
    target: Target,
    texts: Sequence[Text],
    dense_best: Sequence[Int[Tensor, " positions"]] | None,
    num_dense_layers: int | None = None,
) -> tuple[Quality, list[Int[Tensor, " positions"]]]:
    """Measure one target.

    Args:
        target: dense or sparse.
        texts: the chats.
        dense_best: likeliest tokens of the dense target at the response positions of each text; None for the dense
            target itself.
        num_dense_layers: of the dense target, which shares are over; None for as many as the target has. A target
            whose layers were dropped has fewer.

    Returns:
        its figures, and its own likeliest tokens.
    """
    num_layers = target.spec.num_layers
    num_dense = num_layers if num_dense_layers is None else num_dense_layers
    losses: list[float] = []
    best: list[Tensor] = []
    num_equal, num_right, num_run, num_stored, num_possible = 0, 0, 0, 0, 0
    num_read, num_readable = 0, 0
    for index, text in enumerate(texts):
        tokens = text.tokens.to(target.device)[None]
        positions = torch.arange(tokens.shape[1], device=target.device)[None]
        cache = target.new_cache(tokens.shape[1])
        output = target.forward(tokens, positions, None, cache)
        cache.commit(tokens.shape[1])
        logits = target.logits(output.last[0, text.predicts]).float()
        wanted = text.tokens[1:][text.predicts[:-1]].to(target.device)
        losses += torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
        best.append(logits.argmax(dim=-1).cpu())
        num_equal += int((best[-1] == (best[-1] if dense_best is None else dense_best[index])).sum())
        num_right += int((best[-1] == wanted.cpu()).sum())
        num_tokens, num_passes = tokens.shape[1], -(-tokens.shape[1] // _PASS_TOKENS)
        num_run += num_tokens * num_layers if output.routes is None else int(output.routes.sum())
        num_stored += cache.num_stored if isinstance(cache, SparseCache) else num_tokens * num_layers
        num_read += num_passes * num_layers if output.routes is None else _num_read(output.routes[:, 0])
        num_possible += num_tokens * num_dense
        num_readable += num_passes * num_dense
    found = perplexity(losses)
    assert found is not None
    shares = num_run / num_possible, num_stored / num_possible, num_read / num_readable
    return Quality(found, num_equal / len(losses), num_right / len(losses), *shares, len(losses)), best


def _num_read(routes: Bool[Tensor, "layers seq"]) -> int:
    """Layers that passes over eight tokens in a row read, over all passes."""
    return sum(int(part.any(dim=1).sum()) for part in routes.split(_PASS_TOKENS, dim=1))
