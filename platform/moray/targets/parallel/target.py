"""A target over several processes, used like any other: this process leads, the others follow.

Every rank holds a part of each layer and its heads' part of every cache. The leader is the process that uses the
target: it holds the engine, the sampler and the drafters, embeds the tokens, and sends each pass to the followers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.errors import RankError
from moray.targets.kernels.kinds import Kernels
from moray.targets.model import Target, TargetOutput, read_eos_ids
from moray.targets.parallel.caches import join_heads, leaders_class
from moray.targets.parallel.group import Command, RankGroup
from moray.targets.parallel.plan import RankPlan
from moray.targets.parallel.processes import Followers
from moray.targets.spec import TargetConfig, TargetSpec


class RankTarget(Target):
    """One rank's part of a target."""

    def __init__(
        self, model: Any, spec: TargetSpec, config: TargetConfig, eos_ids: tuple[int, ...], plan: RankPlan
    ) -> None:
        super().__init__(model, spec, eos_ids, config)
        self.plan = plan
        self.num_kv_heads = len(plan.kv_heads)

    def pack_part(self, kernels: Kernels) -> None:
        """Fuse the layers and compute with these kernels on a CPU; all ranks use the same."""
        self.fuse()
        self.pack(kernels)


class ParallelTarget(RankTarget):
    """The leader's part, which is used as the whole target."""

    def __init__(
        self,
        model: Any,
        spec: TargetSpec,
        config: TargetConfig,
        plans: Sequence[RankPlan],
        group: RankGroup,
        followers: Followers,
        *,
        packs: bool,
    ) -> None:
        """
        Args:
            model: the first rank's part, connected.
            spec: sizes of the whole target.
            config: what was asked for.
            plans: of all ranks.
            group: connects them.
            followers: the other ranks' processes.
            packs: whether to pack weights on a CPU (see `Target.load`).
        """
        super().__init__(model, spec, config, read_eos_ids(config.model), plans[0])
        self._plans, self._group, self.followers = plans, group, followers
        self._lock = threading.RLock()
        self._queued: deque[Command] = deque()
        self._num_caches = 0
        self._is_broken = False
        """Whether a command was left unfinished, so that the ranks may be at different places."""
        if packs and self.device.type == "cpu" and (kernels := self.fastest_kernels(len(plans))) is not None:
            if self.is_fused:
                self.pack_all_ranks(kernels)
            self.kernels = kernels
            self.log_kernels()

    @property
    def is_split(self) -> bool:
        """Its modules are parts of the target's."""
        return True

    def pack_all_ranks(self, kernels: Kernels) -> None:
        """Let all ranks compute with these kernels on a CPU."""
        choice = {"packed_from": kernels.packed_from, "compiled_up_to": kernels.compiled_up_to}
        with self._all_ranks({"do": "kernels", **choice}):
            self.pack_part(kernels)

    def check_ranks(self) -> None:
        """Raise `RankError` if another rank has ended."""
        self.followers.check()

    def make_cache(self, kind: type[Any], *args: Any) -> Any:
        """A cache of which every rank holds a part."""
        with self._lock:
            cache = leaders_class(kind)(self, *args)
            self._num_caches += 1
            where = f"{kind.__module__}:{kind.__qualname__}"
            self._queue({"do": "cache", "cache": self._num_caches, "kind": where, "args": args})
            cache.lead(self._num_caches, self._queue, self._collect)
            return cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        mask: Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None,
        cache: Any,
        hidden_depths: Sequence[int] = (),
    ) -> TargetOutput:
        """See `Target.forward`."""
        hidden = self.model.model.embed_tokens(tokens)
        command = {
            "do": "forward",
            "cache": cache.number,
            "shape": list(hidden.shape),
            "mask": None if mask is None else [list(mask.shape), str(mask.dtype).removeprefix("torch.")],
        }
        with self._all_ranks(command):
            self._group.broadcast(hidden)
            positions = self._group.broadcast(positions)
            mask = None if mask is None else self._group.broadcast(mask)
            return self.run_layers(hidden, positions, mask, cache, hidden_depths)

    @torch.inference_mode()
    def logits(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any vocab"]:
        """Logits of final-norm hidden states."""
        with self._all_ranks({"do": "logits", "shape": list(hidden.shape)}):
            return gather_logits(self, self._group, self._plans, self._group.broadcast(hidden))

    def _queue(self, command: Command) -> None:
        self._queued.append(command)

    @contextmanager
    def _all_ranks(self, command: Command) -> Iterator[None]:
        """Send a command, with everything that has been queued before it; the block is this rank's part of it.

        Raises:
            RankError: a rank is lost, now or earlier.
        """
        with self._lock:
            if self._is_broken:
                raise RankError(
                    "target.tensor_parallel: an earlier command was not finished, so the ranks may disagree: load the "
                    "target again"
                )
            self._is_broken = True
            queued = [self._queued.popleft() for _ in range(len(self._queued))]
            try:
                self._group.send({"queued": queued, **command})
                yield
            except RankError:
                self.followers.kill()  # one that hangs would keep its GPU after this process
                raise
            self._is_broken = False

    def _collect(self, command: Command, own: Callable[[], Any], dim: int) -> Any:
        """Make a call on all ranks; return their results, or tuples of results, joined in a dimension."""
        if not self.plan.splits_attention:  # every rank has all heads
            self._queue({**command, "do": "call"})
            return own()
        with self._all_ranks(command):
            return collect(self._group, self._plans, own(), dim)


def collect(group: RankGroup, plans: Sequence[RankPlan], own: Any, dim: int) -> Any:
    """Join the ranks' results; key/value heads that several ranks hold are taken once."""
    if isinstance(own, tuple):
        return tuple(collect(group, plans, one, dim) for one in own)
    gathered = group.all_gather(own)
    return join_heads([part for part, plan in zip(gathered, plans, strict=True) if plan.owns_kv_heads], dim)


def gather_logits(target: RankTarget, group: RankGroup, plans: Sequence[RankPlan], hidden: Tensor) -> Tensor:
    """Logits over the whole vocabulary."""
    own = target.model.lm_head(hidden)
    sizes = [len(plan.vocabulary) for plan in plans]
    gathered = group.all_gather(F.pad(own, (0, max(sizes) - own.shape[-1])))
    return torch.cat([part[..., :size] for part, size in zip(gathered, sizes, strict=True)], dim=-1)
