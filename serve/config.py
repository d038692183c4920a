"""Configuration of the Serve application: what `args` of configs/serve/*.yaml holds. Torch-free, Ray-free."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from moray.config import Config, merge, read_override, validate
from moray.decoding.engine.config import EngineConfig
from moray.decoding.synthetic import NO_COST
from moray.drafters.configs import UsableConfig
from moray.renamed import with_current_names
from moray.targets.spec import TargetConfig
from moray.trees.shapes import MAX_DEPTH, num_expanded_ahead


class ApiConfig(Config):
    """Limits and rules of the HTTP interface."""

    model_name: str | None = Field(default=None, min_length=1)
    """Name of the model for clients; null for the last part of the target's name."""
    api_keys_file: str | None = None
    """File with one bearer key per line; null accepts every request."""
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    """Most bytes of the body of one request."""
    max_body_seconds: float = Field(default=30.0, gt=0)
    """Most seconds in which a request must arrive; one that takes longer is answered with 408."""
    max_choices: int = Field(default=8, ge=1)
    """Most answers to one request: n times the number of its prompts."""
    default_max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer if its request names no limit; the context may allow fewer."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Most requests per minute of one key, or of one address without keys; null for any number. Each gateway replica
    counts its own requests, so n of them accept up to n times as many."""
    num_retries: int = Field(default=5, ge=0)
    """How often in a row an answer is resumed after its replica has died; 0 for never. A new token begins the count
    again. If engines fail over it, it is resumed once without a new token in between."""
    log_prompts: bool = False
    """Write prompts and answers into the replicas' logs."""


class ServeConfig(Config):
    """Target, drafters and interface of one application."""

    target: TargetConfig
    drafters: Mapping[str, str | UsableConfig] = Field(default_factory=dict)
    """Drafters by the names that requests choose, the first is the default; none decodes plainly. Each is the folder of
    a trained drafter, or a drafter by type."""
    placement: Literal["pool", "in_process"] = "pool"
    """Drafters in a deployment of their own (pool), or inside each target replica (in_process). Prompt lookup is always
    inside."""
    engine: EngineConfig = EngineConfig()
    draft_timeout_ms: float = Field(default=100.0, gt=0)
    """Most milliseconds that a cycle waits for drafts from the pool; it goes on without them."""
    run_ahead: bool = False
    """Let drafters of the pool draft on below a chain while the target verifies it. They do so with memory that is one
    cycle old. If the whole chain and the token that they expect next are accepted, the next draft is ready at once."""
    session_idle_seconds: float = Field(default=60.0, gt=0)
    """Seconds without a request after which a drafter replica drops a sequence and frees its place."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads of every replica; null leaves it to torch."""
    max_waiting: int = Field(default=64, ge=0)
    """Most sequences that wait for a place in one target replica; more are refused with 429."""
    api: ApiConfig = ApiConfig()

    @model_validator(mode="after")
    def _check(self) -> "ServeConfig":
        if any(not name or name.strip() != name for name in self.drafters):
            raise ValueError("drafters holds a name that is empty or begins or ends with a space; rename it")
        if self.engine.num_micro_batches > 1 and not self.pooled:
            raise ValueError(
                f"engine.num_micro_batches is {self.engine.num_micro_batches}, but there is no pool of drafters with "
                "weights to work meanwhile: leave it at 1"
            )
        if self.run_ahead:
            self._check_run_ahead()
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
        """Drafters of the pool. Those without weights stay with the target, because messages would only slow them."""
        if self.placement != "pool":
            return {}
        return {name: entry for name, entry in self.drafters.items() if isinstance(entry, str) or entry.has_weights}

    @property
    def num_expanded(self) -> int:
        """Most nodes that a drafter of the pool expands below one sequence."""
        return num_expanded_ahead(self.engine.tree.depth) if self.run_ahead else self.engine.tree.num_expanded

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.api.model_name or self.target.model.rstrip("/").rsplit("/", 1)[-1]


def read_args(args: Mapping[str, Any]) -> ServeConfig:
    """The configuration that Serve hands to the application.

    Args:
        args: nested values, as `args` of a YAML file has them, or the words behind `serve run serve.app:build_app`,
            such as `target.model=runs/demo/target`: texts, which are read as overrides are everywhere.

    Raises:
        ConfigError: naming the key and the value.
    """
    values = {name: value for name, value in args.items() if not isinstance(value, str)}
    values = with_current_names(ServeConfig, values)
    for name, text in args.items():
        if isinstance(text, str):
            values = merge(values, with_current_names(ServeConfig, read_override(f"{name}={text}")))
    return validate(ServeConfig, values)
