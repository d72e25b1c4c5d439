"""The backward split: weight gradients deferred inside the layers.

A B pass runs autograd through the layers; Linear and Embedding give their input gradient at once and queue what their
weight gradient needs. A W pass works that queue off. Whatever other parameters a model has get their gradient in B, so
every model is right, and those made of these layers are split. (Walking autograd's graph once per parameter instead
costs 2 to 7 fused backwards.)

Norms stay in B on purpose. Deferring their scale and shift was measured on gpt-tiny: B took 5 % longer (the kernel runs
twice) and a block held 25 % more bytes between B and W (input and output gradient of every norm).

Parameters keep their names and identity; only `forward` of the layers is replaced, on the instance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Task = Callable[[], None]
Queue = deque[Task]


class Deferral:
    """Where layers put their weight gradients now: a queue, or None for the ordinary backward."""

    def __init__(self) -> None:
        self.queue: Queue | None = None

    @contextmanager
    def into(self, queue: Queue | None) -> Iterator[None]:
        """Layers that run inside put their weight gradients into `queue`."""
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before


def run_queue(queue: Queue) -> None:
    """The W pass: work off the queue, freeing each piece as it is done; gradients are added to `.grad`."""
    with torch.no_grad():
        while queue:
            queue.popleft()()


def defer(module: nn.Module, deferral: Deferral) -> None:
    """Replace the forward of every layer in `module` that can be split, in place. Subclasses are left alone: their
    forward may do anything."""
    for layer in module.modules():
        make = _FORWARDS.get(type(layer))
        if make is not None:
            layer.forward = make(layer, deferral)


def restore(module: nn.Module) -> None:
    """Undo `defer`."""
    for layer in module.modules():
        if type(layer) in _FORWARDS:
            layer.__dict__.pop("forward", None)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, as autograd would."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _deferrable(deferral: Deferral, *parameters: Tensor | None) -> bool:
    """Only real leaves that want a gradient (not weights computed by a parametrization), while a gradient is wanted,
    and outside autocast, which casts inside the functions that we replace."""
    wanted = [p for p in parameters if p is not None and p.requires_grad]
    return (
        deferral.queue is not None
        and bool(wanted)
        and all(p.is_leaf for p in wanted)
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(wanted[0].device.type)
    )


# --- Linear ---


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.queue = bias, queue
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        bias = ctx.bias
        ctx.queue.append(_linear_task(x.detach(), dy.detach(), weight, bias))
        return (dy.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None


def _linear_task(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None) -> Task:
    def task() -> None:
        rows = dy.reshape(-1, dy.shape[-1])
        if weight.requires_grad:
            inputs = x.reshape(-1, x.shape[-1])
            if weight.grad is None:
                weight.grad = rows.t().mm(inputs)
            else:
                weight.grad.addmm_(rows.t(), inputs)
        if bias is not None and bias.requires_grad:
            accumulate(bias, rows.sum(0))

    return task


def _linear(layer: Any, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not _deferrable(deferral, layer.weight, layer.bias):
            return functional.linear(x, layer.weight, layer.bias)
        result: Tensor = _Linear.apply(x, layer.weight, layer.bias, deferral.queue)  # type: ignore[no-untyped-call]
        return result

    return forward


# --- Embedding ---


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, by_frequency: bool, queue: Queue) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.rest = padding, by_frequency, queue
        return functional.embedding(ids, weight, None if padding < 0 else padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None, None]:
        ids, weight = ctx.saved_tensors
        padding, by_frequency, queue = ctx.rest
        dy = dy.detach()

        def task() -> None:
            rows = weight.shape[0]
            accumulate(weight, torch.ops.aten.embedding_dense_backward(dy, ids, rows, padding, by_frequency))

        queue.append(task)
        return None, None, None, None, None


def _embedding(layer: Any, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    padding = -1 if layer.padding_idx is None else layer.padding_idx

    def forward(ids: Tensor) -> Tensor:
        # max_norm changes the weight in place, and sparse gradients have another layout: those stay with autograd.
        if layer.max_norm is not None or layer.sparse or not _deferrable(deferral, layer.weight):
            return functional.embedding(
                ids, layer.weight, layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
            )
        result: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
            ids, layer.weight, padding, layer.scale_grad_by_freq, deferral.queue
        )
        return result

    return forward


_FORWARDS: dict[type, Callable[[Any, Deferral], Callable[[Tensor], Tensor]]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
}
