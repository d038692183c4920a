"""Configuration of `pipelines.benchmark serve`. Torch-free."""

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from moray.config import Config

_OURS = ("messages", "n", "prompt", "stream", "stream_options")
"""Fields of a request body that the benchmark sets itself."""


class LevelConfig(Config):
    """The load at one level."""

    request_rate: float | None = Field(default=None, gt=0)
    """Requests per second; null sends all at once, limited only by max_concurrency."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Maximum number of requests in flight; null for no limit."""
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma-distributed intervals: 1 is a Poisson process, below 1 bursty, above 1 steadier."""
    times_first: float | None = Field(default=None, gt=0)
    """Rate as a multiple of the requests per second answered at the first level; null for request_rate."""
    num_requests: int | None = Field(default=None, ge=1)
    """Requests at this level; null for the benchmark's num_requests."""


class GoodputConfig(Config):
    """Latency limits, in milliseconds, that a request must meet to count as good; None for no limit."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Limit on the time to first token of a good request, in milliseconds; null for no limit."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Limit on the time per token after the first, in milliseconds; null for no limit."""
    e2e_ms: float | None = Field(default=None, gt=0)
    """Limit on the end-to-end latency of a good request, in milliseconds; null for no limit."""

    @property
    def is_given(self) -> bool:
        """Whether any limit is set."""
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


class ServeBenchmarkConfig(Config):
    """What `pipelines.benchmark serve` measures."""

    url: str
    """Address of the endpoint, such as http://127.0.0.1:8000, with or without /v1; same as --url URL."""
    model: str | None = None
    """Model to request; null for the first of /v1/models."""
    api: Literal["chat", "completions"] = "chat"
    """Endpoint to call: /v1/chat/completions or /v1/completions."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer key; null sends no key."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    urls: Mapping[str, str] = Field(default_factory=dict)
    """Addresses by variant, for variants that are not served at url. Use it to compare two servers. All of them get
    the same key."""
    levels: tuple[LevelConfig, ...] = Field(default=(LevelConfig(),), min_length=1)
    """Loads to measure one after another."""
    num_requests: int = Field(default=32, ge=1)
    """Requests per variant, level and round; questions are repeated if there are fewer."""
    num_warmups: int = Field(default=2, ge=0)
    """Warm-up requests per variant before each level, not counted; 0 for none."""
    rounds: int = Field(default=2, ge=1)
    """Rounds in which all variants take turns; every other round reverses the order to cancel drift."""
    variants: Mapping[str, dict[str, Any]] = Field(default_factory=lambda: {"default": {}}, min_length=1)
    """Fields merged into the request body, by name of the variant."""
    baseline: str | None = None
    """Variant that ratios are relative to; null for the last one."""
    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens per answer."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; at 0 (greedy) the answers of all variants are compared."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    ignore_eos: bool = False
    """Generate up to max_tokens; sent only if true, because not every server supports it."""
    seed: int = 0
    """Seed of the arrivals and, above temperature 0, of the answers, which count up from it."""
    goodput: GoodputConfig = GoodputConfig()
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit per request, in seconds."""
    save_requests: bool = False
    """Write every request with its times and text into the report."""
    html: str | None = None
    """HTML page of tables and plots to write, the same as --html HTML; null for none."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return _address(value)

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        return {name: _address(url) for name, url in value.items()}

    @model_validator(mode="after")
    def _check(self) -> "ServeBenchmarkConfig":
        for name, fields in self.variants.items():
            taken = sorted(set(fields) & set(_OURS))
            if taken:
                raise ValueError(f"variants.{name} sets {taken[0]}, which the benchmark writes itself; leave it out")
        if self.levels[0].times_first is not None:
            raise ValueError("levels.0.times_first has no level before it; give a request_rate or a max_concurrency")
        if any(level.times_first is not None and level.request_rate is not None for level in self.levels):
            raise ValueError("a level has both times_first and request_rate; leave one of them out")
        if self.baseline is not None and self.baseline not in self.variants:
            raise ValueError(f"baseline is '{self.baseline}'; the variants are {', '.join(self.variants)}")
        for name in self.urls:
            if name not in self.variants:
                raise ValueError(f"urls names '{name}'; the variants are {', '.join(self.variants)}")
        return self

    @property
    def baseline_name(self) -> str:
        """Variant that ratios are relative to."""
        return self.baseline or list(self.variants)[-1]

    def url_of(self, variant: str) -> str:
        """The address of a variant."""
        return self.urls.get(variant, self.url)


def _address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address such as http://127.0.0.1:8000 is needed")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("only host, port and path are accepted; name the variable of a key as api_key_env")
    return value.rstrip("/").removesuffix("/v1")
