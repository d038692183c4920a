"""Ending calls of other deployments."""

from contextlib import suppress
from typing import Any


def end_call(call: Any) -> None:
    """Cancel a streamed call, whatever has become of it; nothing is raised.

    Ray Serve 2.60 itself leaves one running whose replica has been chosen while nobody waited for that any longer, as
    when a client leaves at this very moment; and where choosing has failed, cancelling raises why.
    """
    with suppress(Exception):
        call.cancel()
    choosing = getattr(call, "_replica_result_future", None)
    if choosing is not None:
        choosing.add_done_callback(_end_chosen)


def _end_chosen(choosing: Any) -> None:
    if not choosing.cancelled() and choosing.exception() is None:
        with suppress(Exception):
            choosing.result().cancel()
