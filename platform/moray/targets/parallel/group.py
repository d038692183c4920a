"""How the ranks of a tensor-parallel target talk to each other: commands, and tensors.

The first rank, the leader, sends commands, which the others follow in order. Commands are JSON in a tensor, so nothing
that arrives is ever executed or unpickled. Tensors are sent with NCCL between GPUs and with gloo on CPUs. The process
groups are the target's own: another one, such as Ray Train's, may be in use in the same process.

Commands may be hours apart, while tensors follow a command at once. So only tensors have a short timeout, after which a
rank that does not answer counts as lost. On CPUs a rank that has ended closes its connections, which the others notice
at once; on GPUs they notice it when they wait for a tensor.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moray.errors import RankError
from moray.explain import one_line

TENSOR_SECONDS = 30.0
"""A rank that has not answered for this time is lost."""
_COMMAND_TIMEOUT = timedelta(days=365)
_CONNECT_TIMEOUT = timedelta(seconds=120)
"""How long the leader, which connects last, waits for the others. They wait until it ends."""
_HEADER_BYTES = 1024
"""Bytes of the first tensor of a command; longer commands need a second one."""
_LENGTH_BYTES = 8
_LOOPBACK = "127.0.0.1"

Command = Mapping[str, Any]


class RankGroup:
    """All ranks of one target, seen from one of them."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, device: torch.device) -> None:
        """
        Args:
            folder: private to these ranks; they find each other through a file in it.
            rank: of this process.
            num_ranks: of all.
            device: where the tensors are.
        """
        dist: Any = torch.distributed
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self._patience = _CONNECT_TIMEOUT if rank == 0 else _COMMAND_TIMEOUT
        store = dist.FileStore(str(folder / "store"), num_ranks)
        store.set_timeout(self._patience)
        with self._raises_rank_error():
            self._connect(dist, store)

    def _connect(self, dist: Any, store: Any) -> None:
        rank, num_ranks = self.rank, self.num_ranks
        self._commands: Any = _gloo(dist.PrefixStore("commands", store), rank, num_ranks, self._patience)
        self._commands._set_default_timeout(_COMMAND_TIMEOUT)
        timeout = timedelta(seconds=TENSOR_SECONDS)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._tensors: Any = dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), rank, num_ranks, options)
        else:
            self._tensors = _gloo(dist.PrefixStore("tensors", store), rank, num_ranks, timeout)

    def send(self, command: Command) -> None:
        """Send a command to all other ranks."""
        text = json.dumps(command, separators=(",", ":")).encode()
        header = bytearray(_HEADER_BYTES)
        header[:_LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "big")
        room = _HEADER_BYTES - _LENGTH_BYTES
        header[_LENGTH_BYTES : _LENGTH_BYTES + min(room, len(text))] = text[:room]
        with self._raises_rank_error():
            self._commands.broadcast(torch.frombuffer(header, dtype=torch.uint8), 0).wait()
            if len(text) > room:
                self._commands.broadcast(torch.frombuffer(bytearray(text[room:]), dtype=torch.uint8), 0).wait()

    def receive(self) -> dict[str, Any]:
        """Wait for the leader's next command."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        with self._raises_rank_error():
            self._commands.broadcast(header, 0).wait()
            start = bytes(header.tolist())
            length = int.from_bytes(start[:_LENGTH_BYTES], "big")
            text = start[_LENGTH_BYTES : _LENGTH_BYTES + length]
            if len(text) < length:
                rest = torch.empty(length - len(text), dtype=torch.uint8)
                self._commands.broadcast(rest, 0).wait()
                text += bytes(rest.tolist())
        return json.loads(text, object_pairs_hook=_with_numbers)

    def barrier(self) -> None:
        """Wait until all ranks are connected for tensors too; the leader and the followers call it once, first."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give the leader's tensor to all ranks; the others pass an empty one of the same shape and dtype."""
        tensor = tensor.contiguous()
        data = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        with self._raises_rank_error():
            self._tensors.broadcast(data, 0).wait()
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        with self._raises_rank_error():
            self._tensors.allreduce(tensor).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape, by rank."""
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self._raises_rank_error():
            self._tensors.allgather(gathered, tensor).wait()
        return gathered

    @contextmanager
    def _raises_rank_error(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"target.tensor_parallel: a rank of {self.num_ranks} has ended or does not answer: load the "
                f"target again ({one_line(str(error))[:200]})"
            ) from error


def _gloo(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """A gloo process group over loopback alone."""
    dist: Any = torch.distributed
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)


def _with_numbers(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """JSON keys are strings: make numeric ones numbers again, for `BatchedKVCache.reorder` takes rows as keys."""
    return {int(key) if key.isdigit() else key: value for key, value in pairs}
