"""All published metrics with their names, kinds, tags and meanings. No Ray, no torch.

The metrics of target replicas come first, then those of drafter replicas, then those of gateways. Names follow vLLM
where it has the same metric, with our prefix. Ray prefixes every name with `ray_`, appends `_total` to counters, and
adds the tags `application`, `deployment` and `replica`.

Ray's exporter keeps only the buckets of a histogram and estimates `_sum` from their midpoints. Figures that must be
exact (tau, means) are therefore published as two counters.
"""

from dataclasses import dataclass
from typing import Literal

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BATCH_SIZES = (0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5)
"""Bounds between whole numbers, so that the midpoint of a bucket is near the values in it."""


@dataclass(frozen=True)
class Series:
    """One metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    tags: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""

    @property
    def exported(self) -> str:
        """The name in Prometheus, without a histogram's suffixes `_bucket`, `_count` and `_sum`."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, meaning: str, *tags: str) -> Series:
    return Series(f"moray_{name}", "counter", meaning, tags)


def _gauge(name: str, meaning: str) -> Series:
    return Series(f"moray_{name}", "gauge", meaning)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...] = _SECONDS) -> Series:
    return Series(f"moray_{name}", "histogram", meaning, (), buckets)


RUNNING = _gauge("num_requests_running", "Sequences that an engine runs")
WAITING = _gauge("num_requests_waiting", "Sequences that wait for a slot")
KV_USAGE = _gauge("kv_cache_usage_perc", "Share of the KV cache that sequences have reserved, 0 to 1")
PROMPT_TOKENS = _counter("prompt_tokens", "Tokens of prompts read, with the tokens of resumed answers")
GENERATION_TOKENS = _counter("generation_tokens", "Tokens of answers")
CYCLES = _counter("cycles", "Target passes")
DECODE_PASSES = _counter("decode_passes", "Sequences in target passes")
DECODE_TOKENS = _counter("decode_tokens", "Tokens that target passes emitted; divided by decode_passes, tau")
PHASE_SECONDS = _counter(
    "cycle_phase_seconds",
    "Time of the engine's thread by phase; channel is waiting for drafts beyond the time of drafting",
    "phase",
)
NUM_DRAFTS = _counter("spec_decode_num_drafts", "Drafts verified")
DRAFT_TOKENS = _counter("spec_decode_num_draft_tokens", "Drafted tokens verified")
ACCEPTED_TOKENS = _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
ACCEPTED_AT = _counter(
    "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by depth from 0", "position"
)
MISSED_DRAFTS = _counter("spec_decode_num_missed_drafts", "Drafts that did not arrive in time")
CHANNEL_CYCLES = _counter("channel_cycles", "Messages to drafter replicas", "drafter")
CHANNEL_BYTES = _counter("channel_bytes", "Bytes to drafter replicas (sent) and from them (received)", "drafter", "way")
CHANNEL_WAITING = _counter("channel_waiting_seconds", "Waiting for drafts, drafting included", "drafter")
CHANNEL_DRAFTING = _counter("channel_drafting_seconds", "Drafting time that drafter replicas report", "drafter")
CHANNEL_MISSES = _counter(
    "channel_misses", "Drafts refused because the replica did not have the same tokens of the sequence", "drafter"
)
CHANNEL_LATE = _counter("channel_late", "Drafts that arrived too late for their cycle", "drafter")
CHANNEL_LOST = _counter("channel_lost", "Drafter replicas that stopped answering", "drafter")

DRAFTER_SESSIONS = _gauge("drafter_sessions", "Sequences that hold a drafting state")
DRAFTER_REQUESTS = _counter("drafter_requests", "Messages answered")
DRAFTER_DRAFTS = _counter("drafter_drafts", "Drafts made")
DRAFTER_MISSES = _counter(
    "drafter_misses", "Drafts refused because the replica does not have the same tokens of the sequence"
)
DRAFTER_AHEAD = _counter(
    "drafter_ahead",
    "Chains asked for that were to be drafted ahead: the guess was right, wrong or unfinished",
    "outcome",
)
DRAFTER_EXPIRED = _counter("drafter_expired", "Sessions dropped because no target used them")
DRAFTER_SECONDS = _counter("drafter_busy_seconds", "Time of answering messages")
DRAFTER_AHEAD_SECONDS = _counter("drafter_ahead_seconds", "Time of drafting ahead")
DRAFTER_BATCH = _histogram("drafter_batch_size", "Drafts per message", _BATCH_SIZES)

TIME_TO_FIRST_TOKEN = _histogram("time_to_first_token_seconds", "From a sequence's arrival to its first token")
TIME_PER_OUTPUT_TOKEN = _histogram("time_per_output_token_seconds", "Mean time per token after the first, by sequence")
INTER_TOKEN_LATENCY = _histogram("inter_token_latency_seconds", "Time between updates, each of one or more tokens")
REQUEST_LATENCY = _histogram("e2e_request_latency_seconds", "From a sequence's arrival to its last token")
REQUESTS = _counter(
    "request_success",
    "Sequences by how they ended: stop, length; abort: the client left; refused: the targets were full; error",
    "finished_reason",
)
ANSWERS = _counter("http_responses", "HTTP responses by path and status code", "path", "status")
RETRIES = _counter("retries", "Sequences resumed on another target replica")
EDGE_SESSIONS = _gauge("edge_sessions", "Sessions of devices that run the drafter whose answers have not ended")
EDGE_DRAFTS = _counter("edge_drafts", "Drafts of devices")
EDGE_TOKENS = _counter("edge_tokens", "Tokens of answers to devices; source: draft or target", "source")
EDGE_BYTES = _counter("edge_bytes", "Bytes of messages from devices (received) and to them (sent)", "way")
EDGE_RESUMED = _counter("edge_resumed", "Sessions taken up again on another connection")
EDGE_REFUSED = _counter("edge_refused", "Connections ended with a refusal, by its code", "code")

ALL: dict[str, Series] = {series.name: series for series in list(globals().values()) if isinstance(series, Series)}
"""All series by name."""
