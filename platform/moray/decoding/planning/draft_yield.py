"""What became of drafts, apart from acceptance by level: how many were empty, and which nodes pruning kept."""

from moray.decoding.planning.acceptance import DECAY

_PRIOR_WEIGHT = 2.0
"""Weight, in drafts, of the initial estimates: every draft is filled, and nodes are accepted as often as their scores
say."""


class DraftYield:
    """Counts of one drafter, in which older cycles weigh less."""

    def __init__(self) -> None:
        self._num_answered = self._num_filled = 0.0
        """Drafts, and how many of them were not empty."""
        self._promised = self._kept = 0.0
        """Accepted nodes that the scores of pruned trees promised, and those really accepted."""
        self._levels = self._nodes = 0.0
        """Levels and nodes of pruned trees."""

    @property
    def filled(self) -> float:
        """Share of drafts that are not empty."""
        return (self._num_filled + _PRIOR_WEIGHT) / (self._num_answered + _PRIOR_WEIGHT)

    @property
    def trust(self) -> float:
        """Ratio of accepted nodes to those that scores promised: 1 for a drafter that is well calibrated."""
        return (self._kept + _PRIOR_WEIGHT) / (self._promised + _PRIOR_WEIGHT)

    @property
    def nodes_per_level(self) -> float:
        """Nodes per level that pruning keeps; one at first, as in a chain."""
        return (self._nodes + _PRIOR_WEIGHT) / (self._levels + _PRIOR_WEIGHT)

    def record_draft(self, *, is_empty: bool, cycles: float = 1.0) -> None:
        """Record one draft; earlier ones age by `cycles`, a fraction of one if a pass verifies several drafts."""
        decay = DECAY**cycles
        self._num_answered = self._num_answered * decay + 1.0
        self._num_filled = self._num_filled * decay + (not is_empty)

    def record_nodes(
        self, num_levels: int, num_nodes: int, num_accepted: int, promised: float, cycles: float = 1.0
    ) -> None:
        """Record one verified draft; `num_nodes` is 0 if scores did not decide how many nodes were verified."""
        decay = DECAY**cycles
        self._promised = self._promised * decay + promised
        self._kept = self._kept * decay + (num_accepted if num_nodes else 0)
        self._levels = self._levels * decay + (num_levels if num_nodes else 0)
        self._nodes = self._nodes * decay + num_nodes

    def decay(self) -> None:
        """Let all shares return towards what is believed at first."""
        self._num_answered, self._num_filled = self._num_answered * DECAY, self._num_filled * DECAY
        self._promised, self._kept = self._promised * DECAY, self._kept * DECAY
        self._levels, self._nodes = self._levels * DECAY, self._nodes * DECAY
