"""Forecasts the size and duration of a cache, checks that it fits, and suggests smaller ones. Torch-free.

The number of tokens is exact once all chats are tokenised; until then, `moray.activations.planning.sample` projects it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moray.activations.format.disk_space import DiskSpace, size_text
from moray.activations.format.records import Record
from moray.activations.format.schema import CacheConfig, bytes_per_token
from moray.activations.planning.shards import ShardPlan, tap_columns
from moray.errors import ConfigError
from moray.targets.spec import TargetSpec

CODECS = ("bfloat16", "fp8", "int8", "int4")
"""Codecs to suggest; float16 takes as much space as bfloat16, float32 twice that."""
_TEXT_BYTES = 8
"""Bytes per token of its id, response mask and list levels, in a shard and in the (compressed) tokenised part."""
_CHAT_BYTES = 80
_CHUNK_BYTES = 220
"""Overhead of one column of one row group: its entry in the shard's footer, and page headers."""
_MAX_CHATS_MARGIN = 0.97
_NUM_CHOICES = 3


@dataclass(frozen=True)
class Workload:
    """Amount of text in a cache, regardless of which activations are stored."""

    rows: int
    """Rows read, unusable ones included, as chats.max_chats counts them."""
    chats: int
    tokens: int
    padded_tokens: int
    row_groups: int
    error: float = 0.0
    """Relative error of projected tokens (half the width of the 95 % interval); 0 if they are counted."""

    @property
    def padding(self) -> float:
        """Fraction of the tokens processed by the target that is padding."""
        return 1 - self.tokens / max(1, self.padded_tokens)


class ForecastRecord(Record):
    """forecast.json: the forecast of a cache, made before its first shard was written."""

    rows: int
    chats: int
    tokens: int
    padding: float
    """Fraction of the tokens processed by the target that is padding."""
    shards: int
    bytes: dict[str, int]
    """Bytes by group: keys and values, hidden states, text."""
    bytes_per_token: int
    free_bytes: int | None
    max_bytes: int | None
    tokens_per_second: float | None
    hours: float | None


@dataclass(frozen=True)
class Forecast:
    """Forecast size and speed of a cache."""

    workload: Workload
    shards: int
    bytes: dict[str, int]
    """Bytes by group: keys and values, hidden states, text."""
    bytes_per_token: int
    """Bytes per token of the taps alone."""
    tokens_per_second: float | None = None
    """Measured speed of one target; None if not measured."""

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.bytes.values())

    def hours(self, num_targets: int, written: int = 0) -> float | None:
        """Return the hours that the targets need for the part not written yet; None if their speed is unknown."""
        if not self.tokens_per_second:
            return None
        share = 1 - min(1.0, written / max(1, self.total))
        return self.workload.tokens * share / self.tokens_per_second / num_targets / 3600

    def record(self, disk: DiskSpace, num_targets: int) -> ForecastRecord:
        """Return the record of this forecast that is stored beside the shards."""
        return ForecastRecord(
            rows=self.workload.rows,
            chats=self.workload.chats,
            tokens=self.workload.tokens,
            padding=self.workload.padding,
            shards=self.shards,
            bytes=self.bytes,
            bytes_per_token=self.bytes_per_token,
            free_bytes=disk.free,
            max_bytes=disk.max_bytes,
            tokens_per_second=self.tokens_per_second,
            hours=self.hours(num_targets),
        )

    def lines(self, disk: DiskSpace, num_targets: int) -> list[str]:
        """Format the forecast for the user."""
        work = self.workload
        about = f" (projected, +-{work.error:.0%})" if work.error else ""
        groups = ", ".join(f"{name} {size_text(size)}" for name, size in self.bytes.items() if size)
        free = "unknown" if disk.free is None else size_text(disk.free)
        quota = "not set" if disk.max_bytes is None else size_text(disk.max_bytes)
        lines = [
            f"{work.chats:,} chats, {work.tokens:,} tokens{about} in {self.shards:,} shards; "
            f"padding wastes {work.padding:.1%} of the target's work",
            f"{size_text(self.total)} in all: {groups}; written so far: {size_text(disk.written)}",
            f"free space {free}, cache.max_bytes {quota}",
        ]
        if (hours := self.hours(num_targets, disk.written)) is not None:
            duration = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
            speed = f"{self.tokens_per_second:,.0f} tokens/s"
            lines.append(f"about {duration} for what is left, at {speed} of each of {num_targets} targets")
        return lines


@dataclass(frozen=True)
class Choice:
    """Alternative configuration of a cache: its overrides and its size."""

    overrides: str
    what_for: str
    bytes: int


def count_work(shards: Sequence[ShardPlan], lengths: dict[str, list[int]], rows: int) -> Workload:
    """Count the exact workload of planned shards.

    Args:
        shards: planned shards of all parts.
        lengths: tokens of every chat, by part.
        rows: number of input rows.
    """
    batches = [[lengths[plan.part][row] for row in batch] for plan in shards for batch in plan.batches]
    tokens = sum(map(sum, batches))
    return Workload(rows, sum(map(len, batches)), tokens, sum(max(b) * len(b) for b in batches), len(batches))


def forecast(spec: TargetSpec, cache: CacheConfig, work: Workload, shards: int | None = None) -> Forecast:
    """Forecast a cache of the given workload, without compression, whose ratio is not known in advance.

    Args:
        spec: the target.
        cache: what to store.
        work: counted or projected workload.
        shards: number of shards, if known; otherwise estimated from `cache.shard_mib`.
    """
    columns = tap_columns(spec, cache)
    kv = {name: column for name, column in columns.items() if name.startswith("kv.")}
    hidden = {name: column for name, column in columns.items() if name not in kv}
    chunk_bytes = work.row_groups * _CHUNK_BYTES
    sizes = {
        "keys and values": work.tokens * bytes_per_token(kv) + chunk_bytes * len(kv),
        "hidden states": work.tokens * bytes_per_token(hidden) + chunk_bytes * len(hidden),
        "text": work.tokens * _TEXT_BYTES + work.chats * _CHAT_BYTES + 4 * chunk_bytes,
    }
    if shards is None:
        parts = -(-work.rows // cache.chats_per_part)
        shards = max(parts, sum(sizes.values()) // (cache.shard_mib << 20) + parts // 2)
    return Forecast(work, shards, sizes, bytes_per_token(columns))


def codec_choices(spec: TargetSpec, cache: CacheConfig, work: Workload) -> list[Choice]:
    """Return every combination of codecs for the configured columns, except those in cache.column_codecs."""
    free = tap_columns(spec, cache).keys() - cache.column_codecs.keys()
    has_kv = any(name.startswith("kv.") for name in free)
    has_hidden = any(name.startswith("hidden.") for name in free)
    choices = []
    for kv in CODECS if has_kv else (cache.kv_codec,):
        for hidden in CODECS if has_hidden else (cache.hidden_codec,):
            changed = cache.model_copy(update={"kv_codec": kv, "hidden_codec": hidden})
            parts = [f"cache.kv_codec={kv}"] if has_kv else []
            parts += [f"cache.hidden_codec={hidden}"] if has_hidden else []
            if not parts:
                return []
            choices.append(Choice(" ".join(parts), "", forecast(spec, changed, work).total))
    return choices


def subset_choices(spec: TargetSpec, cache: CacheConfig, work: Workload) -> list[Choice]:
    """Return subsets of the columns that are enough for certain drafters."""
    last = spec.num_layers - 1
    wanted: list[tuple[str, tuple[int, ...] | None, tuple[int, ...]]] = [
        ("MoA without target layers", cache.kv_layers, (-1,)),
        ("GLIDE", (last,), (-1,)),
        ("EAGLE, Medusa, independent", (), (-1,)),
    ]
    choices = []
    for what_for, layers, depths in wanted:
        if not set(depths) <= set(cache.hidden_depths):
            continue
        if layers and cache.kv_layers is not None and not set(layers) <= set(cache.kv_layers):
            continue
        changes = {"kv_layers": layers, "hidden_depths": depths}
        old = {"kv_layers": cache.kv_layers, "hidden_depths": tuple(cache.hidden_depths)}
        parts = [f"'cache.{key}={_yaml(value)}'" for key, value in changes.items() if value != old[key]]
        try:
            size = forecast(spec, cache.model_copy(update=changes), work).total
        except ConfigError:  # cache.column_codecs names a column that is left out
            continue
        if parts:
            choices.append(Choice(" ".join(parts), what_for, size))
    return choices


def fewer_chats(plan: Forecast, disk: DiskSpace) -> Choice | None:
    """Return the choice of as many chats as fit with the current settings; None if none fits or no limit is known."""
    if disk.left is None:
        return None
    # A different number of chats makes a different cache, so the bytes already written do not count towards it.
    limit = replace(disk, written=0).left or 0
    rows = int(plan.workload.rows * min(1.0, limit * _MAX_CHATS_MARGIN / max(1, plan.total)))
    return Choice(f"chats.max_chats={rows}", "", plan.total * rows // plan.workload.rows) if rows > 0 else None


def check_fits(spec: TargetSpec, cache: CacheConfig, plan: Forecast, disk: DiskSpace, uri: str) -> None:
    """Refuse a cache that does not fit on the disk, before it is begun.

    A projection is refused only if even its lower end does not fit.

    Raises:
        ConfigError: it exceeds cache.max_bytes or the free space of the file system; names alternatives that fit.
    """
    total = int(plan.total * (1 - plan.workload.error))
    if disk.fits(total):
        return
    need = total - disk.written
    written = f", of which {size_text(disk.written)} are written" if disk.written else ""
    about = "about " if plan.workload.error else ""
    takes = f"the cache takes {about}{size_text(plan.total)}{written}"
    others = "; ".join(f"{c.overrides} ({size_text(c.bytes)})" for c in _fitting(spec, cache, plan, disk))
    elsewhere = " (with another output, or this one removed)" if disk.written else ""
    advice = f"; what fits{elsewhere}: {others}" if others else "; nothing smaller fits either"
    if disk.max_bytes is not None and total > disk.max_bytes:
        raise ConfigError(f"{takes}, cache.max_bytes allows {size_text(disk.max_bytes)}: raise it{advice}")
    free = f"'{uri}' has {size_text(disk.free or 0)} free, of which {size_text(disk.reserve)} stay free"
    raise ConfigError(f"{takes}, but {free}: {size_text(need - (disk.left or 0))} too little; make space{advice}")


def _fitting(spec: TargetSpec, cache: CacheConfig, plan: Forecast, disk: DiskSpace) -> Iterator[Choice]:
    fresh = replace(disk, written=0)
    codecs: dict[int, Choice] = {}  # by size: fp8 and int8 take the same
    for choice in codec_choices(spec, cache, plan.workload):
        codecs.setdefault(choice.bytes, choice)
    fitting = [size for size in sorted(codecs, reverse=True) if size < plan.total and fresh.fits(size)]
    yield from (codecs[size] for size in fitting[:_NUM_CHOICES])
    for choice in subset_choices(spec, cache, plan.workload):
        if fresh.fits(choice.bytes):
            yield replace(choice, overrides=f"{choice.overrides} for {choice.what_for}")
    if (choice := fewer_chats(plan, disk)) is not None:
        yield choice


def _yaml(values: tuple[int, ...] | None) -> str:
    return "null" if values is None else f"[{','.join(map(str, values))}]"
