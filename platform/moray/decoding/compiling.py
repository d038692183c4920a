"""torch.compile behind one switch, with a fallback that reports itself.

Only stateless parts are compiled: norms and MLPs of target and drafters, whose only changing size is the number of
tokens. Attention is not compiled, because its caches grow with every cycle; nor are pretrained drafters.
"""

import logging
from collections.abc import Iterable

import torch
from torch import nn

from moray.decoding.params import CompileMode
from moray.drafters.base import Drafter
from moray.explain import one_line
from moray.targets.model import Target


def compile_models(target: Target, drafters: Iterable[Drafter], mode: CompileMode) -> str:
    """Compile target and drafters in place, and try them out.

    Returns:
        one line on what is in force now; if compiling failed, everything is as before and the line gives the reason.
    """
    if mode == "off":
        return "torch.compile is off"
    if target.is_split:
        return f"torch.compile is off: target.tensor_parallel is {target.config.tensor_parallel}"
    modules = [module for model in [target.model, *drafters] for module in _stateless(model)]
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)  # it warns about every kernel that it skips
    try:
        for module in modules:
            module.compile(dynamic=True)
        with torch.inference_mode():
            for module in modules:
                _try_out(module, target.device)
    except Exception as error:  # noqa: BLE001 - compilers fail in their own ways; decoding must not
        for module in modules:
            module._compiled_call_impl = None  # what `Module.compile` sets; torch has no name for undoing it
        reason = one_line(str(error))[:200]
        return f"torch.compile failed and is off: {type(error).__name__}: {reason}"
    return f"torch.compile ({mode}): {len(modules)} norms and MLPs"


def _stateless(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if type(part).__name__.endswith(("MLP", "RMSNorm", "SwiGLU"))]


def _try_out(module: nn.Module, device: torch.device) -> None:
    weight = next(module.parameters())
    for num_tokens in (1, 6):
        module(torch.zeros(1, num_tokens, weight.shape[-1], dtype=weight.dtype, device=device))
