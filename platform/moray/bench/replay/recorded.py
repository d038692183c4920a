"""A target that answers from a log: the engine decodes over it as over a real one, and no weights are read.

    verify    a node whose path follows the recorded text is answered with the token that follows it there
    observe   keys, values and hidden states of accepted tokens come from the log

So acceptance, cycles and the state of drafters are those of live decoding, for every drafter and tree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.targets.head import TargetHead
from moray.targets.model import Target, TargetOutput
from moray.targets.spec import TargetSpec
from moray.trees.tree import TokenTree

_CERTAIN = 1e6
"""Logit of the recorded token, the others' being 0: no noise of a temperature reaches it."""
_NONE = -1


@dataclass(frozen=True)
class RecordedText:
    """One continuation with the taps of its tokens."""

    tokens: tuple[int, ...]
    """Prompt and continuation."""
    kv: Mapping[int, Float[Tensor, "tokens width"]]
    """By layer."""
    hidden: Mapping[int, Float[Tensor, "tokens hidden"]]
    """By depth."""

    def taps(self, needs: TapNeeds) -> Taps:
        """Some of them for all tokens, as a drafter reads them."""
        kv = torch.stack([self.kv[layer] for layer in needs.kv_layers], dim=1)[None] if needs.kv_layers else None
        return Taps(kv, {depth: self.hidden[depth][None] for depth in needs.hidden_depths})


class RecordedTarget(Target):
    """Stands for the target of a log: sizes and logits, without a model."""

    def __init__(self, spec: TargetSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        self.eos_ids = ()
        self.kernels = None

    def logits(self, hidden: Float[Tensor, "*any 1"]) -> Float[Tensor, "*any vocab"]:
        """The recorded next tokens, which `RecordedRunner` passes in place of hidden states, as logits."""
        tokens = hidden[..., 0].long()
        logits = torch.zeros(*tokens.shape, self.spec.vocab_size, device=hidden.device)
        return logits.scatter_(-1, tokens.clamp(min=0)[..., None], _CERTAIN * (tokens != _NONE)[..., None].float())


class HeadOfText(TargetHead):
    """Stands for the head of a target of which only the text is known: sizes alone, for drafters that read no more."""

    def __init__(self, spec: TargetSpec, dtype: torch.dtype) -> None:
        self.spec, self.num_layers = spec, 0
        self._weight = torch.empty(0, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """Without elements."""
        return self._weight


class RecordedCache:
    """Stands for the target's cache of one sequence: what it would hold is in the log."""

    def __init__(self, spec: TargetSpec, num_slots: int) -> None:
        self.num_layers, self.num_slots = spec.num_layers, num_slots
        self.num_rows, self.width = 0, 0
        self.text: RecordedText | None = None

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        """Divide it into rows."""
        self.num_rows, self.width = self.num_slots // width, width

    def reorder(self, moves: Mapping[int, int], num_slots: int) -> None:
        """There is one sequence, which stays where it is."""

    def flat(
        self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int], layers: Sequence[int]
    ) -> Float[Tensor, "1 new layers width"]:
        """Keys and values of verified tokens as a tap."""
        assert self.text is not None
        (begin,), (count,) = begins, counts
        return torch.stack([self.text.kv[layer][begin : begin + count] for layer in layers], dim=1)[None]


class RecordedRunner:
    """Takes the place of `TargetRunner` for one sequence at a time."""

    def __init__(self, target: RecordedTarget, num_slots: int) -> None:
        self.cache: Any = RecordedCache(target.spec, num_slots)
        self._target = target

    def open(self, text: RecordedText) -> None:
        """The sequence that comes next."""
        self.cache.text = text

    def read(
        self, first_row: int, tokens: Sequence[Sequence[int]], begins: Sequence[int], hidden_depths: Sequence[int] = ()
    ) -> TargetOutput:
        """See `TargetRunner.read`."""
        (new,), (begin,) = tokens, begins
        positions = list(range(begin, begin + len(new)))
        return self._output(positions, [self._next(position) for position in positions], hidden_depths)

    def verify(
        self,
        first_row: int,
        lengths: Sequence[int],
        trees: Sequence[TokenTree],
        hidden_depths: Sequence[int] = (),
        selector: object = None,
    ) -> TargetOutput:
        """See `TargetRunner.verify`. Nodes off the recorded text get no token and no hidden states."""
        (tree,), (length,) = trees, lengths
        text = self._text.tokens
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        positions: list[int] = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            position = length if node == 0 else (_NONE if positions[parent] == _NONE else positions[parent] + 1)
            is_text = position < len(text) and position != _NONE and text[position] == token
            positions.append(position if is_text else _NONE)
        following = [_NONE if position == _NONE else self._next(position) for position in positions]
        return self._output(positions, following, hidden_depths)

    def keep(self, first_row: int, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """The log holds the accepted tokens."""

    def path_index(self, path: Sequence[int]) -> Int[Tensor, " kept"]:
        """See `TargetRunner.path_index`."""
        return torch.tensor([0, *path], device=self._target.device)

    def to_device(self, rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows most"]:
        """See `TargetRunner.to_device`."""
        most = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows], device=self._target.device)

    @property
    def _text(self) -> RecordedText:
        assert self.cache.text is not None, "open a text first"
        return self.cache.text

    def _next(self, position: int) -> int:
        tokens = self._text.tokens
        return tokens[position + 1] if position + 1 < len(tokens) else _NONE

    def _output(self, positions: Sequence[int], following: Sequence[int], hidden_depths: Sequence[int]) -> TargetOutput:
        index = torch.tensor(positions, device=self._target.device).clamp(min=0)
        last = torch.tensor(following, dtype=torch.float64, device=self._target.device)[None, :, None]
        return TargetOutput(last, {depth: self._text.hidden[depth][index][None] for depth in hidden_depths})
