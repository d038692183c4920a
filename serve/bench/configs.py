"""Configuration of `serve.benchmark`: what it deploys, and the load. Torch-free, Ray-free."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moray.bench.load.config import LevelConfig, ServeBenchmarkConfig
from moray.cluster.configs import RayConfig
from moray.config import Config, merge, validate
from moray.decoding.synthetic import SyntheticCosts
from moray.edge.link.profiles import PROFILES, LinkProfile
from moray.edge.messages import CodecName
from moray.trees.shapes import MAX_DEPTH, AdaptiveShape, Shape
from serve.config import ServeConfig, read_args


class LoadConfig(Config):
    """The application, the load, and the resources of the Ray cluster started for the benchmark."""

    application: ServeConfig
    """The application to deploy, without the settings that the benchmark varies."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    num_requests: int = Field(default=48, ge=1)
    """Requests per way and round."""
    max_tokens: int = Field(default=96, ge=1)
    """Number of tokens in every answer, because end-of-sequence tokens are ignored."""
    rounds: int = Field(default=2, ge=1)
    """Rounds in which all ways take turns; every other round reverses the order."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """Maximum seconds to wait for replicas to start."""
    ray: RayConfig = RayConfig()
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    def requests_to(self, url: str, **fields: Any) -> ServeBenchmarkConfig:
        """The settings of the load generator."""
        same = self.model_dump(include={"questions", "num_questions", "num_requests", "max_tokens", "rounds"})
        return validate(ServeBenchmarkConfig, {"url": url, "ignore_eos": True, **same, **fields})

    def args_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The application's `args` with some changes.

        Raises:
            ConfigError: a changed value is not accepted; the message names key and value.
        """
        args = merge(self.application.model_dump(mode="json", exclude_unset=True), dict(changes))
        read_args(args)
        return args


class PoolConfig(Config):
    """Numbers of replicas."""

    targets: int = Field(ge=1)
    """Number of target replicas."""
    drafters: int = Field(ge=1)
    """Number of drafter replicas."""

    @property
    def name(self) -> str:
        """The numbers in words."""
        return f"{self.targets} target{'s'[: self.targets > 1]}, {self.drafters} drafter{'s'[: self.drafters > 1]}"


class ScalingBenchmarkConfig(LoadConfig):
    """Scaling with the number of replicas, where passes and drafts have synthetic costs."""

    pools: tuple[PoolConfig, ...] = Field(min_length=1)
    """Pools to measure one after another; ratios are relative to the first. One application is scaled up and down."""
    regimes: Mapping[str, SyntheticCosts] = Field(min_length=1)
    """Costs of passes and drafts, by name of the regime."""
    num_streams: int = Field(default=16, ge=1)
    """Number of requests in flight at any time."""

    @model_validator(mode="after")
    def _check(self) -> "ScalingBenchmarkConfig":
        default = next(iter(self.application.drafters), None)  # used because the requests name no drafter
        if default not in self.application.pooled:
            raise ValueError(
                "application.placement must be pool, and the first drafter have weights: nothing else can be scaled"
            )
        if self.num_requests < 2 * self.num_streams:
            raise ValueError(f"num_requests is {self.num_requests}; {2 * self.num_streams} keep num_streams busy")
        return self


Part = Literal["Gateway", "Target", "Drafter", "others"]


class WayConfig(Config):
    """One way to measure."""

    application: str
    """Name of the application to send requests to, one of applications."""
    cores: Mapping[Part, tuple[int, ...]] = Field(default_factory=dict)
    """Cores to pin the processes of each part to, by system number; parts left out may use any core. A part is a
    deployment, or others: Ray, its proxy and the load generator."""


class SideBySideConfig(LoadConfig):
    """Several applications that run at the same time and get requests in turn, on this machine only."""

    applications: Mapping[str, dict[str, Any]] = Field(min_length=1)
    """Applications by name, each given as its differences from application."""
    ways: Mapping[str, WayConfig] = Field(min_length=1)
    """Ways to measure, by name."""
    pairs: tuple[tuple[str, str], ...] = Field(min_length=1)
    """Pairs of ways to report ratios for: the first over the second."""
    levels: tuple[LevelConfig, ...] = Field(min_length=1)
    """Loads to measure one after another."""

    @model_validator(mode="after")
    def _check(self) -> "SideBySideConfig":
        for name, changes in self.applications.items():
            if not name.isascii() or not name.replace("-", "").isalnum():
                raise ValueError(f"applications holds '{name}'; names of letters, digits and - are accepted")
            self.args_with(changes)
        for name, way in self.ways.items():
            if way.application not in self.applications:
                known = ", ".join(self.applications)
                raise ValueError(f"ways.{name}.application is '{way.application}'; there are {known}")
        for name in (name for pair in self.pairs for name in pair):
            if name not in self.ways:
                raise ValueError(f"pairs names '{name}'; the ways are {', '.join(self.ways)}")
        return self

    def requests_to_all(self, urls: Mapping[str, str]) -> ServeBenchmarkConfig:
        """The settings of the load generator, with the address of each way."""
        levels = self.model_dump(mode="json")["levels"]
        first = next(iter(urls.values()))
        return self.requests_to(first, urls=dict(urls), levels=levels, variants={name: {} for name in urls})


class EdgeBenchmarkConfig(Config):
    """Edge decoding over emulated networks; Linux, as root."""

    application: ServeConfig
    """The application to deploy; its `edge.drafters` are measured."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=4, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    max_tokens: int = Field(default=64, ge=1)
    """Number of tokens in every answer, because end-of-sequence tokens are ignored."""
    rounds: int = Field(default=2, ge=1)
    """How often every question is asked in every way; every other round reverses the order of the ways."""
    networks: tuple[LinkProfile, ...] = tuple(PROFILES.values())
    """Networks to measure over, one after another."""
    tree: Shape = AdaptiveShape(type="adaptive", depth=8)
    """Shape of the draft trees on the device."""
    depths: tuple[Annotated[int, Field(ge=1, le=MAX_DEPTH)], ...] = ()
    """Depths of fixed chains to measure beside `tree`, with each drafter."""
    codec: CodecName = "bfloat16"
    """How the drafter's memory crosses the network: float32, bfloat16, int8 or int4."""
    in_flight: tuple[int, ...] = Field(default=(1, 2), min_length=1)
    """Drafts that may be under way at once; each number is measured."""
    compute_ratio: float = Field(default=1.0, ge=1, le=6)
    """How many times as slow as a core the device is made; 1 leaves it alone."""
    pin_cores: bool = False
    """Whether the application's replicas run on one core and the device on another."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """Maximum seconds to wait for replicas to start."""
    ray: RayConfig = RayConfig()
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "EdgeBenchmarkConfig":
        if self.application.edge is None:
            raise ValueError("application.edge is null: name the drafters that devices may run there")
        if not self.networks:
            raise ValueError("networks is empty; name at least one")
        return self


class EdgePrivateConfig(Config):
    """What it costs an answer that marked text stays on the device."""

    application: ServeConfig
    """The application to deploy; the first of its `edge.drafters` drafts."""
    questions: str
    """File of questions with <private>...</private> in them; only the first turn of each is asked."""
    num_questions: int | None = Field(default=None, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    max_tokens: int = Field(default=64, ge=8)
    """Number of tokens in every answer, because end-of-sequence tokens are ignored."""
    codec: CodecName = "bfloat16"
    """How the drafter's memory crosses the network: float32, bfloat16, int8 or int4."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """Maximum seconds to wait for replicas to start."""
    ray: RayConfig = RayConfig()
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "EdgePrivateConfig":
        if self.application.edge is None:
            raise ValueError("application.edge is null: name the drafters that devices may run there")
        return self


class EdgeOfflineConfig(Config):
    """What drafters write while their connection is lost."""

    application: ServeConfig
    """The application to deploy; its `edge.drafters` are measured."""
    questions: str
    """File of questions, as for pipelines.evaluate; only the first turn of each is asked."""
    num_questions: int | None = Field(default=12, ge=1)
    """Number of different questions, one of each category in turn; null for all."""
    max_tokens: int = Field(default=128, ge=8)
    """Maximum tokens of an answer."""
    cuts: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(default=(0.25, 0.5, 0.75), min_length=1)
    """Shares of an answer's tokens after which its connection is cut, one cut for each run."""
    codec: CodecName = "bfloat16"
    """How the drafter's memory crosses the network: float32, bfloat16, int8 or int4."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """Maximum seconds to wait for replicas to start."""
    ray: RayConfig = RayConfig()
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""

    @model_validator(mode="after")
    def _check(self) -> "EdgeOfflineConfig":
        if self.application.edge is None:
            raise ValueError("application.edge is null: name the drafters that devices may run there")
        return self
