"""GLIDE (arXiv 2402.02082, section 3): a small decoder layer that also reads the target's last keys and values.

    token embedding --self-attention, causal--> + --cross-attention--> + --MLP--> norm --> lm_head

Cross-attention has its own queries, rotated as in the target, and reads the keys and values of the target's last layer
as they are in its cache, of verified tokens only. In training, a block-wise mask hides what the target would not have
computed yet. A sliding window of the target's last layer does not apply to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moray.batch import TapNeeds, Taps, TrainBatch
from moray.drafters.base import Memory
from moray.drafters.common.attention import attend, attend_each, without_known
from moray.drafters.common.batched import BatchedDrafter
from moray.drafters.common.hugging_face import layer_state
from moray.drafters.common.layers import RMSNorm, Rotary, RotaryTable, SelfAttention, SwiGLU, init_weights
from moray.drafters.common.rows import Rows
from moray.drafters.common.slots import DraftSlots
from moray.drafters.common.t_step import memory_tokens
from moray.drafters.configs import GlideConfig
from moray.drafters.learner import DraftOutput, DraftView, Prediction
from moray.errors import ConfigError
from moray.targets.head import TargetHead
from moray.targets.visibility import Visible
from moray.trees.shapes import MAX_DEPTH

KeysValues = tuple[Float[Tensor, "batch kv_heads slots head_dim"], Float[Tensor, "batch kv_heads slots head_dim"]]


@dataclass
class GlideState:
    """One sequence: the drafter's own keys and values, and the target's."""

    slots: DraftSlots
    own: Tensor  # [2, 1, kv_heads, slots, head_dim]
    target: Tensor


class Glide(BatchedDrafter[GlideState]):
    """Drafts from token embeddings and the target's last keys and values."""

    def __init__(self, config: GlideConfig, head: TargetHead) -> None:
        super().__init__(config, head)
        self.config: GlideConfig = config
        spec = self.spec
        spec.need_last_layers(1, "drafter.type glide")
        if config.num_cross_heads % spec.num_kv_heads:
            raise ConfigError(
                f"drafter.num_cross_heads is {config.num_cross_heads}; a multiple of the target's number of "
                f"key/value heads, {spec.num_kv_heads}, is needed"
            )
        width, eps = spec.hidden_size, spec.norm_eps
        self.self_norm = RMSNorm(width, eps)
        self.self_attention = SelfAttention(width, config.layer, spec.head_dim)
        self.cross_norm = RMSNorm(width, eps)
        self.cross_query = nn.Linear(width, config.num_cross_heads * spec.head_dim, bias=False)
        self.cross_out = nn.Linear(config.num_cross_heads * spec.head_dim, width, bias=False)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, config.layer.intermediate_size)
        self.out_norm = RMSNorm(width, eps)
        self.rotary = RotaryTable(spec.head_dim, spec.max_positions + MAX_DEPTH, spec.rope_theta)
        init_weights(self, config.norm_init)

    @torch.no_grad()
    def load_target_layers(self, layers: Sequence[Callable[[str], Tensor]], final_norm: Tensor) -> None:
        """Initialise self- and cross-attention from the same layer. Only the last layer's queries match the keys and
        values that cross-attention reads."""
        (read,) = layers
        state = layer_state(read, self.spec.head_dim)
        for part, module in (("attention.", self.self_attention), ("mlp.", self.mlp)):
            own = {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}
            module.load_state_dict(own)
        self.self_norm.weight.copy_(state["input_norm.weight"])
        self.cross_norm.weight.copy_(state["input_norm.weight"])
        self.cross_query.weight.copy_(read("self_attn.q_proj.weight"))  # turned by the target's own rotary embedding
        self.cross_out.weight.copy_(state["attention.o_proj.weight"])
        self.mlp_norm.weight.copy_(state["mlp_norm.weight"])
        self.out_norm.weight.copy_(final_norm)

    @property
    def needs(self) -> TapNeeds:
        return TapNeeds((self.spec.num_layers - 1,), (-1,))

    @property
    def observed(self) -> TapNeeds:
        return TapNeeds((self.spec.num_layers - 1,))

    def observe(self, taps: Taps) -> Memory:
        assert taps.kv is not None
        return {"last_layer": taps.kv[:, :, 0]}

    def forward(self, batch: TrainBatch, view: DraftView) -> DraftOutput:
        assert batch.taps.kv is not None
        seq = batch.tokens.shape[1]
        rotary = self.rotary.rows(0, seq)
        x = self.head.embed(batch.tokens).to(self.cross_query.weight.dtype)
        x = self.run_block(self._attend_to_itself, x, rotary)
        positions = torch.arange(seq, device=x.device).expand(batch.tokens.shape)
        target, mask = self._unpack(batch.taps.kv[:, :, 0]), memory_tokens(view.start)
        hidden = self.run_block(self._finish_over, x, target, mask, positions)
        return DraftOutput((Prediction(hidden, view.start, self.vocabulary.logits),))

    def _attend_to_itself(
        self, x: Float[Tensor, "batch seq hidden"], rotary: Rotary
    ) -> Float[Tensor, "batch seq hidden"]:
        return x + self.self_attention.o_proj(self.self_attention(self.self_norm(x), rotary, "causal"))

    def _finish_over(
        self,
        x: Float[Tensor, "batch seq hidden"],
        target: KeysValues,
        mask: Visible | None,
        positions: Int[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch seq hidden"]:
        return self._finish(x, positions, lambda query: attend(query, *target, mask))

    def _finish(
        self,
        x: Float[Tensor, "batch seq hidden"],
        positions: Int[Tensor, "batch seq"],
        attended: Callable[[Float[Tensor, "batch heads seq head_dim"]], Float[Tensor, "batch seq width"]],
    ) -> Float[Tensor, "batch seq hidden"]:
        """Cross-attention to the target's keys and values, MLP, norm."""
        batch, seq, _ = x.shape
        query = self.cross_query(self.cross_norm(x)).view(batch, seq, self.config.num_cross_heads, -1).transpose(1, 2)
        x = x + self.cross_out(attended(self.head.rotate(query, positions)))
        return self.out_norm(x + self.mlp(self.mlp_norm(x)))

    def _unpack(self, kv: Float[Tensor, "batch seq width"]) -> KeysValues:
        """Split a tap, whose heads are stored as [k_h ; v_h], into keys and values."""
        pairs = kv.to(self.cross_query.weight.dtype).unflatten(2, (self.spec.num_kv_heads, 2, self.spec.head_dim))
        key, value = pairs.permute(3, 0, 2, 1, 4)
        return key, value

    def new_state(self, max_model_len: int, max_expanded: int) -> GlideState:
        slots = DraftSlots(max_model_len, max_expanded, self.cross_query.weight)
        own = slots.new_cache(self.config.layer.num_kv_heads, self.spec.head_dim)
        return GlideState(slots, own, slots.new_cache(self.spec.num_kv_heads, self.spec.head_dim))

    def reset(self, state: GlideState) -> None:
        state.slots.reset()

    def extend(self, state: GlideState, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int = 0) -> None:
        start = state.slots.num_verified
        state.slots.extend(tokens, num_kept, partial(self._remember, state))
        end = state.slots.num_verified
        key, value = self._unpack(memory["last_layer"])
        state.target[0, :, :, start:end] = key
        state.target[1, :, :, start:end] = value

    def _remember(self, state: GlideState, tokens: Int[Tensor, " some"], start: int) -> None:
        # One layer over embeddings: a token's keys and values depend on that token alone.
        normed = self.self_norm(self._embed(tokens))
        self.self_attention.remember(normed, self.rotary.rows(start, start + tokens.shape[0]), state.own, start)

    def _embed(self, tokens: Int[Tensor, " some"]) -> Float[Tensor, "1 some hidden"]:
        return self.head.embed(tokens)[None].to(self.cross_query.weight.dtype)

    def score(
        self,
        states: Sequence[GlideState],
        tokens: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> Float[Tensor, "sequences new vocab"]:
        rows = Rows([state.slots for state in states], tokens, ancestors, depth)
        reaches = rows.reach([state.own for state in states])
        x = self._embed(rows.tokens)
        attention = self.self_attention
        attended = attention.o_proj(attention.draft(self.self_norm(x), rows.rotary(self.rotary), reaches))
        memories = [state.target[..., : state.slots.num_verified, :] for state in states]
        hidden = self._finish(
            without_known(x, reaches) + attended,
            rows.node_positions.reshape(1, -1),
            partial(attend_each, memories=memories, kernel=attention.kernel),
        )
        return self.vocabulary.expand(self.vocabulary.logits(hidden[0])).view(*tokens.shape, -1)
