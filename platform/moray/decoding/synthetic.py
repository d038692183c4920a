"""Synthetic costs of passes and drafts, for scaling experiments without accelerators. Torch-free.

The real models run, so the tokens are real; then the process sleeps for the rest of the configured time, as it would
wait for an accelerator. Such measurements show how speed changes with the number of replicas, not how fast anything is.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from moray.config import Config


class SyntheticCost(Config):
    """Minimum time of a pass or a draft, by number of sequences; no cost at 0."""

    ms: float = Field(default=0.0, ge=0)
    """Minimum milliseconds of a pass or draft, however many sequences it has; 0 for none. It stands for reading the
    weights."""
    ms_per_sequence: float = Field(default=0.0, ge=0)
    """Milliseconds that each sequence adds to a pass or draft; 0 for none. It stands for computing on a busy device."""

    def seconds(self, num_sequences: int | float) -> float:
        """Cost of one pass or draft of `num_sequences`."""
        return (self.ms + self.ms_per_sequence * num_sequences) / 1000

    @contextmanager
    def spent(self, num_sequences: int) -> Iterator[None]:
        """At the end of the block, sleep until its cost in time has passed."""
        end = time.perf_counter() + self.seconds(num_sequences)
        yield
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)


NO_COST = SyntheticCost()


class SyntheticCosts(Config):
    """For scaling experiments only: sleep in addition to the real work."""

    verify: SyntheticCost = NO_COST
    """Cost of one target pass over running sequences; prompts are read at their real cost."""
    draft: SyntheticCost = NO_COST
    """Cost of one draft, whatever its tree, for all sequences of one request."""

    @property
    def is_on(self) -> bool:
        """Whether there is any synthetic cost."""
        return self != SyntheticCosts()

    @property
    def notice(self) -> str:
        """One line for the log."""
        parts = (f"{name} {cost.ms:g} ms + {cost.ms_per_sequence:g} ms per sequence" for name, cost in self)
        return f"SYNTHETIC COSTS ARE ON ({', '.join(parts)}): replicas sleep, and speeds are made up"
