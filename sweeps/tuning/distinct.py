"""A searcher that proposes only what can be tried, and nothing twice."""

from collections.abc import Callable
from typing import Any

from ray.tune.search import Searcher

from sweeps.tuning.spaces import Verdict

_MAX_ASKED = 50


class DistinctSearcher(Searcher):
    """Asks another searcher until it proposes something new. That one is told what is unfit, which keeps it from there,
    and nothing of what comes again. When nothing new comes any more a spare proposal is taken; the search ends where
    there is none."""

    def __init__(
        self, inner: Searcher, judge: Callable[[dict[str, Any]], Verdict], spare: Callable[[], dict[str, Any] | None]
    ) -> None:
        """
        Args:
            inner: who knows what is promising.
            judge: judge(proposal); it may count.
            spare: spare() is something new, however promising; None if there is nothing.
        """
        super().__init__(metric=inner.metric, mode=inner.mode)
        self._inner, self._judge, self._spare = inner, judge, spare
        self._names: dict[str, str] = {}
        self._spares: dict[str, dict[str, Any]] = {}
        self._num_asked = 0

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec: Any) -> bool:
        """Hand the space on."""
        return self._inner.set_search_properties(metric, mode, config, **spec)

    def suggest(self, trial_id: str) -> Any:
        """Something new, or the word that there is nothing."""
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
        """Hand it on."""
        if trial_id in self._names:
            self._inner.on_trial_result(self._names[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Hand it on."""
        if trial_id in self._names:
            self._inner.on_trial_complete(self._names[trial_id], result, error)
        elif result and self.metric in result and not error:
            self._inner.add_evaluated_point(self._spares[trial_id], result[self.metric])

    def save(self, checkpoint_path: str) -> None:
        """Nothing: what was tried lies in folders."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, too."""
