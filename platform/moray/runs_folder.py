"""Where `runs/...` is: here, or in the folder that the nodes of a cluster share.

A job runs in a copy of the code that Ray removes, and that every node has for itself. So a cluster says once, in the
environment variable MORAY_RUNS, which folder or URI `runs` stands for, and configuration files stay as they are. This
module refuses to know which settings hold paths: it looks at how values begin.
"""

import os
import re
from pathlib import Path
from typing import Any

from moray.errors import ConfigError

RUNS_VARIABLE = "MORAY_RUNS"
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the process that a submitted job starts, and in no other."""

_OUTPUTS = {"output", "report", "html"}
_ANCHORED = re.compile(r"/|~|[A-Za-z][A-Za-z0-9+.-]*://")


def resolve_runs(value: Any, key: str = "") -> Any:
    """Put MORAY_RUNS in place of a leading `runs` in all texts of nested settings.

    Raises:
        ConfigError: a job would write into its copy of the code, or read a folder that is not sent along.
    """
    if isinstance(value, dict):
        return {name: resolve_runs(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [resolve_runs(item, key) for item in value]
    if not isinstance(value, str):
        return value
    first, separator, rest = value.removeprefix("./").partition("/")
    is_run = first == "runs" and bool(separator)
    folder = os.environ.get(RUNS_VARIABLE)
    if is_run and folder:
        return f"{folder.rstrip('/')}/{rest}"
    is_output = key.rpartition(".")[2] in _OUTPUTS and not _ANCHORED.match(value)
    if (is_run or is_output) and JOB_VARIABLE in os.environ:
        named = f"{key} is '{value}'" if key else f"'{value}'"
        raise ConfigError(
            f"{named}, a relative path in the job's own copy of the code, which is removed with the job: set "
            f"{RUNS_VARIABLE} to a folder that all nodes share and write runs/NAME, or give an absolute path"
        )
    return value


def as_runs(value: Any) -> Any:
    """The other way round, to compare settings: `runs/...` wherever a text of nested ones names what lies in the folder
    that `runs` stands for, be it MORAY_RUNS or here. So a job goes on with what was begun without one, and the reverse.

    It is names that are compared: what lies behind them is told apart by the fingerprints of what a run reads.
    """
    if isinstance(value, dict):
        return {name: as_runs(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_runs(item) for item in value]
    if not isinstance(value, str):
        return value
    folder = (os.environ.get(RUNS_VARIABLE) or "runs").rstrip("/")
    for begin in ("./runs/", f"{folder}/"):
        if value.startswith(begin):
            return f"runs/{value.removeprefix(begin)}"
    if value.startswith("/"):  # perhaps by another way, through links
        same = os.path.realpath(folder)
        for parent in Path(value).parents:
            if os.path.realpath(parent) == same:
                return f"runs/{Path(value).relative_to(parent)}"
    return value
