"""Moray: train, sweep and serve speculative-decoding drafters on Ray.

`from moray import Target, load_drafter, generate` decodes in Python (see `moray.api`). Importing moray alone loads
neither torch nor Ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moray.api import Answer, Target, generate, load_drafter

__all__ = ["Answer", "Target", "generate", "load_drafter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from moray import api

        return getattr(api, name)
    raise AttributeError(f"module 'moray' has no attribute '{name}'")
