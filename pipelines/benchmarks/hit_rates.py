"""How often the target's next token is a drafter's k-th candidate, by level of the draft tree.

The target answers with plain greedy decoding. Each position of the answer then serves as a root, and the drafter is
teacher-forced along the true continuation:

    text        t0 ... t5   t6    t7    t8        t0..t5 given to `extend`, t6 the root
    step at     level 0: t6   level 1: t7   level 2: t8
    true next            t7            t8            t9      its rank among the candidates is counted

A rate therefore applies to a node whose ancestors were all right, whatever their ranks, as Medusa's tree search assumes
(arXiv 2401.10774, section 2.3.3). Memory holds only one conversation and one chunk of its taps at a time.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from moray.batch import Taps
from moray.bench.replay.ranks import picks_at, ranks_below
from moray.bench.specbench import Question
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.observed import taps_of_text
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.base import Drafter
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class HitRates:
    """How often the candidate at each level and rank was the target's next token."""

    rates: tuple[tuple[float, ...], ...]
    """By level, then by rank; 0 where nothing was counted."""
    num_positions: tuple[int, ...]
    """Positions counted at each level. Positions where the drafter proposed nothing count as misses."""


class HitCounter:
    """Teacher-forces a drafter along texts and counts the ranks of the true tokens."""

    def __init__(self, target: Target, drafter: Drafter, levels: int, ranks: int, max_model_len: int) -> None:
        """
        Args:
            target: the model whose answers are the truth.
            drafter: the drafter to measure; it gets its own state.
            levels: maximum levels below a root, capped by the drafter's `max_depth`.
            ranks: candidates per level.
            max_model_len: maximum tokens of prompt and answer together.
        """
        self.max_model_len = max_model_len
        self._drafter = drafter
        self._runner = runner_for(target, max_model_len, 0)
        self._decoder = SpeculativeDecoder(target, None, max_model_len=max_model_len, runner=self._runner)
        self._levels = levels if drafter.max_depth is None else min(levels, drafter.max_depth)
        self._ranks = ranks
        sampler = Sampler(_GREEDY, target.spec.vocab_size, target.device)
        (self._pick,) = picks_at(sampler, 0, self._levels, [ranks])
        self._state = drafter.new_state(max_model_len, self._levels)
        self._candidates = torch.arange(ranks, device=target.device)
        self._hits = torch.zeros(self._levels, ranks, dtype=torch.long, device=target.device)
        self._counted = [0] * self._levels
        self._num_known = 0  # tokens of the current text that the drafter has seen

    def answer(self, prompt: list[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
        """Generate the target's greedy answer to a prompt.

        Raises:
            DataError: the prompt is empty or leaves no room in the context.
        """
        return self._decoder.generate(prompt, _GREEDY, max_new_tokens, eos_ids).tokens

    @torch.inference_mode()
    def count(self, prompt: list[int], answer: list[int]) -> None:
        """Count every position of an answer to a prompt."""
        text = torch.tensor([*prompt, *answer], device=self._hits.device)
        self._num_known = 0
        self._drafter.reset(self._state)
        known = [*prompt, *answer[:-1]]  # the last token has no successor, so it is no root
        for tokens, taps in taps_of_text(self._runner, known, self._drafter.observed):
            self._follow(text, len(prompt), tokens, taps)

    def _follow(self, text: Int[Tensor, " seq"], first_root: int, tokens: Int[Tensor, " new"], taps: Taps) -> None:
        """Feed a chunk of the text to the drafter, counting below each answer token before it is fed."""
        memory = self._drafter.observe(taps)
        begin, end = self._num_known, self._num_known + tokens.shape[0]
        for known, until in pairwise(sorted({begin, *range(max(begin, first_root), end), end})):
            if known >= first_root:
                self._count_below(text, known)
            part = {name: value[:, known - begin : until - begin] for name, value in memory.items()}
            self._drafter.extend(self._state, text[known:until], part)
        self._num_known = end

    def _count_below(self, text: Int[Tensor, " seq"], root: int) -> None:
        """Draft below one root along the true tokens; the drafter has seen everything before the root."""
        levels = min(self._levels, text.shape[0] - 1 - root)
        (ranks,) = ranks_below(self._drafter, self._state, text, root, levels, [self._pick])
        reached = ranks.shape[0]
        for level in range(min(levels, reached + 1)):  # one more than reached: nothing was proposed there, a miss
            self._counted[level] += 1
        self._hits[:reached] += ranks[:, None] == self._candidates

    @property
    def measured(self) -> HitRates:
        """The rates so far; waits for the device."""
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
    """Ask all turns of all questions; skip the rest of a question once its prompt fills the context.

    Yields:
        the number of tokens in each answer.
    """
    for question in questions:
        messages: list[Message] = []
        for text in question.turns:
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.encode_prompt(messages)
            if len(prompt) >= counter.max_model_len:
                break
            answer = counter.answer(prompt, max_new_tokens, eos_ids)
            counter.count(prompt, answer)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
            yield len(answer)
