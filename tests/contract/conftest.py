"""The tiny targets of every family, read from disk, and drafters that have learnt a text of theirs by heart."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache

import pytest
from drafting import PROMPT
from shape_checks import unchecked
from side_by_side import ADAPTIVE, SHAPES, MoodyCosts
from tiny_batches import batch_of
from tiny_drafters import TRAINED, VARIANTS, build, overfit
from tiny_targets import TARGETS, TinyTarget, load_target

from moray.decoding.engine import engine as engine_module
from moray.decoding.planning.controller import SpeculationController
from moray.drafters.base import Drafter

LEARNT_TOKENS = 40
FOUR_TOKENS = {
    "vocab_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.4,
    "seed": 11,
}


@pytest.fixture(scope="session")
def checked() -> set[tuple[str, ...]]:
    """Tests that have run with checked shapes, by file, function and variant."""
    return set()


@pytest.fixture(autouse=True)
def _checked_once(request: pytest.FixtureRequest, checked: set[tuple[str, ...]]) -> Iterator[None]:
    """Every test checks the tensors' shapes once with every variant of a drafter: with other trees and targets they are
    the same, and checking them takes most of the time."""
    params = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    variants = [value for value in params if isinstance(value, str) and value in VARIANTS]
    case = (request.path.name, request.node.originalname, *variants)
    with unchecked() if case in checked else nullcontext():
        checked.add(case)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyTarget]:
    """tiny(name): the target of that name (see `tiny_targets.TARGETS`), made once."""

    @cache
    def make(name: str) -> TinyTarget:
        return load_target(tmp_path_factory.mktemp(name), name)

    return make


@pytest.fixture(scope="session")
def greedy(tiny: Callable[[str], TinyTarget]) -> Callable[..., list[int]]:
    """greedy(name, seed, length): what transformers generates for that prompt, LEARNT_TOKENS long."""

    @cache
    def generate(name: str, seed: int = 0, length: int = 9) -> list[int]:
        target = tiny(name)
        return target.hugging_face(target.prompt(seed, length), LEARNT_TOKENS)

    return generate


@pytest.fixture(scope="session")
def learnt(tiny: Callable[[str], TinyTarget], greedy: Callable[..., list[int]]) -> Callable[[str, str], Drafter]:
    """learnt(target, variant): a drafter overfitted on the target's greedy answer to prompt 0."""

    @cache
    def make(name: str, variant: str) -> Drafter:
        target = tiny(name)
        prompt = target.prompt()
        steps = {"independent-0": 50, "independent-2": 80}.get(variant, 35)  # they learn from the text alone
        with unchecked():
            return overfit(target, build(target, VARIANTS[variant]), prompt + greedy(name), len(prompt), steps)

    return make


@pytest.fixture(params=TARGETS)
def target_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders measure costs that change at every look, so that every cycle has another depth, and another N."""

    monkeypatch.setattr(engine_module, "measure_costs", lambda *_: MoodyCosts())
    # Real seconds would correct them, and the depths would no longer be the same in every run.
    monkeypatch.setattr(engine_module.Engine, "has_exact_phases", False)
    monkeypatch.setattr(SpeculationController, "record_cycle", lambda *_: None)  # no budget: it would soon be spent


@pytest.fixture
def drafter(tiny, variant) -> Drafter:
    return build(tiny("llama"), VARIANTS[variant])


@pytest.fixture
def batch(tiny, drafter):
    """Two chats of different lengths whose responses begin after PROMPT tokens."""
    target = tiny("llama")
    return batch_of(target.target, [target.prompt(0, 24), target.prompt(1, 19)], PROMPT, drafter.needs)


@pytest.fixture(params=TRAINED)
def trained(request, tiny) -> Drafter:
    """A random drafter of every kind that can be trained."""
    return build(tiny("llama"), VARIANTS[request.param])


@pytest.fixture
def trained_batch(tiny, trained):
    target = tiny("llama")
    return batch_of(target.target, [target.prompt(0, 24), target.prompt(1, 19)], PROMPT, trained.needs)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(params=ADAPTIVE)
def adaptive(request):
    return ADAPTIVE[request.param]


@pytest.fixture(scope="session")
def four_tokens(tmp_path_factory) -> TinyTarget:
    """A real target with a vocabulary of four."""
    return load_target(tmp_path_factory.mktemp("four"), num_hidden_layers=1, **FOUR_TOKENS)


@pytest.fixture(scope="session")
def four_tokens_two_layers(tmp_path_factory) -> TinyTarget:
    """The same with a last layer that a drafter may run."""
    return load_target(tmp_path_factory.mktemp("four_deep"), num_hidden_layers=2, **FOUR_TOKENS)
