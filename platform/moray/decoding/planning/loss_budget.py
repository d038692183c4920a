"""Limits what one drafter may lose: about one percent of the time that plain decoding would take.

Estimates of costs and acceptance are noisy, so drafts that promise a small gain may lose, and trials of a drafter that
does not pay always do. The budget counts the tokens that drafts really saved against what drafting really took:

    balance = plain passes that accepted tokens saved
              - time spent on drafts and on sending tokens to the drafter
              - how much longer passes over trees take than plain ones, as measured at start-up

in units of a plain pass. Past cycles weigh less and less, so a loss is forgiven by 0.1 % a cycle. A balance below the
limit ends drafting until half of that loss is forgiven. Gains count only up to `_MOST_SAVED`: a long good time does not
pay for a long bad one, but a hard passage does not end drafting that pays. Two things are not limited: reading long
prompts into the drafter's memory, which pays off over a whole answer (see `_MOST_AT_ONCE`), and costs that were
measured wrongly at start-up.
"""

_DECAY = 0.999
"""Factor on the balance for every cycle: about the last 1,000 count."""
_FIRST_LIMIT = 4.0
"""Plain passes that drafting may lose at first."""
_LAST_LIMIT = 10.0
"""Plain passes that it may lose out of the last 1,000: one percent."""
_MOST_SAVED = 20.0
"""Plain passes of gains that count. Acceptance comes in bursts: a hard passage of 42 cycles has cost SmolLM2's GLIDE
nine passes, after which drafts paid again (docs/results/decoding.md)."""
_MOST_AT_ONCE = 2.0
"""Plain passes that one cycle counts for at most: sending a long prompt to the drafter pays off over the whole answer,
and a cycle that took very long was disturbed by other work."""


class LossBudget:
    """What one drafter has cost and saved recently, in plain passes."""

    def __init__(self) -> None:
        self._balance, self._limit = 0.0, _FIRST_LIMIT
        self._is_spent = False

    @property
    def is_spent(self) -> bool:
        """Whether drafting has lost so much that it has to stop for a while."""
        return self._is_spent

    def record_cycle(self) -> None:
        """Record that a cycle is over."""
        self._balance *= _DECAY
        self._limit = _LAST_LIMIT + (self._limit - _LAST_LIMIT) * _DECAY
        if self._balance > -self._limit / 2:
            self._is_spent = False

    def spend(self, passes: float) -> None:
        """Count time that plain decoding would not have taken, in a cycle."""
        self._add(-min(passes, _MOST_AT_ONCE))

    def save(self, passes: float) -> None:
        """Count plain passes that accepted tokens have saved."""
        self._add(passes)

    def _add(self, passes: float) -> None:
        self._balance = min(self._balance + passes, _MOST_SAVED)
        if self._balance < -self._limit:
            self._is_spent = True
