"""Moray in Python: load a target and a drafter, and decode. `from moray import Target, load_drafter, generate`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from moray.config import Config, validate
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.generation import Generation, tau
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.detokenizer import IncrementalDetokenizer, Piece
from moray.decoding.sampling.stop import StopStrings
from moray.drafters.base import Drafter
from moray.drafters.configs import UsableConfig
from moray.drafters.loading import build_drafters
from moray.targets.head import TargetHead
from moray.targets.model import Target as TargetModel
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer, Message
from moray.trees.shapes import AdaptiveShape, AnyShape

ADAPTIVE = AdaptiveShape(type="adaptive", depth=8)
"""Chains whose depth is chosen in every cycle, down to no draft at all."""
MAX_MODEL_LEN = 4096
_MAX_DECODERS = 8
"""That a target keeps, the last ones used."""
_MAX_NODES = 128
"""Of a tree for which the shared memory has room; a larger one has memory of its own."""


class TargetSettings(TypedDict, total=False):
    """How a target is loaded; what is left out has the default of `targets.spec.TargetConfig`."""

    dtype: Literal["float32", "bfloat16", "float16"]
    """Number format of the weights and activations."""
    device: Literal["auto", "cpu", "cuda"]
    """Device to run on; auto takes the GPU if there is one."""
    tensor_parallel: int
    """Number of processes on this machine over which the target is split."""
    template: str | None
    """Chat template: a jinja file, or `plain` for none; None for the tokenizer's own."""


class SamplingSettings(TypedDict, total=False):
    """How tokens are drawn (see `decoding.params.SamplingParams`); greedy without any."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    acceptance_method: Literal["gumbel_coupled", "rejection", "typical"]
    typical_epsilon: float
    typical_delta: float


class Target:
    """A model whose output must come out unchanged, its tokenizer, and key/value memory for one answer at a time."""

    def __init__(self, model: TargetModel, tokenizer: ChatTokenizer, max_model_len: int = MAX_MODEL_LEN) -> None:
        """`max_model_len` is the most tokens of prompt and answer together, for which memory is allocated here."""
        self.model, self.tokenizer = model, tokenizer
        self.max_model_len = min(model.spec.max_positions, max_model_len)
        self._runner = runner_for(model, self.max_model_len, _MAX_NODES)
        self._decoders: dict[tuple[int, AnyShape | None], SpeculativeDecoder] = {}

    @classmethod
    def load(
        cls, model: str | Path, *, max_model_len: int = MAX_MODEL_LEN, **settings: Unpack[TargetSettings]
    ) -> "Target":
        """Load a model's weights and its tokenizer.

        Args:
            model: folder of a Hugging Face model, its name on the Hub, or a GGUF file of the families llama, qwen2
                and qwen3.
            max_model_len: most tokens of prompt and answer together; no more than the model's own context.
            settings: see `TargetSettings`.

        Raises:
            ConfigError: no such model, an unsupported family, or a setting that is not known.
        """
        config = validate(TargetConfig, {"model": str(model), **settings})
        return cls(TargetModel.load(config), ChatTokenizer.load(config.model, config.template), max_model_len)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset({*self.model.eos_ids, *self.tokenizer.eos_ids})

    def decoder(self, drafter: Drafter | None, tree: AnyShape) -> SpeculativeDecoder:
        """The decoder for a drafter and a tree, made once, for it measures costs. Decoders take turns: one answer must
        end before the next begins."""
        key = (id(drafter), None if drafter is None else tree)
        if key in self._decoders:
            self._decoders[key] = self._decoders.pop(key)  # the last one used stands last
        else:
            while len(self._decoders) >= _MAX_DECODERS:
                self._decoders.pop(next(iter(self._decoders)))
            runner = self._runner if tree.num_nodes <= _MAX_NODES else None
            self._decoders[key] = SpeculativeDecoder(self.model, drafter, tree, self.max_model_len, runner)
        return self._decoders[key]


@dataclass(frozen=True)
class Answer:
    """What `generate` returns."""

    text: str
    generation: Generation
    """Tokens, and what every cycle did."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.generation.tokens)

    @property
    def num_passes(self) -> int:
        """Target passes that they took, one of them over the prompt."""
        return 1 + self.generation.num_cycles

    @property
    def tau(self) -> float:
        """Tokens per target pass after the prompt's; 1 without drafts."""
        return tau([self.generation])


class _Entry(Config):
    drafter: UsableConfig


def load_drafter(drafter: str | Path | Mapping[str, Any], target: Target) -> Drafter:
    """Load a drafter for a target.

    Args:
        drafter: folder of a trained or exported drafter, or a drafter that needs no training, such as
            `{"type": "ngram"}` (prompt lookup) and `{"type": "pretrained", "model": MODEL}`.
        target: that it drafts for.

    Raises:
        ConfigError: such a drafter is not known.
        DataError: missing or damaged files.
        MismatchError: it was trained for another target, tokenizer or chat template.
    """
    entry: Any = str(drafter)
    if isinstance(drafter, Mapping):
        entry = validate(_Entry, {"drafter": dict(drafter)}).drafter
    model = target.model
    built = build_drafters((entry,), lambda num_layers: TargetHead.of(model, num_layers), target.tokenizer)
    return next(iter(built.values()))


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: str | Sequence[Message],
    *,
    max_new_tokens: int = 256,
    tree: AnyShape = ADAPTIVE,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    **sampling: Unpack[SamplingSettings],
) -> Answer:
    """Answer a prompt. With greedy decoding the answer equals, token by token, what the target alone would give.

    Args:
        target: whose answer it is.
        drafter: proposes tokens; None decodes plainly. It changes the speed alone.
        prompt: a user's message, or a chat that ends with one.
        max_new_tokens: most tokens of the answer.
        tree: shape of the drafts.
        stop: strings that end the answer, which leaves them out.
        on_text: receives the text piece by piece.
        sampling: `temperature`, `top_p`, `seed` and others of `SamplingSettings`; greedy without any.

    Raises:
        ConfigError: a sampling parameter that is not known, or a tree that the drafter cannot draft.
        DataError: the prompt does not fit into the target's context.
    """
    params = validate(SamplingParams, dict(sampling))
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    tokenizer = target.tokenizer
    strings = StopStrings(stop, tokenizer.decode)
    shown = IncrementalDetokenizer(strings)

    def say(pieces: Sequence[Piece]) -> None:
        if on_text is not None and pieces:
            on_text("".join(piece.text for piece in pieces))

    def show(tokens: list[int], accepted: int) -> None:
        say(shown.push(tokens, accepted))

    generation = target.decoder(drafter, tree).generate(
        tokenizer.encode_prompt(messages), params, max_new_tokens, target.eos_ids, show, stop=strings
    )
    say(shown.finish())
    return Answer(strings.text_before(generation.tokens), generation)
