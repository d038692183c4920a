"""The tokens that a drafter may propose: all of the target's, or the most frequent ones.

With large vocabularies, projecting onto the vocabulary is most of a draft step (70 % for Llama-3-8B). A drafter that
never proposes rare tokens stays lossless, because the target decides.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.kernels.kinds import Kernels
from moray.targets.kernels.weights import PackedWeight


class DraftVocabulary(nn.Module):
    """Maps draft ids 0..size-1 to the target's token ids, and projects onto them with the target's lm_head."""

    def __init__(self, head: TargetHead, size: int | None) -> None:
        """
        Args:
            head: frozen; never saved.
            size: None for the whole vocabulary, in which draft ids are token ids.
        """
        super().__init__()
        full = head.spec.vocab_size
        if size is not None and size > full:
            raise ConfigError(f"drafter.draft_vocab_size is {size}; the target has {full} tokens: give at most that")
        self._head = head
        self.size = size or full
        self.is_reduced = size is not None
        self.tokens: Tensor | None
        tokens = torch.arange(self.size, device=head.weight.device) if self.is_reduced else None
        self.register_buffer("tokens", tokens)
        self._rows: Tensor | None = None
        self._packed: PackedWeight | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module._forget_rows())

    @property
    def rows(self) -> Float[Tensor, "draft hidden"]:
        """The rows of the target's lm_head that `logits` reads, contiguous in memory: gathering them in every step
        would cost as much as it saves. Gathered at the first use."""
        if self.tokens is None:
            return self._head.weight
        if self._rows is None:
            with torch.inference_mode(False), torch.no_grad():  # training may follow decoding
                self._rows = self._head.weight.index_select(0, self.tokens.to(self._head.weight.device))
        return self._rows

    def choose(self, counts: Int[Tensor, " vocab"]) -> None:
        """Choose the `size` most frequent tokens; among equally frequent ones, those with the lowest ids."""
        if self.tokens is not None:
            order = counts.to(self.tokens.device).sort(descending=True, stable=True).indices
            self.tokens.copy_(order[: self.size].sort().values)
            self._forget_rows()

    def restrict(self, counts: Int[Tensor, " vocab"], size: int) -> Int[Tensor, " kept"]:
        """Keep the `size` most frequent of its tokens, after training.

        Returns:
            the previous draft ids of the tokens that stay.

        Raises:
            ConfigError: it has at most that many tokens already.
        """
        if not 2 <= size < self.size:
            raise ConfigError(
                f"draft_vocab_size is {size}; this drafter has {self.size} tokens: give 2 to {self.size - 1}"
            )
        device = self._head.weight.device
        tokens = torch.arange(self.size, device=device) if self.tokens is None else self.tokens
        order = counts.to(tokens.device)[tokens].sort(descending=True, stable=True).indices
        kept = order[:size].sort().values
        self.tokens, self.size, self.is_reduced = tokens[kept], size, True
        self._forget_rows()
        return kept

    def logits(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any draft"]:
        """Logits of final-norm hidden states over the draft vocabulary."""
        hidden = hidden.to(self._head.weight.dtype)
        if self._packed is not None:
            return self._packed.linear(hidden)
        return F.linear(hidden, self.rows) if self.is_reduced else self._head.logits(hidden)

    def pack(self, kernels: Kernels) -> None:
        """Keep a packed copy of the rows of a reduced vocabulary; those of a whole vocabulary are packed by the
        target."""
        if self.is_reduced and kernels.are_packed:
            self._packed = PackedWeight(self.rows, kernels)

    def select(self, full: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any draft"]:
        """Select the draft vocabulary's columns of a tensor over all tokens."""
        return full if self.tokens is None else full.index_select(-1, self.tokens)

    def expand(self, logits: Float[Tensor, "rows draft"]) -> Float[Tensor, "rows vocab"]:
        """Logits over all of the target's tokens; those outside the draft vocabulary are -inf."""
        if self.tokens is None:
            return logits
        full = logits.new_full((logits.shape[0], self._head.spec.vocab_size), -torch.inf)
        return full.index_copy_(1, self.tokens, logits)

    def to_tokens(self, ids: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Convert draft ids to token ids."""
        return ids if self.tokens is None else self.tokens[ids]

    def _forget_rows(self) -> None:
        self._rows = self._packed = None
