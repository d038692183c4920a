"""A searcher that proposes only valid combinations, each of them once."""

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from sweeps.tuning.spaces import Verdict

_MAX_ASKED = 50

Proposal = dict[str, Any]
"""A combination as a searcher draws it: a value by key, in the searcher's terms."""


class DistinctSearcher(Searcher):
    """Asks an inner searcher until it proposes something new.

    Unfit proposals are completed without a result, so that the inner searcher learns to avoid them; repeated ones are
    completed as errors, from which it learns nothing. If nothing new comes, a spare proposal is used; the search ends
    if there is none.
    """

    def __init__(
        self, inner: Searcher, judge: Callable[[Proposal], Verdict], spare: Callable[[], Proposal | None]
    ) -> None:
        """
        Args:
            inner: proposes promising combinations.
            judge: judge(proposal) returns whether it is new, known or unfit; it may record the proposal.
            spare: spare() returns some new combination, promising or not; None if there is none.
        """
        super().__init__(metric=inner.metric, mode=inner.mode)
        self._inner, self._judge, self._spare = inner, judge, spare
        self._names: dict[str, str] = {}
        self._spares: dict[str, Proposal] = {}
        self._num_asked = 0

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec: Any) -> bool:
        """Pass the space to the inner searcher."""
        return self._inner.set_search_properties(metric, mode, config, **spec)

    def suggest(self, trial_id: str) -> Any:
        """Propose something new, or `Searcher.FINISHED` if there is nothing."""
        for _ in range(_MAX_ASKED):
            name, self._num_asked = f"{trial_id}-{self._num_asked}", self._num_asked + 1
            proposal = self._inner.suggest(name)
            if not isinstance(proposal, dict):
                return proposal
            verdict = self._judge(proposal)
            if verdict == "new":
                self._names[trial_id] = name
                return proposal
            self._inner.on_trial_complete(name, error=verdict == "again")
        spare = self._spare()
        if spare is None:
            return Searcher.FINISHED
        self._spares[trial_id] = spare
        return spare

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass the result to the inner searcher."""
        if trial_id in self._names:
            self._inner.on_trial_result(self._names[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Pass the result to the inner searcher; a spare proposal is added as an evaluated point."""
        if trial_id in self._names:
            self._inner.on_trial_complete(self._names[trial_id], result, error)
        elif result and self.metric in result and not error:
            self._inner.add_evaluated_point(self._spares[trial_id], result[self.metric])

    def save(self, checkpoint_path: str) -> None:
        """Do nothing, because the trial folders hold everything that was tried."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, as in `save`."""
