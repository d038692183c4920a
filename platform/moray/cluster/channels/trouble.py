"""What ends a channel over Ray, in words: the drafter's own error, or its death."""

from ray.exceptions import RayTaskError

from moray.errors import UnreachableError


def unreachable(error: Exception) -> UnreachableError:
    """What a call to the answerer has raised, told apart: an error of its own, or anything else, which is its end."""
    if isinstance(error, RayTaskError):
        return failed(error.cause)
    return UnreachableError(f"the drafter is gone: {type(error).__name__}")


def failed(cause: Exception) -> UnreachableError:
    """The answerer lives, and has raised `cause`."""
    return UnreachableError(f"the drafter failed: {type(cause).__name__}: {cause}")
