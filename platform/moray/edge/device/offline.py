"""What a device writes while there is no server: the drafter goes on below the last verified token, unverified."""

from collections.abc import Collection

from moray.edge.device.answer import EdgeAnswer
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import DraftedTokens


class DraftingAlone:
    """Writes on, one token after the other, from what is verified or shown."""

    def __init__(self, drafter: DeviceDrafter, max_tokens: int, eos_ids: Collection[int]) -> None:
        """
        Args:
            drafter: of the device.
            max_tokens: maximum number of unverified tokens.
            eos_ids: tokens after which nothing is written.
        """
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._eos_ids = frozenset(eos_ids)

    def next(self, answer: EdgeAnswer) -> DraftedTokens | None:
        """One more level of the draft that is written without the server; None if there is none."""
        if not answer.has_root or self._drafter.num_known != len(answer.tokens) - 1:
            return None
        if answer.alone is None:
            chain = self._shown_chain(answer)
            answer.alone = self._drafter.ahead_of(chain, self._max_tokens) or "ended"
            if len(chain) > 1 and not answer.drafted:
                return self._show(answer, chain[1:])
        ahead = answer.alone
        if ahead == "ended":
            return None
        if not self._drafter.grow(ahead):
            answer.alone = "ended"
        return self._show(answer, ahead.first_chain[1:])

    def _shown_chain(self, answer: EdgeAnswer) -> list[int]:
        """What to go on from: the drafted tokens that the user sees, or the chain that is under way, or the root."""
        root = answer.tokens[-1]
        if answer.drafted:
            return [root, *answer.drafted]
        first = answer.under_way[0] if answer.under_way else None
        if first is not None and first.tokens and not first.parents and first.at == len(answer.tokens) - 1:
            return [*first.tokens]
        return [root]

    def _show(self, answer: EdgeAnswer, drafted: list[int]) -> DraftedTokens | None:
        """Show what is new of the drafted tokens, up to an end of the answer."""
        room = answer.request.max_new_tokens - answer.index
        limit = min(room, self._max_tokens)
        ends = [place + 1 for place, token in enumerate(drafted) if token in self._eos_ids]
        drafted = drafted[: min([limit, *ends])]
        num_shown = len(answer.drafted)
        if len(drafted) <= num_shown:
            return None
        answer.drafted = drafted
        return DraftedTokens(answer.index + num_shown, tuple(drafted[num_shown:]))
