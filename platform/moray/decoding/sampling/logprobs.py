"""Log-probabilities of emitted tokens, as clients can request them."""

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.request import TokenLogprobs


def token_logprobs(logits: Float[Tensor, "tokens vocab"], tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of each token and of the `num_top` likeliest at its position, under the target's own
    distribution."""
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not num_top:
        return [TokenLogprobs(value, []) for value in own]
    values, ids = log_probs.topk(min(num_top, log_probs.shape[1]), dim=-1)
    rows = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(value, list(zip(i, v, strict=True))) for value, i, v in rows]
