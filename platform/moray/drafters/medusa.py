"""Medusa (arXiv 2401.10774, section 2.1): heads on the target's last hidden state, one per step ahead.

    last verified token  t4, hidden f4;  root t5 comes from the target
    head 1 (f4) proposes t6,  head 2 (f4) proposes t7,  ...     each independent of the others

A head is a residual SiLU block that starts as the identity and a vocabulary projection that starts as the
target's lm_head. All heads are computed at once, so a draft costs the same at any depth up to their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.configs import MedusaConfig
from moray.drafters.learner import DraftOutput, DraftView, Prediction
from moray.targets.head import TargetHead


@dataclass
class MedusaState:
    """One sequence: the target's last hidden state, and the output of all heads for it."""

    last: Tensor  # [hidden]
    logits: Tensor | None = None  # [heads, draft vocab]


class Medusa(BatchedDrafter[MedusaState]):
    """Drafts every level at once, from one hidden state of the target."""

    def __init__(self, config: MedusaConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: MedusaConfig = config
        heads, width = config.num_heads, self.spec.hidden_size
        self.block_weights = nn.ParameterList(torch.zeros(heads, width, width) for _ in range(config.num_blocks))
        self.block_biases = nn.ParameterList(torch.zeros(heads, 1, width) for _ in range(config.num_blocks))
        self.projections = None
        if config.projections == "own":
            self.projections = nn.Parameter(torch.empty(heads, self.vocabulary.size, width))
            self._start_projections(head.weight)

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds(hidden_depths=(-1,))

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        super().choose_vocabulary(counts)
        self._start_projections(self.head.weight)

    def keep_rows(self, kept: Int[Tensor, " kept"]) -> None:
        if self.projections is not None:
            self.projections = nn.Parameter(self.projections.detach()[:, kept])

    @torch.no_grad()
    def _start_projections(self, weight: Tensor) -> None:
        if self.projections is not None:
            self.projections.copy_(self.vocabulary.select(weight.T).T.float())

    def step_weights(self) -> list[Tensor]:
        """All heads run at once, in the first step of a draft."""
        return [*self.parameters(), *([] if self.projections is not None else [self.vocabulary.rows])]

    def observe(self, taps: Taps) -> Memory:
        return {"feature": taps.hidden[-1]}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        real = batch.taps.hidden[-1].to(self.block_weights[0].dtype)
        rows, seq, width = real.shape
        hidden = self.run_block(self._blocks, real.reshape(1, rows * seq, width)).view(-1, rows, seq, width)
        column = torch.arange(seq, device=real.device).expand(rows, seq)
        predictions = []
        own = [()] * self.config.num_heads if self.projections is None else [(w,) for w in self.projections.unbind()]
        # Weights that add up to 1, so that the sum over heads is still a mean, and 1 - its rejection a probability.
        shares = [self.config.decay**index for index in range(self.config.num_heads)]
        for index, share in enumerate(shares):
            steps = index + 1  # head `index` reads position i - steps to predict the token after i
            ahead = F.pad(hidden[index, :, : max(0, seq - steps)], (0, 0, min(steps, seq), 0))
            start = torch.where(column >= steps, column - steps, column)
            predictions.append(Prediction(ahead, start, self._project, share / sum(shares), own[index]))
        return DraftOutput(tuple(predictions))

    def _blocks(self, x: Float[Tensor, "one rows hidden"]) -> Float[Tensor, "heads rows hidden"]:
        """x + SiLU(W x + b), block after block, for all heads together."""
        for weight, bias in zip(self.block_weights, self.block_biases, strict=True):
            x = x + F.silu(torch.matmul(x, weight.transpose(1, 2)) + bias)
        return x

    def _project(
        self, hidden: Float[Tensor, "rows hidden"], own: Float[Tensor, "draft hidden"] | None = None
    ) -> Float[Tensor, "rows draft"]:
        return self.vocabulary.logits(hidden) if own is None else F.linear(hidden, own.to(hidden.dtype))

    def new_state(self, max_model_len: int, max_expanded: int) -> MedusaState:
        return MedusaState(self.block_weights[0].new_zeros(self.spec.hidden_size))

    def reset(self, state: MedusaState) -> None:
        state.logits = None

    def extend(self, state: MedusaState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        state.last = memory["feature"][0, -1].to(self.block_weights[0].dtype)
        state.logits = None

    def score(
        self,
        states: Sequence[MedusaState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        new = [state for state in states if depth == 0 or state.logits is None]
        if new:
            self._run_heads(new)
        logits = torch.stack([state.logits[depth] for state in states if state.logits is not None])
        return self.vocabulary.expand(logits)[:, None].expand(-1, tokens.shape[1], -1)

    def _run_heads(self, states: Sequence[MedusaState]) -> None:
        hidden = self._blocks(torch.stack([state.last for state in states])[None])
        if self.projections is None:
            logits = self.vocabulary.logits(hidden)
        else:
            logits = torch.matmul(hidden, self.projections.transpose(1, 2))
        for state, own in zip(states, logits.unbind(1), strict=True):
            state.logits = own
