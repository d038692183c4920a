"""transformers' `generate`: plain, with prompt lookup, or with an assistant model."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from moray.bench.peers.answering import Answer, PeerRow, Prepare, Settings, answer_from


def load(settings: Settings) -> tuple[str, Prepare]:
    """Load one model that all rows share."""
    torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
    model.generation_config = GenerationConfig()  # drop the model's own defaults, such as repetition penalties

    def prepare(row: PeerRow) -> Answer:
        helpers = _helpers(row, dtype)

        @torch.inference_mode()
        def answer(prompt: list[int], max_new_tokens: int) -> list[int]:
            config = GenerationConfig(
                do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=settings.eos_ids, pad_token_id=0
            )
            ids = torch.tensor([prompt])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **helpers)
            return output[0, len(prompt) :].tolist()

        return answer

    return transformers.__version__, prepare


def _helpers(row: PeerRow, dtype: torch.dtype) -> dict[str, Any]:
    if row.drafter is None:
        return {}
    if row.drafter == "prompt-lookup":
        return {"prompt_lookup_num_tokens": row.depth}
    assistant: Any = AutoModelForCausalLM.from_pretrained(row.drafter, dtype=dtype).eval()
    assistant.generation_config.num_assistant_tokens = row.depth
    return {"assistant_model": assistant}


if __name__ == "__main__":
    answer_from(load)
