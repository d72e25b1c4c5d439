"""Trying a layer out: as it was written, and without a trace of it, so gradients, buffers, attributes and random numbers are
as before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.auxiliary import auxiliary_losses
from ..base.torch_private import buffers_of, saving_hooked, without_modes
from .replay import Replay


@contextmanager
def undisturbed(layer: nn.Module) -> Iterator[None]:
    """Run `layer` inside, also its backward. Parameters have no gradients there, buffers are copies, and nobody outside
    counts bytes, sees what is saved or gets what it adds to the loss. Afterwards all is as before. Memory: the layer's
    gradients and buffers."""
    modules, parameters = list(layer.modules()), list(layer.parameters())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(buffers_of(module)) for module in modules]
    gradients = [parameter.grad for parameter in parameters]
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(Replay([layer]).random_kept())
        stack.enter_context(without_modes())
        stack.enter_context(auxiliary_losses())  # what the layer adds to the loss is not the microbatch's
        if saving_hooked():
            stack.enter_context(saved_tensors_hooks(_same, _same))
        try:
            for module in modules:
                for name, buffer in buffers_of(module).items():
                    if buffer is not None:
                        buffers_of(module)[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for module, own, held in zip(modules, attributes, buffers, strict=True):
                vars(module).clear()
                vars(module).update(own)
                buffers_of(module).update(held)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def as_written() -> AbstractContextManager[Any]:
    """What torch.compile compiled runs in eager mode inside (before torch 2.6: compiled). Compiled kernels draw other random
    numbers than eager mode and graphs do, so dropout would differ; and they cannot run on fake tensors."""
    stance: Callable[[str], AbstractContextManager[Any]] | None = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:  # whoever compiled imported it; that takes seconds
        return nullcontext()
    return stance("force_eager")


def _same(value: Any) -> Any:
    return value
