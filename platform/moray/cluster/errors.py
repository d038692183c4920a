"""Our own errors, out of Ray's wrappings: what a worker raised on purpose reaches the user as one line.

Ray hands on an exception as text in most places (a data task's cause, an actor that died in its constructor,
the failures of a worker group) and as an object in few, so the text is what is searched. Everything that
is not ours passes through untouched, traceback and all: it is a defect.
"""

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import ray.exceptions
import ray.train

import moray.errors
from moray.errors import MorayError

# The last line of a traceback: "moray.errors.DataError: the message".
_RAISED = re.compile(r"^\s*moray\.errors\.(\w+): (.+)$", re.MULTILINE)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the `MorayError` inside whatever Ray raises in the block, without Ray's traceback.

    Raises:
        MorayError: a task, an actor or a Train worker raised it.
    """
    try:
        yield
    except (ray.exceptions.RayError, ray.train.TrainingFailedError) as error:
        found = find_own_error(error)
        if found is None:
            raise
        let_go(error)
        raise found from None


def let_go(error: BaseException) -> None:
    """Empty the frames that an exception has passed, and drop the exceptions before it with theirs: Ray Data's hold
    actors with their CPUs for as long as somebody keeps the exception, and some hold each other."""
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None
    gc.collect()


def find_own_error(error: BaseException) -> MorayError | None:
    """The first `MorayError` that the text of Ray's exception tells of."""
    for name, message in _RAISED.findall(str(error)):
        kind = getattr(moray.errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MorayError):
            return kind(message.strip())
    return None
