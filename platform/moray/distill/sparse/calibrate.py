"""Shifts the routers of a trained sparse target so that it runs the share of its layers that was asked for.

Training draws each decision with noise, and decoding takes the likelier one. Unless the noise decays early
(`sparse.noise_decay_share`), the shares of the two differ by a few hundredths. All routers get the same constant added
to their logit for running, which linear interpolation finds on real chats.
"""

import math
from collections.abc import Sequence

import torch

from moray.targets.sparse.routing import RUNS
from moray.targets.sparse.target import SparseTarget

_FIRST_STEP = 0.5
"""First shift of a logit that is tried. At the start of training the two logits of a router differ by 1.9."""
_TOLERANCE = 0.003
_MAX_PASSES = 12


@torch.inference_mode()
def calibrate_share(target: SparseTarget, chats: Sequence[Sequence[int]], share: float) -> float:
    """Shift the routers; returns the share of the layers that a token of these chats then runs through.

    Args:
        target: its routers are changed.
        chats: token ids.
        share: of all layers, those without routers included.
    """
    biases = {layer: float(router.outer.bias[RUNS]) for layer, router in target.routers.items()}

    def excess(shift: float) -> float:
        for layer, router in target.routers.items():
            router.outer.bias[RUNS] = biases[layer] + shift
        return measure_share(target, chats) - share

    here, found = 0.0, excess(0.0)
    near = (here, found)
    far: tuple[float, float] | None = None  # on the other side of the share
    for _ in range(_MAX_PASSES):
        if abs(found) <= _TOLERANCE:
            break
        if far is None:
            here -= math.copysign(max(_FIRST_STEP, abs(here)), found)
        else:
            here = near[0] - near[1] * (far[0] - near[0]) / (far[1] - near[1])
        found = excess(here)
        if (found > 0) != (near[1] > 0):
            far = near
        near = (here, found)
    return share + found


@torch.inference_mode()
def measure_share(target: SparseTarget, chats: Sequence[Sequence[int]]) -> float:
    """Mean share of the layers that a token runs through, without each chat's first tokens, which run everywhere."""
    assert target.spec.routing is not None
    first, num_run, num_all = target.spec.routing.initial_tokens, 0, 0
    for chat in chats:
        tokens = torch.tensor([chat], device=target.device)
        positions = torch.arange(len(chat), device=target.device)[None]
        routes = target.forward(tokens, positions, None, target.new_cache(len(chat))).routes
        assert routes is not None
        counted = routes[:, 0, first:]
        num_run += int(counted.sum())
        num_all += counted.numel()
    return num_run / num_all if num_all else 1.0
