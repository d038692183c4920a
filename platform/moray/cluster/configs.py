"""Which Ray to use. Imports neither ray nor torch."""

from pydantic import Field

from moray.config import Config


class RayConfig(Config):
    """Which cluster to use."""

    address: str | None = None
    """Address of the Ray cluster; null for that of this job (RAY_ADDRESS), else a new one on this machine."""
    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a new local cluster; null for the cores plus a few for data tasks."""
    dashboard: bool = False
    """Start the dashboard of a new local cluster."""
