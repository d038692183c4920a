"""The pooled layer against the decoder layer that it is the mean of."""

import pytest
import torch

from moray.drafters.common.decoder_layers import SelfAttentionLayer
from moray.drafters.common.layers import RotaryTable
from moray.drafters.config_base import BlockConfig
from moray.drafters.moa.pooled import PooledSelfAttentionLayer

WIDTH, HEAD_DIM = 24, 8


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_kv_heads", [2, 4])  # with groups, and without
@pytest.mark.parametrize("seq", [7, 80])  # short, and as long as the fused kernel takes over
def test_a_pooled_layer_and_its_gradients_are_the_mean_over_positions(num_kv_heads: int, seq: int) -> None:
    block = BlockConfig(num_heads=4, num_kv_heads=num_kv_heads, intermediate_size=32)
    layer, pooled = (kind(WIDTH, block, HEAD_DIM, 1e-5) for kind in (SelfAttentionLayer, PooledSelfAttentionLayer))
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number) * 0.3 + (parameter.dim() == 1))
    pooled.load_state_dict(layer.state_dict())
    rotary = RotaryTable(HEAD_DIM, seq, 300.0).rows(0, seq)
    inputs = [noise(3, seq, WIDTH, seed=99).requires_grad_() for _ in range(2)]
    outputs = layer(inputs[0], rotary, None).mean(dim=1), pooled(inputs[1], rotary)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.backward(noise(3, WIDTH, seed=98))
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-5)
    others = dict(pooled.named_parameters())
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_half_precision_is_close_to_full() -> None:
    pooled = PooledSelfAttentionLayer(WIDTH, BlockConfig(num_heads=3, num_kv_heads=3, intermediate_size=32), 8, 1e-5)
    rotary, x = RotaryTable(HEAD_DIM, 7, 300.0).rows(0, 7), noise(5, 7, WIDTH)
    gradients = []
    for is_half in (False, True):
        pooled.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            output = pooled(x, rotary)
        output.float().square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in pooled.parameters() if p.grad is not None]))
    assert not torch.equal(*gradients)
    assert (gradients[1] - gradients[0]).norm() < 0.03 * gradients[0].norm()
