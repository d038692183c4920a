"""Measures client latencies: watches every sequence's stream as it passes through the gateway."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from moray.decoding.request import RequestOutput
from serve.api.errors import ApiError
from serve.metrics import series
from serve.metrics.sink import Sink


async def watched(updates: AsyncGenerator[RequestOutput], sink: Sink) -> AsyncGenerator[RequestOutput]:
    """Pass the updates through, and record their latencies and how they ended in the sink."""
    begin = first = last = time.perf_counter()
    num_tokens = first_tokens = 0
    reason = "abort"  # default, if the stream is closed early
    try:
        async with aclosing(updates):
            async for update in updates:
                if update.tokens:
                    now = time.perf_counter()
                    if num_tokens:
                        sink.observe(series.INTER_TOKEN_LATENCY, now - last)
                    else:
                        first, first_tokens = now, len(update.tokens)
                        sink.observe(series.TIME_TO_FIRST_TOKEN, now - begin)
                    last = now
                    num_tokens += len(update.tokens)
                reason = update.finish_reason or reason
                yield update
    except ApiError as error:
        reason = "refused" if error.status == 429 else "error"
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        sink.add(series.REQUESTS, 1, reason)
        if reason in ("stop", "length"):
            sink.observe(series.REQUEST_LATENCY, last - begin)
            if num_tokens > first_tokens:
                sink.observe(series.TIME_PER_OUTPUT_TOKEN, (last - first) / (num_tokens - first_tokens))
