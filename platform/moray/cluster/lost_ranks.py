"""Ends an actor that has lost a process of its tensor-parallel target; Ray then starts it again."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from moray.errors import RankError

_LOGGER = logging.getLogger(__name__)


@contextmanager
def ends_without_ranks() -> Iterator[None]:
    """End this process if a rank of a tensor-parallel target is lost in the block.

    Ray then repeats the actor's task in a new process. An exception would end the whole run.
    """
    try:
        yield
    except RankError as error:
        _LOGGER.critical("this target replica ends, and Ray starts it again: %s", error)
        os._exit(1)
