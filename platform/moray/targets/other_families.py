"""Any Hugging Face causal LM with full attention, run with its own forward pass and transformers' own cache.

It is slower than `targets.model`, which knows its families, and not verified to be lossless as a target. It is good
enough for drafting, where a wrong logit costs a token's acceptance but never changes the text.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from moray.errors import ConfigError
from moray.explain import one_line
from moray.targets.loading import load_causal_lm
from moray.targets.spec import resolve_folder
from moray.targets.stored import read_model_config


class OtherCausalLM:
    """A model of some family, and its sizes."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            model: folder or hub name.
            dtype: of the weights.
            device: where to load it.

        Raises:
            ConfigError: it cannot be loaded, takes no positions, or keeps no keys and values.
        """
        field = "drafter.model"
        sizes: Any = read_model_config(resolve_folder(model, field=field), model, field).get_text_config()
        self._model = load_causal_lm(model, dtype, device, field=field).eval().requires_grad_(False)
        positions: Any = getattr(sizes, "max_position_embeddings", None)
        # Within a sliding window full attention gives the same result.
        window: Any = getattr(sizes, "sliding_window", None)
        no_positions = "it names no max_position_embeddings"
        reason = self._why_not(device) if positions else no_positions
        if reason:
            raise ConfigError(
                f"drafter.model '{model}' is of type '{sizes.model_type}', which does not draft here: its attention "
                f"must take positions and keep keys and values ({reason}); give another with the target's tokenizer"
            )
        self.max_positions = min(int(positions or 0), int(window or positions or 0))
        self.weight: Tensor = self._model.get_output_embeddings().weight
        self.vocab_size = self.weight.shape[0]

    @torch.inference_mode()
    def _why_not(self, device: torch.device) -> str:
        """Try two tokens at made-up positions, which the cache must hold; return what went wrong, or an empty text."""
        cache = self.new_cache(2)
        tokens = torch.zeros(2, dtype=torch.long, device=device)
        mask = torch.zeros(1, 1, 2, 2, dtype=self._model.dtype, device=device)
        try:
            self.forward(tokens, torch.arange(2, device=device), mask, cache, 0)
        except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {one_line(str(error))[:200]}"
        return "" if cache.get_seq_length() == 2 else "its cache keeps nothing of a token"

    def new_cache(self, capacity: int) -> DynamicCache:
        """An empty cache for one sequence; it grows as it is filled, whatever the capacity."""
        return DynamicCache()

    def forward(
        self,
        tokens: Int[Tensor, " new"],
        positions: Int[Tensor, " new"],
        mask: Float[Tensor, "1 1 new slots"] | None,
        cache: DynamicCache,
        start: int,
        num_known: int = 0,
    ) -> Float[Tensor, "rest vocab"]:
        """Logits of tokens whose slots begin at `start`, without the first `num_known`.

        The cache's contents from `start` on are dropped first.

        Args:
            tokens: ids.
            positions: need not match the slots.
            mask: 0 where a token (row) sees a slot (column), else -inf; None: everything.
            cache: receives their keys and values.
            start: at most as many slots as the cache holds.
        """
        cache.crop(start - cache.get_seq_length())
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[0, num_known:]
