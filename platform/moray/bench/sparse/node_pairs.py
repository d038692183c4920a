"""Collects what a predictor of accepted nodes learns from: drafts of real answers, and which of their nodes came true.

pair    (hidden state that enters layer K at the node, whether the node is on the accepted path)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moray.data.ultrachat import BadRow, ChatsConfig, plan_chunks, read_chunk
from moray.decoding.engine.node_selection import NodeSelector
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.progress import Progress
from moray.targets.model import Target
from moray.text import ChatTokenizer
from moray.trees.shapes import AnyShape
from moray.trees.tree import TokenTree


@dataclass
class DraftPairs:
    """Nodes of the drafts of many prompts, roots left out."""

    hidden: list[Float[Tensor, "nodes hidden"]] = field(default_factory=list)
    is_accepted: list[list[bool]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """Which prompt each draft belongs to."""

    @property
    def num_nodes(self) -> int:
        """Over all drafts."""
        return sum(map(len, self.is_accepted))

    def split(self, held_out: float) -> tuple["Pairs", "Pairs"]:
        """Pairs to learn from and pairs to test on, none from the same prompt.

        Raises:
            DataError: one part has no accepted node, or no refused one.
        """
        first = min((1.0 - held_out) * (1 + max(self.prompts, default=0)), max(self.prompts, default=0))
        parts = []
        for wants_late in (False, True):
            chosen = [index for index, prompt in enumerate(self.prompts) if (prompt >= first) == wants_late]
            labels = [one for index in chosen for one in self.is_accepted[index]]
            if len(set(labels)) < 2:
                raise DataError(
                    f"{len(labels)} {'held-out' if wants_late else 'training'} nodes are all accepted, or all refused: "
                    "give more prompts (max_chats), or a better drafter"
                )
            parts.append(Pairs(torch.cat([self.hidden[index] for index in chosen]), torch.tensor(labels)))
        return parts[0], parts[1]


@dataclass(frozen=True)
class Pairs:
    """What the regression reads."""

    hidden: Float[Tensor, "nodes hidden"]
    is_accepted: Bool[Tensor, " nodes"]


class _Recorder(NodeSelector):
    """Keeps all nodes, and what it saw of the last draft."""

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.last: tuple[TokenTree, Tensor] | None = None

    def choose(self, tree: TokenTree, hidden: Float[Tensor, "nodes hidden"]) -> list[int]:
        """See `NodeSelector.choose`."""
        self.last = tree, hidden.clone()
        return list(range(tree.num_nodes))


def first_questions(path: str, tokenizer: ChatTokenizer, num_skipped: int, limit: int | None) -> Iterator[list[int]]:
    """What comes before the first answer of each chat in a file, as a prompt; `num_skipped` chats are left out."""
    count = 0
    for chunk in plan_chunks(ChatsConfig(path=path, skip_chats=num_skipped)):
        for chat in read_chunk(chunk):
            if limit is not None and count == limit:
                return
            if not isinstance(chat, BadRow):
                count += 1
                yield tokenizer.encode_prompt(
                    [*takewhile(lambda message: message["role"] != "assistant", chat.messages)]
                )


def collect_pairs(
    target: Target,
    drafter: Drafter,
    shape: AnyShape,
    layer: int,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    num_nodes: int,
    eos_ids: Sequence[int],
) -> DraftPairs:
    """Answer prompts greedily until there are `num_nodes` nodes, or no more prompts."""
    recorder, pairs = _Recorder(layer), DraftPairs()
    decoder = SpeculativeDecoder(target, drafter, shape, selector=recorder)
    room = decoder.max_model_len - max_new_tokens
    with Progress("draft", num_nodes, unit="nodes") as progress:
        for index, prompt in enumerate(prompts):
            if pairs.num_nodes >= num_nodes:
                break
            if len(prompt) >= room:
                continue

            def on_tokens(tokens: list[int], _: int, index: int = index) -> None:
                if recorder.last is None:
                    return
                (tree, hidden), recorder.last = recorder.last, None
                labels = on_path(tree, tokens)
                pairs.hidden.append(hidden[1:].float().cpu())
                pairs.is_accepted.append(labels[1:])
                pairs.prompts.append(index)
                progress.advance(len(labels) - 1)

            decoder.generate(prompt, SamplingParams(), max_new_tokens, eos_ids, on_tokens)
            recorder.last = None
    return pairs


def on_path(tree: TokenTree, emitted: Sequence[int]) -> list[bool]:
    """Which nodes the emitted tokens walk through, from the root on."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    found = [False] * len(tokens)
    found[0], at = True, 0
    for token in emitted:
        below = [node for node in range(1, len(tokens)) if parents[node] == at and tokens[node] == token]
        if not below:
            break
        at = below[0]
        found[at] = True
    return found
