"""Configuration of the Serve application: the `args` in configs/serve/*.yaml. Torch-free, Ray-free."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from moray.config import Config, merge, read_override, validate
from moray.decoding.engine.config import EngineConfig
from moray.decoding.synthetic import NO_COST
from moray.drafters.configs import UsableConfig
from moray.edge.messages import CodecName
from moray.renamed import with_current_names
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, num_expanded_ahead
from serve.planned import with_plan


class ApiConfig(Config):
    """Limits and rules of the HTTP API."""

    model_name: str | None = Field(default=None, min_length=1)
    """Name of the model for clients; null for the last part of the target's name."""
    api_keys_file: str | None = None
    """File with one bearer key per line; null accepts every request."""
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    """Maximum size of a request body, in bytes."""
    max_body_seconds: float = Field(default=30.0, gt=0)
    """Maximum seconds for a request body to arrive; a slower one is answered with 408."""
    max_choices: int = Field(default=8, ge=1)
    """Maximum number of answers per request: n times the number of its prompts."""
    default_max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens per answer if the request sets no limit; the context may allow fewer."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Maximum requests per minute per key, or per address without keys; null for no limit. Each gateway replica counts
    its own requests, so n replicas accept up to n times as many."""
    num_retries: int = Field(default=5, ge=0)
    """How often in a row an answer is resumed after its replica died; 0 for never. Each new token resets the count. An
    answer on which engines fail is resumed only once without a new token in between."""
    log_prompts: bool = False
    """Write prompts and answers to the logs of the replicas."""


class EdgeEndpointConfig(Config):
    """Devices that run a drafter themselves and let this application verify: `/v1/edge` (see docs/guide/edge.md)."""

    drafters: tuple[str, ...] = Field(min_length=1)
    """Names of the drafters, among `drafters`, that devices may run."""
    max_sessions: int = Field(default=8, ge=1)
    """Maximum number of sessions in one gateway replica. Each holds a sequence of the engine, with room for its longest
    answer."""
    max_sessions_per_key: int = Field(default=8, ge=1)
    """Maximum number of sessions of one key, or of one address without keys."""
    idle_seconds: float = Field(default=60.0, gt=0)
    """Seconds after which a session is dropped whose device was not heard of."""
    max_in_flight: int = Field(default=2, ge=1, le=2)
    """Maximum number of drafts of one session that wait to be verified."""
    max_nodes: int = Field(default=64, ge=1, le=1024)
    """Maximum number of nodes below the root of a device's tree."""
    codecs: tuple[CodecName, ...] = ("float32", "bfloat16", "int8", "int4")
    """Codecs of the memory that devices may choose."""


class ServeConfig(Config):
    """Target, drafters and HTTP API of one application."""

    target: TargetConfig
    drafters: Mapping[str, str | UsableConfig] = Field(default_factory=dict)
    """Drafters by the name that requests use; the first is the default, and with none decoding is plain. Each is the
    folder of a trained drafter, or a drafter by type."""
    plan: str | None = None
    """The best.yaml of `pipelines.plan`, or null. Its tree is drafted, by default with its drafter."""
    placement: Literal["pool", "in_process"] = "pool"
    """Run drafters in their own deployment (pool) or inside each target replica (in_process). Prompt lookup always runs
    inside."""
    engine: EngineConfig = EngineConfig()
    draft_timeout_ms: float = Field(default=100.0, gt=0)
    """Maximum milliseconds that a cycle waits for drafts from the pool before it continues without them."""
    run_ahead: bool = False
    """Let pooled drafters continue below a chain while the target verifies it. They use memory that is one cycle old.
    If the whole chain and the next token they expect are accepted, the next draft is ready at once."""
    session_idle_seconds: float = Field(default=60.0, gt=0)
    """Seconds without a request after which a drafter replica drops a sequence."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads per replica; null leaves it to torch."""
    max_waiting: int = Field(default=64, ge=0)
    """Maximum number of sequences that wait in one target replica; more are refused with 429."""
    api: ApiConfig = ApiConfig()
    edge: EdgeEndpointConfig | None = None
    """Let devices run the drafter, over WebSockets; null for no such endpoint."""

    @model_validator(mode="after")
    def _check(self) -> "ServeConfig":
        if any(not name or name.strip() != name for name in self.drafters):
            raise ValueError("drafters holds a name that is empty or begins or ends with a space; rename it")
        if self.engine.num_micro_batches > 1 and not self.pooled:
            raise ValueError(
                f"engine.num_micro_batches is {self.engine.num_micro_batches}, but there is no pool of drafters with "
                "weights to work meanwhile: leave it at 1"
            )
        if self.plan is not None:
            raise ValueError(
                f"plan is '{self.plan}', which only `serve run` and `serve.deploy` read: leave it out here"
            )
        if self.run_ahead:
            self._check_run_ahead()
        if self.edge is not None:
            unknown = [name for name in self.edge.drafters if name not in self.drafters]
            if unknown:
                raise ValueError(
                    f"edge.drafters holds '{unknown[0]}'; drafters has {', '.join(self.drafters) or 'none'}: name those"
                )
            if self.edge.max_sessions > self.engine.max_num_seqs:
                raise ValueError(
                    f"edge.max_sessions is {self.edge.max_sessions}, but engine.max_num_seqs is "
                    f"{self.engine.max_num_seqs}: a session holds a sequence, so give at most as many"
                )
        return self

    def _check_run_ahead(self) -> None:
        tree = self.engine.tree
        if self.placement != "pool":
            raise ValueError(f"run_ahead is true, but placement '{self.placement}'; drafters run ahead in a pool alone")
        if tree.max_children > 1:
            raise ValueError(f"run_ahead is true, but engine.tree is {tree.name}; drafters run ahead of chains alone")
        if self.engine.synthetic.draft != NO_COST:
            raise ValueError("run_ahead is true, but engine.synthetic.draft has costs; running ahead would escape them")
        if num_expanded_ahead(tree.depth) > MAX_DEPTH:
            raise ValueError(
                f"run_ahead is true, but engine.tree.depth {tree.depth}; at most {(MAX_DEPTH - 1) // 2} can be doubled"
            )
        if not self.pooled:
            raise ValueError(
                "run_ahead is true, but drafters holds none with weights, as a pool needs; name one, or leave it out"
            )

    @property
    def pooled(self) -> dict[str, str | UsableConfig]:
        """The drafters in the pool. Drafters without weights stay with the target, where no messages slow them down."""
        if self.placement != "pool":
            return {}
        return {name: entry for name, entry in self.drafters.items() if isinstance(entry, str) or entry.has_weights}

    @property
    def num_expanded(self) -> int:
        """Maximum number of nodes that a pooled drafter expands for one sequence."""
        return num_expanded_ahead(self.engine.tree.depth) if self.run_ahead else self.engine.tree.num_expanded

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.api.model_name or self.target.model.rstrip("/").rsplit("/", 1)[-1]


def read_args(args: Mapping[str, Any]) -> ServeConfig:
    """Parse the arguments that Serve passes to the application.

    Args:
        args: nested values as in `args` of a YAML file, or texts from the command line of
            `serve run serve.app:build_app`, such as `target.model=runs/demo/target`, which are parsed as overrides.

    Raises:
        ConfigError: a value is not accepted; the message names key and value.
    """
    values = {name: value for name, value in args.items() if not isinstance(value, str)}
    values = with_current_names(ServeConfig, values)
    for name, text in args.items():
        if isinstance(text, str):
            values = merge(values, with_current_names(ServeConfig, read_override(f"{name}={text}")))
    return validate(ServeConfig, with_plan(values))
