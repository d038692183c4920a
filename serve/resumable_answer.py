"""An answer that survives the loss of target replicas, and which errors count as such a loss. No HTTP server.

Tokens cross to the targets, so another replica continues an answer from its prompt and the tokens so far. The text is
the same, because randomness is a function of seed and position.
"""

from moray.decoding.request import Request, RequestOutput
from moray.errors import DataError
from serve.api.errors import ApiError
from serve.engine_thread import EngineFailedError

RETRY_AFTER_SECONDS = 1
"""What a client is asked to wait when targets are full or starting."""
_MAX_ENGINE_FAILURES = 2
"""Engines that may fail over one request without a token in between: the request itself may be the cause."""
_MAX_BACKOFF_SECONDS = 2.0


class ResumableAnswer:
    """One sequence's answer so far, and how often replicas have failed it or refused it since its last token."""

    def __init__(self, request: Request, max_retries: int) -> None:
        """
        Args:
            request: of the client.
            max_retries: replicas that may be lost in a row before the answer ends with an error.
        """
        self._request = request
        self._max_retries = max_retries
        self._num_losses = 0
        self._num_engine_failures = 0
        self.tokens: list[int] = []
        self.num_refusals = 0
        """Replicas in a row that had no place for it."""
        self.is_admitted = False
        """Whether a replica has taken it in at some time: from then on the client is promised an answer."""

    @property
    def remaining(self) -> Request:
        """The request for the tokens that are still missing."""
        return self._request.model_copy(update={"generated": tuple(self.tokens)})

    def admit(self) -> None:
        """Note that a replica has taken the answer in."""
        self.is_admitted, self.num_refusals = True, 0

    def record(self, update: RequestOutput) -> None:
        """Note what a replica has added."""
        self.tokens += update.tokens
        self._num_losses = self._num_engine_failures = 0

    def backoff(self, error: Exception) -> float | None:
        """Seconds to wait before another replica is asked, after a call that ended with `error`; None if another
        replica would meet the same error.

        Raises:
            ApiError: 400 for a request that the engine refuses; 503 if no replica admitted it in time, or too many were
                lost in a row.
        """
        if isinstance(error, TimeoutError) and not self.is_admitted:
            raise not_ready() from error
        if isinstance(error, DataError):
            raise ApiError(400, str(error)) from None
        if not _is_loss(error):
            return None
        self._num_losses += 1
        self._num_engine_failures += isinstance(error, EngineFailedError)
        if self._num_losses > self._max_retries or self._num_engine_failures >= _MAX_ENGINE_FAILURES:
            raise ApiError(503, "target replicas keep failing: try again later", retry_after=5) from error
        return min(0.1 * 2**self._num_losses, _MAX_BACKOFF_SECONDS)


def not_ready() -> ApiError:
    """The error while no target replica answers."""
    return ApiError(503, "no target replica is ready: try again", retry_after=RETRY_AFTER_SECONDS)


def overloaded() -> ApiError:
    """The error while every target replica is full."""
    return ApiError(
        429, "the server is at capacity: try again later", code="queue_full", retry_after=RETRY_AFTER_SECONDS
    )


def _is_loss(error: Exception) -> bool:
    """Whether a replica, its engine or the connection to it was lost, or none was ready in time."""
    from grpc import StatusCode
    from grpc.aio import AioRpcError
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if isinstance(error, AioRpcError):
        return error.code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL)
    return isinstance(error, RayError | RayServeException | EngineFailedError | TimeoutError)
