"""The tiny targets of every family, read from disk, and drafters that have learnt a text of theirs by heart."""

from collections.abc import Callable
from functools import cache

import pytest
from support import TARGETS, VARIANTS, MoodyCosts, TinyTarget, build, load_target, overfit

from moray.decoding import speculate as speculate_module
from moray.drafters.base import Drafter

LEARNT_TOKENS = 40


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyTarget]:
    """tiny(name): the target of that name (see `support.TARGETS`), made once."""

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
    """Adaptive decoders measure costs that change at every look, so that every cycle has another depth."""
    monkeypatch.setattr(speculate_module, "measure_costs", lambda *_: MoodyCosts())
