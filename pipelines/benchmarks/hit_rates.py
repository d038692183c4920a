"""How often the target's next token is the k-th candidate of a drafter, level by level.

The target answers plainly and greedily; then every position of its answer is a root, and the drafter is led along the
true continuation:

    text        t0 ... t5   t6    t7    t8        t0..t5 given to `extend`, t6 the root
    step at     level 0: t6   level 1: t7   level 2: t8
    true next            t7            t8            t9      its rank among the candidates is counted

So a rate holds for a node whose ancestors were right, whatever their ranks, which is what Medusa's search of a tree
assumes (arXiv 2401.10774, section 2.3.3). One conversation is held at a time, and one chunk of its taps.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import Taps
from moray.bench.specbench import Question
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.session import TargetSession
from moray.drafters.base import Drafter
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class HitRates:
    """Of every level, how often each rank was the target's next token."""

    rates: tuple[tuple[float, ...], ...]
    """By level, then by rank; 0 where nothing was counted."""
    num_positions: tuple[int, ...]
    """Of every level, the positions that were counted; those at which the drafter proposed nothing are misses."""


class HitCounter:
    """Leads a drafter along texts and counts the ranks of the true tokens."""

    def __init__(self, target: Target, drafter: Drafter, levels: int, ranks: int, capacity: int) -> None:
        """
        Args:
            target: whose answers are true.
            drafter: a state of its own is made for it.
            levels: most levels below a root; a drafter of fewer has fewer.
            ranks: candidates of each level.
            capacity: most tokens of prompt and answer together.
        """
        self.capacity = capacity
        self._drafter = drafter
        self._session = TargetSession(target, capacity)
        self._plain = PlainDecoder(target, capacity, self._session)
        self._levels = levels if drafter.max_depth is None else min(levels, drafter.max_depth)
        self._ranks = ranks
        self._select = Sampler(_GREEDY, target.spec.vocab_size, target.device).selector(0, self._levels, False)
        self._state = drafter.new_state(capacity, self._levels)
        self._hits = torch.zeros(self._levels, ranks, dtype=torch.long, device=target.device)
        self._counted = [0] * self._levels
        self._num_known = 0  # tokens of the present text that the drafter was given

    def answer(self, prompt: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
        """The target's own greedy answer to a prompt.

        Raises:
            DataError: the prompt is empty or leaves no room in the context.
        """
        return self._plain.generate(prompt, _GREEDY, max_new_tokens, eos_ids).tokens

    @torch.inference_mode()
    def count(self, prompt: list[int], answer: list[int]) -> None:
        """Count every position of an answer to a prompt."""
        text = torch.tensor([*prompt, *answer], device=self._hits.device)
        self._num_known = 0
        self._drafter.reset(self._state)
        self._session.begin(self._drafter.observed)
        follow = partial(self._follow, text, len(prompt))
        self._session.prefill(text[:-1].tolist(), follow)  # nothing follows the last token: it is no root

    def _follow(self, text: Int[Tensor, " seq"], first_root: int, tokens: Int[Tensor, " new"], taps: Taps) -> None:
        """Give a chunk of the text to the drafter: the prompt at once, tokens of the answer each as a root first."""
        memory = self._drafter.observe(taps)
        begin, end = self._num_known, self._num_known + tokens.shape[0]
        for known, until in pairwise(sorted({begin, *range(max(begin, first_root), end), end})):
            if known >= first_root:
                self._count_below(text, known)
            part = {name: value[:, known - begin : until - begin] for name, value in memory.items()}
            self._drafter.extend(self._state, text[known:until], part)
        self._num_known = end

    def _count_below(self, text: Int[Tensor, " seq"], root: int) -> None:
        """Draft along the truth below one root; everything before it is known."""
        for level in range(min(self._levels, text.shape[0] - 1 - root)):
            self._counted[level] += 1
            logits: Float[Tensor, "1 vocab"] | None = self._drafter.step(
                self._state, text[root + level : root + level + 1], None, level
            )
            if logits is None:
                return
            candidates, _, _ = self._select(logits, level, self._ranks)
            self._hits[level] += candidates[0] == text[root + level + 1]

    @property
    def measured(self) -> HitRates:
        """What was counted so far; waits for the device."""
        rates = [
            tuple(hits / max(1, counted) for hits in row)
            for row, counted in zip(self._hits.tolist(), self._counted, strict=True)
        ]
        return HitRates(tuple(rates), tuple(self._counted))


def count_questions(
    counter: HitCounter,
    questions: Iterable[Question],
    tokenizer: ChatTokenizer,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[int]:
    """Ask all turns of all questions; one whose prompt leaves no room in the context ends its question.

    Yields:
        the tokens of each answer.
    """
    for question in questions:
        messages: list[Message] = []
        for text in question.turns:
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.encode_prompt(messages)
            if len(prompt) >= counter.capacity:
                break
            answer = counter.answer(prompt, max_new_tokens, eos_ids)
            counter.count(prompt, answer)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
            yield len(answer)
