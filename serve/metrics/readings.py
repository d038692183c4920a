"""Maps the counts of engines and drafters to `serve.metrics.series`."""

from collections.abc import Iterator

from moray.decoding.engine.engine import Engine
from moray.decoding.engine.stats import EngineStats
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.source import RemoteDrafts, RemoteStats
from serve.metrics import series
from serve.metrics.publisher import Reading


def read_engine(engine: Engine) -> Iterator[Reading]:
    """The readings of a target replica and its connections to drafters."""
    yield Reading(series.RUNNING, engine.num_running)
    yield Reading(series.WAITING, engine.num_waiting)
    yield Reading(series.KV_USAGE, engine.kv_used)
    sources = {name: scheduler.source for name, scheduler in engine.draft_schedulers.items()}
    channels = {name: source.stats for name, source in sources.items() if isinstance(source, RemoteDrafts)}
    yield from _counts(engine.stats)
    yield from _phases(engine.stats, sum(stats.channel_seconds for stats in channels.values()))
    for name, stats in channels.items():
        yield from _channel(name, stats)


def _counts(stats: EngineStats) -> Iterator[Reading]:
    yield Reading(series.PROMPT_TOKENS, stats.num_prompt_tokens)
    yield Reading(series.GENERATION_TOKENS, stats.num_tokens)
    yield Reading(series.CYCLES, stats.num_passes)
    yield Reading(series.DECODE_PASSES, stats.num_rows)
    yield Reading(series.DECODE_TOKENS, stats.num_cycle_tokens)
    yield Reading(series.NUM_DRAFTS, stats.num_drafts)
    yield Reading(series.DRAFT_TOKENS, stats.num_draft_tokens)
    yield Reading(series.ACCEPTED_TOKENS, stats.num_accepted_tokens)
    for position, count in enumerate([*stats.accepted_at]):
        yield Reading(series.ACCEPTED_AT, count, (str(position),))
    yield Reading(series.MISSED_DRAFTS, stats.num_missed)


def _phases(stats: EngineStats, channel: float) -> Iterator[Reading]:
    """Time by phase. The engine counts waiting for drafts as part of propose; here it is a phase of its own."""
    seconds = {**stats.seconds, "channel": channel}
    seconds["propose"] -= channel
    seconds["observe"] += seconds.pop("prefill_drafter")
    for phase, value in seconds.items():
        yield Reading(series.PHASE_SECONDS, value, (phase,))


def _channel(name: str, stats: RemoteStats) -> Iterator[Reading]:
    yield Reading(series.CHANNEL_CYCLES, stats.num_cycles, (name,))
    yield Reading(series.CHANNEL_BYTES, stats.num_bytes_sent, (name, "sent"))
    yield Reading(series.CHANNEL_BYTES, stats.num_bytes_received, (name, "received"))
    yield Reading(series.CHANNEL_WAITING, stats.waiting_seconds, (name,))
    yield Reading(series.CHANNEL_DRAFTING, stats.drafting_seconds, (name,))
    yield Reading(series.CHANNEL_MISSES, stats.num_misses, (name,))
    yield Reading(series.CHANNEL_LATE, stats.num_late, (name,))
    yield Reading(series.CHANNEL_LOST, stats.num_lost, (name,))


def read_host(host: DraftHost) -> Iterator[Reading]:
    """The readings of a drafter replica."""
    stats = host.stats
    yield Reading(series.DRAFTER_SESSIONS, host.num_sessions)
    yield Reading(series.DRAFTER_REQUESTS, stats.num_requests)
    yield Reading(series.DRAFTER_DRAFTS, stats.num_drafts)
    yield Reading(series.DRAFTER_MISSES, stats.num_misses)
    for outcome, count in stats.ahead.copy().items():
        yield Reading(series.DRAFTER_AHEAD, count, (outcome,))
    yield Reading(series.DRAFTER_EXPIRED, stats.num_expired)
    yield Reading(series.DRAFTER_SECONDS, stats.seconds)
    yield Reading(series.DRAFTER_AHEAD_SECONDS, stats.ahead_seconds)
    for size, count in stats.batch_sizes.copy().items():
        yield Reading(series.DRAFTER_BATCH, count, at=size)
