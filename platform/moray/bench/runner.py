"""Measuring drafters side by side: the same prompts, one after the other, in one process.

For every prompt all methods run in turn (Hugging Face `generate`, our plain decoding, each drafter with each
tree), so that machine noise hits them alike. Plain decoding is both the baseline and the truth that every
speculative answer is compared with.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig

from moray.bench.configs import EvaluateConfig
from moray.bench.specbench import Question
from moray.decoding.speculate import PlainDecoder, SpeculativeDecoder
from moray.decoding.stats import Generation
from moray.drafters.base import Drafter
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message

_WARM_UP_TOKENS = 16


@dataclass
class Method:
    """One way to decode, and everything it did."""

    name: str
    tree: str
    run: Callable[[list[int], int], Generation]
    generations: list[Generation] = field(default_factory=list)
    lossless: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """One turn of a question that was answered by all methods; index i of every method's generations."""

    category: str


@dataclass
class Measurement:
    """All methods over all prompts. `methods[0]` is plain decoding."""

    methods: list[Method]
    asked: list[Asked] = field(default_factory=list)
    num_skipped: int = 0
    """Turns that did not fit into the context."""


class Runner:
    """Builds the decoders once and asks them question after question."""

    def __init__(
        self, target: Target, drafters: dict[str, Drafter], tokenizer: ChatTokenizer, config: EvaluateConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
        self._capacity = target.spec.max_positions
        methods = [Method("plain", "", self._plain(target))]
        if config.compare_generate:
            methods.append(Method("generate", "", self._hugging_face(target)))
        for name, drafter in drafters.items():
            for shape in config.trees:
                decoder = SpeculativeDecoder(target, drafter, shape, self._capacity)
                methods.append(Method(name, shape.name, self._speculative(decoder)))
        self.measurement = Measurement(methods)

    def ask(self, questions: list[Question]) -> Iterator[Asked]:
        """Answer all turns of all questions with all methods; yields after each turn.

        A turn that does not fit into the context, with room for one answer token, ends its question.
        """
        for question in questions:
            messages: list[Message] = []
            for turn, text in enumerate(question.turns):
                messages.append({"role": "user", "content": text})
                prompt = self._tokenizer.encode_prompt(messages)
                if len(prompt) >= self._capacity:
                    self.measurement.num_skipped += len(question.turns) - turn
                    break
                if not self.measurement.asked:
                    for method in self.measurement.methods:
                        method.run(prompt, _WARM_UP_TOKENS)
                asked = Asked(question.category)
                answer = self._ask_all(prompt, len(self.measurement.asked))
                self.measurement.asked.append(asked)
                yield asked
                messages.append({"role": "assistant", "content": self._tokenizer.decode(answer)})

    def _ask_all(self, prompt: list[int], index: int) -> list[int]:
        methods = self.measurement.methods
        # Another order for every prompt: none of the methods always runs on warm or on cold caches.
        shift = index % len(methods)
        generations = {
            id(method): method.run(prompt, self._config.max_new_tokens) for method in methods[shift:] + methods[:shift]
        }
        truth = generations[id(methods[0])].tokens
        for method in methods:
            generation = generations[id(method)]
            method.generations.append(generation)
            method.lossless.append(generation.tokens == truth)
        return truth

    def _plain(self, target: Target) -> Callable[[list[int], int], Generation]:
        decoder = PlainDecoder(target, self._capacity)
        return lambda prompt, most: decoder.generate(prompt, self._config.sampling, most, self._eos_ids)

    def _speculative(self, decoder: SpeculativeDecoder) -> Callable[[list[int], int], Generation]:
        return lambda prompt, most: decoder.generate(prompt, self._config.sampling, most, self._eos_ids)

    def _hugging_face(self, target: Target) -> Callable[[list[int], int], Generation]:
        sampling = self._config.sampling
        options: dict[str, object] = {"do_sample": not sampling.is_greedy}
        if not sampling.is_greedy:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        # What a model brings along (repetition penalties, its own top-p) is another task than ours; it would fill in
        # for whatever is not named in the call.
        target.model.generation_config = GenerationConfig(
            eos_token_id=sorted(self._eos_ids), pad_token_id=next(iter(self._eos_ids), 0)
        )

        @torch.inference_mode()
        def run(prompt: list[int], most: int) -> Generation:
            tokens = torch.tensor([prompt], device=target.device)
            limit = min(most, self._capacity - len(prompt))
            begin = time.perf_counter()
            output = target.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=limit,
                **options,
            )
            return Generation(output[0, len(prompt) :].tolist(), seconds=time.perf_counter() - begin)

        return run
