"""Measures drafters side by side, on the same prompts in one process.

All methods (Hugging Face `generate`, our plain decoding, each drafter with each tree) run in turn on each prompt, so
that machine noise affects them alike; temperatures alternate from prompt to prompt for the same reason. Plain decoding
is both the baseline and the reference that every speculative answer is compared with.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import GenerationConfig

from moray.bench.answers import AnswerLog, MethodAnswer
from moray.bench.configs import EvaluateConfig
from moray.bench.specbench import Question
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.planning.fitting import depth_notice, is_too_deep
from moray.decoding.sampling.stop import StopStrings
from moray.drafters.base import Drafter
from moray.errors import ConfigError
from moray.targets.kernels.kinds import stock_kernels
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message
from moray.trees.shapes import AnyShape

_WARM_UP_TOKENS = 16

Run = Callable[[list[int], SamplingParams, int, int], Generation]
"""run(prompt, params, max_new_tokens, sequence) returns one answer; `sequence` numbers the prompt (see `Sampler`)."""


@dataclass
class Method:
    """One way to decode, and all its answers."""

    name: str
    tree: str
    run: Run
    generations: list[Generation] = field(default_factory=list)
    lossless: list[bool] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name and tree, as progress shows them."""
        return f"{self.name}, {self.tree}" if self.tree else self.name

    def only(self, indices: Sequence[int]) -> "Method":
        """A copy with only some of the answers."""
        generations = [self.generations[i] for i in indices]
        return Method(self.name, self.tree, self.run, generations, [self.lossless[i] for i in indices])


@dataclass(frozen=True)
class Asked:
    """One turn that all methods answered; the i-th of them belongs to index i of every method's generations."""

    category: str
    temperature: float


@dataclass
class Measurement:
    """The answers of all methods to all prompts. `methods[0]` is plain decoding."""

    methods: list[Method]
    asked: list[Asked] = field(default_factory=list)
    num_skipped: int = 0
    """Turns that did not fit into the context, counted once per temperature."""
    notes: list[str] = field(default_factory=list)
    """What was not measured, with the reason."""

    def at(self, temperature: float) -> "Measurement":
        """The part measured at one temperature, without the count of skipped turns and the notes."""
        indices = [i for i, asked in enumerate(self.asked) if asked.temperature == temperature]
        return Measurement([method.only(indices) for method in self.methods], [self.asked[i] for i in indices])


class Runner:
    """Builds all decoders once and asks them one question after another."""

    def __init__(
        self,
        target: Target,
        drafters: dict[str, Drafter],
        tokenizer: ChatTokenizer,
        config: EvaluateConfig,
        trees: Mapping[str, Sequence[AnyShape]] | None = None,
    ) -> None:
        """
        Args:
            target: shared by all methods.
            drafters: by the name of their rows.
            tokenizer: the target's.
            config: what to measure, and how; `drafters` takes the place of `config.drafters`.
            trees: the trees of each drafter by name; None measures each with all of `config.trees`.

        Raises:
            ConfigError: all trees are too deep for their drafters.
        """
        self.max_model_len = min(target.spec.max_positions, config.max_model_len)
        """Maximum tokens of prompt and answer together."""
        self._config = config
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(target.eos_ids) | frozenset(tokenizer.eos_ids)
        self._is_warm = False
        self._show: Callable[[str], None] = lambda doing: None
        self._stop = StopStrings(config.stop, tokenizer.decode) if config.stop else None
        # The decoders take turns, so they share one KV cache.
        runner = runner_for(target, self.max_model_len, max(shape.num_nodes for shape in config.trees))
        decoder_of = partial(
            SpeculativeDecoder, target, max_model_len=self.max_model_len, runner=runner, is_timed=config.exact_phases
        )
        notes: list[str] = []
        methods = [Method("plain", "", self._ours(decoder_of(None)))]
        if config.compare_generate and target.is_split:
            notes.append("generate: left out, transformers cannot run a tensor-parallel target")
        elif config.compare_generate:
            methods.append(Method("generate", "", self._hugging_face(target)))
        for name, drafter in drafters.items():
            for shape in config.trees if trees is None else trees[name]:
                if is_too_deep(shape, drafter.max_depth):
                    notes.append(
                        f"{name}, {shape.name}: left out, this drafter drafts at most {drafter.max_depth} levels"
                    )
                    continue
                decoder = decoder_of(drafter, shape)
                notes += depth_notice(shape, name, decoder.shape)
                methods.append(Method(name, shape.name, self._ours(decoder)))
        if notes and not any(method.tree for method in methods):
            raise ConfigError(f"trees are too deep for every drafter ({'; '.join(notes)}); take shallower ones")
        self.measurement = Measurement(methods, notes=notes)
        self._names = [(method.name, method.tree) for method in methods]

    def ask(
        self,
        questions: Sequence[Question],
        log: AnswerLog | None = None,
        first_sequence: int = 0,
        show: Callable[[str], None] = lambda doing: None,
    ) -> Iterator[int]:
        """Answer all turns of all questions with all methods, at each temperature.

        Answers recorded in `log` are reused, and new ones are appended to it. If a prompt leaves no room in the
        context for an answer token, the rest of its question is skipped at that temperature.

        Args:
            questions: in the order of asking.
            log: the answers of this evaluation on disk.
            first_sequence: number of turns of the questions asked before these.
            show: told which method runs next, because a turn takes minutes with many of them.

        Yields:
            the number of turns just answered or skipped; a turn counts once per temperature, and turns from `log` do
            not count.
        """
        sequence = (
            first_sequence  # of a question's first turn; must not depend on skipping, resuming or the temperature
        )
        self._show = show
        for question in questions:
            yield from self._ask_question(question, sequence, log)
            sequence += len(question.turns)

    def _ask_question(self, question: Question, first_sequence: int, log: AnswerLog | None) -> Iterator[int]:
        conversations: dict[SamplingParams, list[Message]] = {params: [] for params in self._config.samplings}
        for turn, text in enumerate(question.turns):
            for params, messages in list(conversations.items()):
                messages.append({"role": "user", "content": text})
                prompt = self._tokenizer.encode_prompt(messages)
                if len(prompt) >= self.max_model_len:
                    del conversations[params]
                    num_left = len(question.turns) - turn
                    self.measurement.num_skipped += num_left
                    yield num_left
                    continue
                answers = log.take(question.question_id, turn, params.temperature, self._names) if log else None
                is_new = answers is None
                if answers is None:
                    answers = self._answer(prompt, params, first_sequence + turn)
                    if log:
                        log.append(question.question_id, turn, params.temperature, answers)
                truth = self._record(Asked(question.task, params.temperature), answers)
                messages.append({"role": "assistant", "content": self._tokenizer.decode(truth)})
                if is_new:
                    yield 1

    def _answer(self, prompt: list[int], params: SamplingParams, sequence: int) -> tuple[MethodAnswer, ...]:
        """Answer a prompt with every method; the result is in the order of `measurement.methods`."""
        if not self._is_warm:
            self._warm_up(prompt)
        methods = self.measurement.methods
        # Rotate the order per prompt, so that no method always runs with warm or cold caches.
        shift = sequence % len(methods)
        generations: dict[int, Generation] = {}
        for method in methods[shift:] + methods[:shift]:
            self._show(method.label)
            generations[id(method)] = method.run(prompt, params, self._config.max_new_tokens, sequence)
        return tuple(
            MethodAnswer(method=method.name, tree=method.tree, generation=generations[id(method)]) for method in methods
        )

    def _warm_up(self, prompt: list[int]) -> None:
        """Run every method once, untimed, because first calls in a process are slow."""
        for method in self.measurement.methods:
            self._show(f"warm-up: {method.label}")
            for params in self._config.samplings:
                method.run(prompt, params, _WARM_UP_TOKENS, 0)
        self._is_warm = True

    def _record(self, asked: Asked, answers: tuple[MethodAnswer, ...]) -> list[int]:
        """Add one turn to the measurement; returns the tokens of plain decoding."""
        truth = answers[0].generation.tokens
        for method, answer in zip(self.measurement.methods, answers, strict=True):
            method.generations.append(answer.generation)
            method.lossless.append(answer.generation.tokens == truth)
        self.measurement.asked.append(asked)
        return truth

    def _ours(self, decoder: SpeculativeDecoder) -> Run:
        return lambda prompt, params, max_new_tokens, sequence: decoder.generate(
            prompt, params, max_new_tokens, self._eos_ids, sequence=sequence, stop=self._stop
        )

    def _hugging_face(self, target: Target) -> Run:
        # Drop the model's own defaults (repetition penalty, top-p and so on): they would apply to every option that
        # the call below does not set.
        target.model.generation_config = GenerationConfig(
            eos_token_id=sorted(self._eos_ids), pad_token_id=next(iter(self._eos_ids), 0)
        )

        @torch.inference_mode()
        def run(prompt: list[int], params: SamplingParams, max_new_tokens: int, sequence: int) -> Generation:
            options: dict[str, object] = {"do_sample": not params.is_greedy}
            if not params.is_greedy:
                options |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
                torch.manual_seed(params.seed + sequence)  # the same prompt gives the same text again
            tokens = torch.tensor([prompt], device=target.device)
            limit = min(max_new_tokens, self.max_model_len - len(prompt))
            begin = time.perf_counter()
            with stock_kernels():
                output = target.model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=limit,
                    stop_strings=list(self._config.stop) or None,
                    tokenizer=self._tokenizer.tokenizer,
                    **options,
                )
            return Generation(output[0, len(prompt) :].tolist(), seconds=time.perf_counter() - begin)

        return run
