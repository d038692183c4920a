"""Tokens per second while all streams are busy, without the start and end of a round, when some are idle."""

from collections.abc import Sequence
from dataclasses import dataclass

from moray.bench.load.request import RequestRecord
from moray.errors import DataError


@dataclass(frozen=True)
class Steady:
    """The part of a round in which all streams are busy."""

    num_tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all streams together."""
        return self.num_tokens / self.seconds


def steady_part(records: Sequence[RequestRecord], num_streams: int) -> Steady:
    """Count from the first token of the last stream to start until the first stream runs out of requests.

        stream 1   . t t t t t|. t t t t t|                |   end of a request
        stream 2   . . t t t t t|. t t t t t t t               t token   . waiting for the first
                       [------------------]                    [ ] the part that counts

    Raises:
        DataError: a request failed or has no token counts, or there are too few requests to keep all streams busy.
    """
    for record in records:
        if record.outcome != "ok" or not record.sizes_are_tokens or not record.times:
            why = record.error or "the server does not say how many tokens a chunk has"
            raise DataError(f"request {record.index} cannot be counted ({record.outcome}: {why})")
    begun = sorted(record.times[0] for record in records)
    last_start = max(record.start for record in records)
    ends = [record.end for record in records if record.end > last_start]
    if len(records) <= num_streams or not ends or min(ends) <= begun[num_streams - 1]:
        raise DataError(
            f"num_requests is {len(records)}, too few to measure {num_streams} concurrent requests: they never all "
            "run at the same time; give more num_requests"
        )
    begin, end = begun[num_streams - 1], min(ends)
    sizes = ((time, size) for record in records for time, size in zip(record.times, record.sizes, strict=True))
    return Steady(sum(size for time, size in sizes if begin < time <= end), end - begin)
