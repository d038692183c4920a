"""What every drafter does: observe next to the target, propose anywhere, and run one forward pass for training.

One class serves training, single-device decoding, Ray Serve and edge clients. A drafter knows the sizes of its target
(`TargetSpec`) and its frozen head, never the target itself.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.common.decoder_layers import DecoderLayer
from moray.drafters.common.layers import Attention
from moray.drafters.config_base import DrafterConfigBase, TrainableBase
from moray.drafters.learner import DraftOutput, DraftView, Learner
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.kernels.choice import choose_kernels
from moray.targets.kernels.weights import linear_weights, pack_linears
from moray.trees.grow import SelectMany, grow_many
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

Memory = Mapping[str, Float[Tensor, "batch seq width"]]
"""What is sent from target to drafter per verified token: named tensors, flat in their last dimension."""
TAIL = "tail"
"""Name of the tensor of a memory that holds the keys and values of the target's last layers, unchanged. Only drafts
that run those layers read it (see `Drafter.recall`)."""


_LOGGER = logging.getLogger(__name__)

State = TypeVar("State")


class Drafter(Learner, Generic[State]):
    """A small model that proposes token trees; `State` is one sequence's drafting state."""

    def __init__(self, config: DrafterConfigBase, head: TargetHead) -> None:
        super().__init__(config, head)
        self.layer_counts = config.layer_counts
        """The values of N that decoding can choose from in every cycle, cheapest first (see
        `fix_num_target_layers`)."""
        self._has_warned = False

    @property
    def observed(self) -> TapNeeds:
        """Taps that `observe` alone reads; training may need more taps as prediction targets."""
        return self.needs

    @property
    def max_depth(self) -> int | None:
        """Maximum number of levels that it can draft; None for no limit."""
        return self.config.max_depth

    def may_end_early(self, num_tokens: int) -> bool:
        """Whether a draft below a text of `num_tokens`, the draft's own included, may have fewer levels than asked for
        (see `step`)."""
        return True

    @property
    def reads_text_alone(self) -> bool:
        """Whether the scores below a node depend on nothing but the tokens up to it: neither on the target's states,
        nor on how many of the tokens are drafted."""
        return False

    @abstractmethod
    def observe(self, taps: Taps) -> Memory:
        """Turn taps of verified tokens into memory. Runs in the target's process; depends on no other token."""

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        """Predict the target's features and tokens at every position, all positions in parallel.

        Raises:
            ConfigError: the drafter has nothing to train.
        """
        raise ConfigError(f"drafter.type is {type(self).__name__.lower()}, which has nothing to train: evaluate it")

    @abstractmethod
    def new_state(self, max_model_len: int, max_expanded: int) -> State:
        """An empty drafting state for one sequence, preallocated for `max_model_len` tokens and one tree."""

    def set_num_target_layers(self, state: State, num_target_layers: int) -> None:
        """Draft with this value of `layer_counts` from the next `propose_many` on. A state serves all values."""

    def fix_num_target_layers(self, num_target_layers: int) -> None:
        """Draft only with this value of `layer_counts`, in states created from now on.

        Raises:
            ConfigError: the drafter was not trained for it.
        """
        if num_target_layers not in self.config.layer_counts:
            known = ", ".join(map(str, self.config.layer_counts))
            raise ConfigError(
                f"num_target_layers is {num_target_layers}, but this drafter drafts with {known} target layers: "
                "give one of those"
            )
        self.layer_counts = (num_target_layers,)

    @abstractmethod
    def reset(self, state: State) -> None:
        """Empty a state; its memory stays allocated."""

    @abstractmethod
    def extend(self, state: State, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        """Append newly verified tokens and their memory ([1, new, width] each) to a state.

        The first `num_kept` of them are the nodes that the last `propose_many` expanded first, in this order (see
        `TokenTree.num_kept`), so what was computed for them then can be reused.
        """

    def recall(self, state: State, start: int, layer: int, kv: Float[Tensor, "1 new width"]) -> None:
        """Take in a part of the memory that `extend` was given without `TAIL`: the keys and values that one of the
        target's last layers has of verified tokens.

        Until all its last N layers are complete, a state must not draft with N.

        Args:
            state: which has taken in these tokens already.
            start: position of the first of them.
            layer: 1 for the target's last layer, 2 for the one before it, and so on.
            kv: heads as [k_h ; v_h].
        """

    @abstractmethod
    def step(
        self, state: State, tokens: Int[Tensor, " new"], ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> Float[Tensor, "new vocab"] | None:
        """Score the children of tree nodes at `depth` below the root (see `trees.grow.StepMany`)."""

    def step_many(
        self,
        states: Sequence[State],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> tuple[Sequence[int], Float[Tensor, "left new vocab"]]:
        """`step` for several sequences with the same number of nodes each: which of them go on, and their scores. This
        version runs one after the other; see `drafters.common.batched`."""
        seen = [None] * len(states) if ancestors is None else ancestors.expand(len(states), -1, -1).unbind()
        found: dict[int, Tensor] = {}
        for index, (state, new, sees) in enumerate(zip(states, tokens, seen, strict=True)):
            scores = self.step(state, new, sees, depth)
            if scores is not None:
                found[index] = scores
        return list(found), torch.stack([*found.values()]) if found else torch.empty(0, tokens.shape[1], 0)

    def propose_many(
        self, states: Sequence[State], roots: Int[Tensor, " sequences"], shape: GrowableShape, select: SelectMany
    ) -> list[TokenTree]:
        """Draft trees of one shape for several sequences, each the same as if it were drafted alone.

        A root is the token that follows those given to `extend` (see `trees.grow`).
        """
        return grow_many(roots, shape, partial(self._checked_step, states), select)

    def _checked_step(
        self,
        states: Sequence[State],
        asked: Sequence[int],
        tokens: Int[Tensor, "asked new"],
        ancestors: Tensor | None,
        depth: int,
    ) -> tuple[Sequence[int], Tensor]:
        """`step_many` for the states numbered `asked`, as `grow_many` calls it.

        Scores with an unexpected shape propose nothing, because their tokens may be outside the vocabulary. Growing the
        tree checks on the device that scores are finite.
        """
        left, scores = self.step_many([states[number] for number in asked], tokens, ancestors, depth)
        if not left or scores.shape == (len(left), tokens.shape[1], self.spec.vocab_size):
            return left, scores
        self._warn_of(scores, (len(left), tokens.shape[1], self.spec.vocab_size))
        return (), scores

    def _warn_of(self, scores: Tensor, expected: tuple[int, ...]) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "a drafter of type %s gives scores of shape %s where %s (sequences, nodes, vocabulary) is needed: it "
                "proposes nothing; fix its step method",
                *(type(self).__name__.lower(), list(scores.shape), list(expected)),
            )

    def restrict_vocabulary(self, counts: Int[Tensor, " vocab"], size: int) -> None:
        """From now on, propose only the `size` tokens that are most frequent in `counts`, without further training.
        Configuration and saved checkpoints change accordingly. Decoders must be made after this call.

        Scores of the remaining tokens do not change, and the target still decides: only tau can drop.

        Raises:
            ConfigError: the drafter has no draft vocabulary, or already one of at most that size.
        """
        if not isinstance(self.config, TrainableBase):
            name = type(self).__name__.lower()
            raise ConfigError(
                f"draft_vocab_size is {size}; a drafter of type {name} has no draft vocabulary: leave it out"
            )
        self.keep_rows(self.vocabulary.restrict(counts, size))
        self.config = self.config.model_copy(update={"draft_vocab_size": size})

    def keep_rows(self, kept: Int[Tensor, " kept"]) -> None:
        """Keep only these rows of the drafter's own vocabulary projections; a drafter that scores with lm_head has
        none."""

    def cast(self, dtype: torch.dtype) -> None:
        """Draft in the target's precision: half the bytes, and the output does not depend on it. Never for training."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    def pack(self) -> str:
        """Pack the weights for a CPU's kernels if that makes drafting faster, and round them, and what layers pass on,
        to bfloat16 if that is faster still: the output does not depend on it. Never for training, and the last change
        to the weights.

        Returns:
            one line on what was chosen; empty for a small drafter, for which nothing is measured.
        """
        if self.head.weight.device.type != "cpu":
            return ""
        rows = [self.vocabulary.rows] if self.vocabulary.is_reduced else []
        kernels = choose_kernels([*linear_weights(self), *rows], may_round=True)
        pack_linears(self, kernels)
        for part in self.modules():
            if isinstance(part, Attention | DecoderLayer):
                part.pack(kernels)
        self.vocabulary.pack(kernels)
        return kernels.reason

    def step_weights(self) -> list[Tensor]:
        """The weights that one draft step reads, which is its cost in bytes. Shared rows of lm_head count as they are
        stored."""
        return [*self.parameters(), self.vocabulary.rows]


def parents_of(ancestors: Bool[Tensor, "new expanded"]) -> Int[Tensor, " new"]:
    """The parents of the nodes expanded last: for each node, its ancestor with the highest index."""
    new, expanded = ancestors.shape
    above = ancestors[:, : expanded - new]
    return above.shape[1] - 1 - above.flip(1).byte().argmax(dim=1)
