"""Which experiment trackers a run reports to, and whether they are installed. Torch-free, and does not import trackers.

Keys and passwords are left to the tools: they come from the environment (MLFLOW_TRACKING_USERNAME and
MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; WANDB_API_KEY). Everything in a configuration is written to
run.yaml.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, field_validator

from moray.config import Config
from moray.errors import ConfigError

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SECRET_WORDS = ("token", "key", "secret", "password", "passwd", "pwd", "sig", "auth")


class MlflowConfig(Config):
    """MLflow: a server, or a folder."""

    type: Literal["mlflow"]
    uri: str | None = None
    """Server or folder: http(s)://..., databricks, file:///folder or a path; null for MLFLOW_TRACKING_URI. A database,
    such as sqlite:///runs/mlflow.db, needs the full mlflow package."""
    experiment: str = Field(default="moray", min_length=1)
    """Experiment that the run belongs to."""
    name: str | None = None
    """Name of the run; null for that of the output folder."""

    @field_validator("uri")
    @classmethod
    def _keeps_no_secret(cls, value: str | None) -> str | None:
        if value is None:
            return value
        try:
            parts = urlsplit(value)
            words = [name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
            holds_secret = "@" in parts.netloc or any(secret in word for word in words for secret in _SECRET_WORDS)
        except ValueError:
            raise ValueError("this is no URI: give http(s)://HOST[:PORT] or a folder") from None
        if holds_secret:  # the message must not repeat it
            raise ValueError(
                "the URI holds credentials, and what is configured is written to run.yaml; leave them out and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
            )
        return value

    @property
    def label(self) -> str:
        """Distinguishes this tracker from others of a run."""
        return f"mlflow {self.uri or 'MLFLOW_TRACKING_URI'} {self.experiment}"


class WandbConfig(Config):
    """Weights & Biases."""

    type: Literal["wandb"]
    project: str = Field(default="moray", min_length=1)
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; null for the default of WANDB_API_KEY's owner."""
    mode: Literal["offline", "online"] = "online"
    """Send metrics at once (online), or write them below the output folder for wandb sync (offline)."""
    name: str | None = None
    """Name of the run; null for that of the output folder."""

    @property
    def label(self) -> str:
        """Distinguishes this tracker from others of a run."""
        return f"wandb {self.entity or ''}/{self.project} {self.mode}"


TrackerConfig = Annotated[MlflowConfig | WandbConfig, Field(discriminator="type")]


def check_trackers(trackers: Sequence[MlflowConfig | WandbConfig]) -> None:
    """Before anything starts, reject trackers whose package is missing and those that are named twice.

    Raises:
        ConfigError: says what to install.
    """
    labels: set[str] = set()
    for tracker in trackers:
        if tracker.label in labels:
            raise ConfigError(f"trackers names '{tracker.label}' twice: name it once")
        labels.add(tracker.label)
        if find_spec(tracker.type) is None:
            raise ConfigError(
                f"trackers names {tracker.type}, whose package is not installed: pip install "
                f"'moray-platform[{tracker.type}]', or leave it out"
            )
        scheme = urlsplit(tracker.uri or "").scheme.partition("+")[0] if isinstance(tracker, MlflowConfig) else ""
        if scheme in _DATABASES and find_spec("sqlalchemy") is None:
            raise ConfigError(
                f"trackers names an MLflow store of kind '{scheme}', which the extra moray-platform[mlflow] cannot "
                "write: pip install mlflow, or give a server or a folder"
            )
