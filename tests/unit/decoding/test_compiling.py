"""torch.compile is a switch: what it compiles decodes the same, and a compiler that fails says so."""

import jaxtyping
import pytest
import torch
from side_by_side import SHAPES, plainly, speculate
from tiny_drafters import build
from tiny_targets import TinyTarget, load_target
from torch import nn

from moray.decoding.compiling import compile_models
from moray.decoding.params import SamplingParams
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import EagleConfig

GREEDY = SamplingParams()
EAGLE = EagleConfig(type="eagle", layer=BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96))


@pytest.fixture
def tiny(tmp_path) -> TinyTarget:
    """Of its own for every test: compiling changes a target in place."""
    return load_target(tmp_path / "target", num_hidden_layers=2)


def compiled_parts(model: nn.Module) -> list[str]:
    return [type(part).__name__ for part in model.modules() if part._compiled_call_impl is not None]


def test_off_compiles_nothing(tiny, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert compile_models(tiny.target, [build(tiny, EAGLE)], "off") == "torch.compile is off"


def test_norms_and_mlps_are_compiled_and_nothing_else(tiny, monkeypatch):
    """Of target and drafters, for any number of tokens."""
    calls = []

    def compile_nothing(self, **options):
        calls.append(options)
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile_nothing)
    drafter = build(tiny, EAGLE)
    words = compile_models(tiny.target, [drafter], "default")
    assert sorted(set(compiled_parts(tiny.target.model))) == ["LlamaMLP", "LlamaRMSNorm"]
    assert sorted(set(compiled_parts(drafter))) == ["RMSNorm", "SwiGLU"]
    count = len(compiled_parts(tiny.target.model)) + len(compiled_parts(drafter))
    assert count == 2 * 3 + 1 + 2
    assert words == f"torch.compile (default): {count} norms and MLPs"
    assert calls == [{"dynamic": True}] * count


class NoCompilerError(RuntimeError):
    """What a machine without a C++ compiler raises."""


def fail(*_, **__):
    raise NoCompilerError("no working\n  compiler found " + "x" * 500)


@pytest.mark.parametrize("when", ["at once", "halfway", "at the first call"])
def test_a_compiler_that_fails_leaves_decoding_as_it_was_and_says_so(tiny, monkeypatch, when):
    drafter, prompt = build(tiny, EAGLE), tiny.prompt()
    before = speculate(tiny, drafter, SHAPES["dynamic"], prompt, GREEDY, 20)
    compiled = []

    def compile_lazily(self, **_):
        if when == "at once" or (when == "halfway" and len(compiled) == 4):
            fail()
        compiled.append(self)
        self._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", compile_lazily)
    words = compile_models(tiny.target, [drafter], "default")
    assert words.startswith("torch.compile failed and is off: NoCompilerError: no working compiler found xxx")
    assert "\n" not in words
    assert len(words) < 260
    assert compiled_parts(tiny.target.model) == compiled_parts(drafter) == []
    after = speculate(tiny, drafter, SHAPES["dynamic"], prompt, GREEDY, 20)
    assert (after.tokens, after.accepted) == (before.tokens, before.accepted)


@pytest.mark.slow
def test_compiled_decoding_gives_the_same_text(tiny):
    """For real, which takes a C++ compiler: sizes change with every cycle, and the text does not."""
    drafter, prompts = build(tiny, EAGLE), [tiny.prompt(), tiny.prompt(1, 30)]
    expected = [plainly(tiny, prompt, GREEDY, 30) for prompt in prompts]
    jaxtyping.config.update("jaxtyping_disable", True)  # the compiler cannot read the checks
    try:
        words = compile_models(tiny.target, [drafter], "default")
        if "failed" in words:
            pytest.skip(words)
        for shape in SHAPES.values():
            texts = [speculate(tiny, drafter, shape, prompt, GREEDY, 30).tokens for prompt in prompts]
            assert texts == expected
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        torch.compiler.reset()
