"""The interface for publishing metrics, and an implementation that discards them."""

from abc import ABC, abstractmethod

from serve.metrics.series import Series


class Sink(ABC):
    """Receives metrics. Tags are the values of `Series.tags`, in the same order."""

    @abstractmethod
    def add(self, series: Series, value: float, *tags: str) -> None:
        """Increase a counter by `value`, which must be positive."""

    @abstractmethod
    def set(self, series: Series, value: float, *tags: str) -> None:
        """Set a gauge."""

    @abstractmethod
    def observe(self, series: Series, value: float, *tags: str) -> None:
        """Add one value to a histogram."""


class Nowhere(Sink):
    """Discards everything, for replicas that are used without Ray."""

    def add(self, series: Series, value: float, *tags: str) -> None:
        pass

    def set(self, series: Series, value: float, *tags: str) -> None:
        pass

    def observe(self, series: Series, value: float, *tags: str) -> None:
        pass
