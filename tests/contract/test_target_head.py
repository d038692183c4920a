"""The part of a target that drafters hold is the target's own, shared or read from disk."""

import pytest
import torch
from tiny_drafters import VARIANTS

from moray.errors import ConfigError
from moray.targets.head import TargetHead


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_head_read_from_disk_is_the_target_s_own(tiny, target_name, layers):
    target = tiny(target_name)
    shared, read = TargetHead.of(target.target, layers), TargetHead.load(target.config, layers)
    tokens = torch.tensor([target.prompt(0, 12)])
    hidden = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    outputs = []
    with torch.no_grad():
        for head in (shared, read):
            last = head.run_last_layers(hidden, torch.arange(12)[None], mask, head.new_cache(12))
            outputs.append((head.embed(tokens), head.logits(hidden), last))
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert read.spec == shared.spec
    assert not read.weight.requires_grad


def test_the_head_s_layers_are_the_target_s_last(tiny, target_name):
    """Run on the real residual stream and the real K/V, they give the target's own last hidden state."""
    target = tiny(target_name).target
    tokens = torch.tensor([tiny(target_name).prompt(0, 12)])
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    for layers in (1, 2):
        head = TargetHead.of(target, layers)
        cache = target.new_cache(12)
        output = target.forward(tokens, torch.arange(12)[None], mask, cache, (-1 - layers,))
        with torch.no_grad():
            hidden = output.hidden[-1 - layers].clone()
            last = head.run_last_layers(hidden, torch.arange(12)[None], mask, head.new_cache(12))
        torch.testing.assert_close(last, output.last, atol=1e-5, rtol=0)


def test_more_target_layers_than_there_are_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"target_layers is 5; .* 0 to 4"):
        TargetHead.of(tiny("llama").target, 5)
    every = TargetHead.of(tiny("llama").target, 4)  # what makes a target sparse reads all of them; a drafter may not
    with pytest.raises(ConfigError, match=r"target_layers is 4; the target has 4 layers, so 0 to 3"):
        VARIANTS["moa-2"].model_copy(update={"target_layers": 4}).build(every)
    with pytest.raises(ConfigError, match="target_layers is 2 but the head has 1"):
        VARIANTS["moa-2"].build(TargetHead.of(tiny("llama").target, 1))
