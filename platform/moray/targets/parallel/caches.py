"""Caches of a tensor-parallel target: every rank has one with the keys and values of its own heads.

Every call on the leader's cache is also made on the other ranks' caches. Calls without a result are sent with the next
command, so they cost no message of their own.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial, partialmethod
from importlib import import_module
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@runtime_checkable
class Splittable(Protocol):
    """A cache whose calls can be repeated on other ranks."""

    replayed_methods: ClassVar[frozenset[str]]
    """Methods without a result that change the cache."""
    gathered_methods: ClassVar[Mapping[str, int]]
    """Methods that return keys and values, and the dimension of the results in which the heads lie."""


Queue = Callable[[dict[str, Any]], None]
"""Sends a call to the other ranks at some time before the next command."""
Gather = Callable[[dict[str, Any], Callable[[], Any], int], Any]
"""Sends a call, makes it here, and joins the results in a dimension."""


class LeaderCache:
    """The leader's part of a cache, which stands for the whole: all ranks do what it does."""

    def lead(self, number: int, queue: Queue, gather: Gather) -> None:
        """Repeat calls on the other ranks from here on, which know the cache by its number."""
        self.number, self._queue, self._gather = number, queue, gather
        weakref.finalize(self, queue, {"do": "forget", "cache": number}).atexit = False

    def repeat(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Make a call here and on all other ranks."""
        self._queue({"do": "call", "cache": self.number, "method": name, "args": args, "kwargs": kwargs})
        getattr(super(), name)(*args, **kwargs)

    def collect(self, name: str, dim: int, *args: Any, **kwargs: Any) -> Any:
        """Make a call on all ranks; return their results joined in a dimension."""
        call = {"do": "collect", "cache": self.number, "method": name, "args": args, "kwargs": kwargs}
        return self._gather(call, partial(getattr(super(), name), *args, **kwargs), dim)


@cache
def leaders_class(kind: Any) -> Any:
    """A class of caches like `kind`, whose calls all ranks make."""
    methods: dict[str, Any] = {name: partialmethod(LeaderCache.repeat, name) for name in kind.replayed_methods}
    methods |= {name: partialmethod(LeaderCache.collect, name, dim) for name, dim in kind.gathered_methods.items()}
    return type(f"Leaders{kind.__name__}", (LeaderCache, kind), methods)


def new_part(target: Any, kind: str, args: list[Any]) -> Splittable:
    """A cache by the name of its class, "module:class"."""
    module, _, name = kind.partition(":")
    found = getattr(import_module(module), name) if module.startswith("moray.") else None
    if not (isinstance(found, type) and issubclass(found, Cache)):
        raise ValueError(f"{kind!r} is not a cache class of Moray")
    part = found(target, *args)
    assert isinstance(part, Splittable), kind
    return part


def join_heads(parts: list[Tensor], dim: int) -> Tensor:
    """The ranks' results as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
