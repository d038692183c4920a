"""Ends an actor that has lost a process of its tensor-parallel target; Ray then starts it again."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from moray.errors import RankError

_LOGGER = logging.getLogger(__name__)


@contextmanager
def exit_on_lost_rank() -> Iterator[None]:
    """End this process if a rank is lost in the block: Ray then starts the actor again and repeats its task, whereas an
    exception would end the whole run. A rank that is lost while the target is loaded does end the run."""
    try:
        yield
    except RankError as error:
        _LOGGER.critical("this target replica ends, and Ray starts it again: %s", error)
        os._exit(1)
