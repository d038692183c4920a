"""Made-up costs of passes and drafts, for scaling experiments where there are no accelerators. Torch-free.

The real models run, so the tokens are real; then the process sleeps for the rest of the configured time, as it would
wait for an accelerator. Such measurements show how speed changes with the number of replicas, not how fast anything is.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from moray.config import Config


class SyntheticCost(Config):
    """Least time of a pass or a draft, depending on its number of sequences; no cost at 0."""

    ms: float = Field(default=0.0, ge=0)
    """Least milliseconds of a pass or a draft of any number of sequences; 0 for none. It stands for reading the
    weights."""
    ms_per_sequence: float = Field(default=0.0, ge=0)
    """Milliseconds that each sequence adds to a pass or a draft; 0 for none. It stands for computing on a busy
    device."""

    def seconds(self, num_sequences: int | float) -> float:
        """Of one pass or draft of `num_sequences`."""
        return (self.ms + self.ms_per_sequence * num_sequences) / 1000

    @contextmanager
    def spent(self, num_sequences: int) -> Iterator[None]:
        """Sleep at the end of a block until its time has passed."""
        end = time.perf_counter() + self.seconds(num_sequences)
        yield
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)


NO_COST = SyntheticCost()


class SyntheticCosts(Config):
    """For scaling experiments only: sleeps beside the real work."""

    verify: SyntheticCost = NO_COST
    """Of one target pass over running sequences; prompts are read at their real cost."""
    draft: SyntheticCost = NO_COST
    """Of one draft, whatever its tree, for the sequences that one message asks for."""

    @property
    def is_on(self) -> bool:
        """Whether any cost is made up."""
        return self != SyntheticCosts()

    @property
    def notice(self) -> str:
        """One line for whoever reads a log."""
        parts = (f"{name} {cost.ms:g} ms + {cost.ms_per_sequence:g} ms per sequence" for name, cost in self)
        return f"SYNTHETIC COSTS ARE ON ({', '.join(parts)}): replicas sleep, and speeds are made up"
