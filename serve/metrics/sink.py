"""Where numbers go: an interface, and nowhere."""

from abc import ABC, abstractmethod

from serve.metrics.series import Series


class Sink(ABC):
    """Takes what is counted. Tags are the values of `Series.tags`, in their order."""

    @abstractmethod
    def add(self, series: Series, value: float, *tags: str) -> None:
        """Let a counter grow by more than 0."""

    @abstractmethod
    def set(self, series: Series, value: float, *tags: str) -> None:
        """What a gauge shows from now on."""

    @abstractmethod
    def observe(self, series: Series, value: float, *tags: str) -> None:
        """One more value of a histogram."""


class Nowhere(Sink):
    """Forgets everything: for replicas that are used without Ray."""

    def add(self, series: Series, value: float, *tags: str) -> None:
        pass

    def set(self, series: Series, value: float, *tags: str) -> None:
        pass

    def observe(self, series: Series, value: float, *tags: str) -> None:
        pass
