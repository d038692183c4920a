"""How README has users start Ray where it serves: the variables of configs/serve/ray.env."""

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "configs" / "serve" / "ray.env"
_LINES = FILE.read_text(encoding="utf-8").splitlines()
VARIABLES = dict(line.split("=", 1) for line in _LINES if line and not line.startswith("#"))
