"""The drafter on the device, for one sequence: what it knows, what it drafts, and what it drafts ahead."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.remote.ahead import Ahead, Drawn, Session, VerifiedUpdate
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter, Memory
from moray.trees.shapes import MAX_DEPTH, GrowableShape
from moray.trees.tree import TokenTree


class DeviceDrafter:
    """One drafter with the state of one sequence.

    Of the target's last layers it may know the keys and values of fewer tokens than it knows the memory of: it then
    drafts without these layers (see `can_draft`).
    """

    def __init__(self, drafter: Drafter, name: str, max_model_len: int) -> None:
        """
        Args:
            drafter: with the target's head, but without the target.
            name: that the server has for it.
            max_model_len: maximum number of tokens of a sequence.
        """
        self.drafter = drafter
        self.name = name
        self.layer_counts: tuple[int, ...] = drafter.layer_counts
        """Values of N that it can draft with, cheapest first."""
        self._state = drafter.new_state(max_model_len, MAX_DEPTH)
        self._device = drafter.head.weight.device
        self.begin(SamplingParams(), 0)

    def begin(self, params: SamplingParams, sequence: int) -> None:
        """Forget everything; draft for another sequence."""
        self.drafter.reset(self._state)
        self._session = Session("", self.name, self._state, 0.0)
        self._drawn: Drawn = (params, sequence, None)
        self._sampler = Sampler(params, self.drafter.spec.vocab_size, self._device, sequence)
        self._tree: TokenTree | None = None
        """What was drafted last, if the state still holds its nodes."""
        self._num_known_in_layers = [0] * max(self.layer_counts)
        self._use(self.layer_counts[0])

    def _use(self, num_target_layers: int) -> None:
        """Draft with this N from now on."""
        self._num_target_layers = num_target_layers
        self.drafter.set_num_target_layers(self._state, num_target_layers)

    @property
    def num_known(self) -> int:
        """Tokens whose memory is here."""
        return self._session.known

    @property
    def num_known_in_layers(self) -> tuple[int, ...]:
        """Tokens whose keys and values are here of the target's last layer, of the one before it, and so on."""
        return tuple(self._num_known_in_layers)

    def can_draft(self, num_target_layers: int) -> bool:
        """Whether the keys and values of the target's last N layers are complete."""
        return all(known == self.num_known for known in self._num_known_in_layers[:num_target_layers])

    @torch.inference_mode()
    def learn(self, tokens: list[int], memory: Memory) -> None:
        """Take in verified tokens and their memory (rows [tokens, width]); ends what was drafted ahead."""
        if not tokens:
            return
        session = self._session
        session.guess = session.ahead = None
        num_kept = 0 if self._tree is None else min(self._tree.num_kept(len(tokens) - 1), len(tokens))
        self._tree = None
        known = {name: rows[None].to(self._device) for name, rows in memory.items()}
        session.learn(self.drafter, VerifiedUpdate(torch.tensor(tokens, device=self._device), known, num_kept))

    @torch.inference_mode()
    def recall(self, begins: Mapping[int, int], layers: Mapping[int, Float[Tensor, "tokens width"]]) -> bool:
        """Take in keys and values of the target's last layers, by layer from the last one (1) on.

        Returns:
            whether they follow what is known and belong to tokens whose memory is here; if not, nothing is taken in.
        """
        for layer, kv in layers.items():
            if layer > len(self._num_known_in_layers) or begins[layer] != self._num_known_in_layers[layer - 1]:
                return False
            if begins[layer] + kv.shape[0] > self.num_known:
                return False
        for layer, kv in layers.items():
            self.drafter.recall(self._state, begins[layer], layer, kv[None].to(self._device))
            self._num_known_in_layers[layer - 1] += kv.shape[0]
        return True

    @torch.inference_mode()
    def draft(self, root: int, shape: GrowableShape, num_target_layers: int) -> TokenTree:
        """A tree below the token that follows those that are known, drafted with this N."""
        session = self._session
        session.guess = session.ahead = None
        self._use(num_target_layers)
        picks = picks_of([self._sampler], [session.known], shape, are_certain=True)
        session.num_expanded = shape.num_expanded
        roots = torch.tensor([root], device=self._device)
        (tree,) = self.drafter.propose_many([self._state], roots, shape, picks)
        self._tree = tree
        return tree

    def ahead_of(self, chain: list[int], depth: int) -> Ahead | None:
        """Plan to draft below the token that is likely to follow a chain, which begins with the root: `depth` levels,
        or as many as the drafter can; None if it can draft none."""
        self._session.guess = None
        limit = min(MAX_DEPTH, self.drafter.max_depth or MAX_DEPTH)
        depth = min(depth, limit - len(chain))
        usable = [count for count in self.layer_counts if self.can_draft(count)]
        if depth < 1 or not usable:
            return None
        num_target_layers = self._num_target_layers if self._num_target_layers in usable else usable[-1]
        holds_chain = self._tree is not None and self._tree.is_chain and self._session.num_expanded == len(chain) - 1
        if not holds_chain or num_target_layers != self._num_target_layers:
            self._session.num_expanded = 0  # the state holds other nodes, or fewer: expand the chain again
        self._use(num_target_layers)
        return Ahead(self.drafter, [self._session], [tuple(chain)], [self._drawn], depth)

    @property
    def guess(self) -> tuple[int, ...] | None:
        """The next root and chain, once they are drafted ahead."""
        return None if self._session.guess is None else self._session.guess.chain

    @torch.inference_mode()
    def grow(self, ahead: Ahead) -> bool:
        """Draft one more level ahead; return whether there is another one."""
        return ahead.grow()

    @property
    def dtype(self) -> torch.dtype:
        """Of the memory that the drafter reads."""
        return self.drafter.head.weight.dtype
