"""Cancels calls to other deployments."""

from contextlib import suppress
from typing import Any


def end_call(call: Any) -> None:
    """Cancel a streamed call in any state, without raising.

    Works around two problems of Ray Serve 2.60: a call keeps running if its replica is chosen after the caller stopped
    waiting, for example because the client left at that moment, and cancelling raises if choosing a replica failed.
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
