"""Made-up costs of passes and drafts, for scaling experiments where there are no accelerators. Torch-free.

The real models run, so tokens are what they are; then the process sleeps for what is left of the time that is set, as
it would wait for an accelerator. Nothing that is measured so says how fast anything is: it says how speed changes with
the numbers of replicas.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from moray.config import Config


class SyntheticCost(Config):
    """Least time that something takes for some sequences together; none at 0."""

    ms: float = Field(default=0.0, ge=0)
    """Least milliseconds of a pass or a draft, however many sequences are in it; 0 for none. What reading the weights
    takes."""
    ms_per_sequence: float = Field(default=0.0, ge=0)
    """Milliseconds more of a pass or a draft for every sequence in it; 0 for none. What computing takes, once a device
    is busy."""

    def seconds(self, num_sequences: int | float) -> float:
        """For so many sequences together."""
        return (self.ms + self.ms_per_sequence * num_sequences) / 1000

    @contextmanager
    def spent(self, num_sequences: int) -> Iterator[None]:
        """Sleep at the end of a block for what is left of its time."""
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
        """Whether anything is made up."""
        return self != SyntheticCosts()

    @property
    def notice(self) -> str:
        """One line for whoever reads a log."""
        parts = (f"{name} {cost.ms:g} ms + {cost.ms_per_sequence:g} ms per sequence" for name, cost in self)
        return f"SYNTHETIC COSTS ARE ON ({', '.join(parts)}): replicas sleep, and speeds are made up"
