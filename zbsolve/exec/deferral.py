"""What a split backward needs of a layer, and the one autograd function that defers its weight gradients.

Left to autograd, and so to B: what runs inside torch.compile; weights that are no plain leaves (parametrizations,
DTensors); parameters with hooks; a backward that is itself differentiated; `autograd.grad` outside a B pass.

Under autocast the layers cast as autocast would: gradients of low precision, added to `.grad` in its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Task = Callable[[], None]
Queue = deque[Task]
Gradients = tuple[Tensor | None, Tensor | None]
PLAIN = (Tensor, nn.Parameter, FakeTensor)  # other tensors, distributed ones for example, may mean something else by a sum


@dataclass(slots=True)
class Deferral:
    """What layers do now. `splitting`: their forward prepares a split backward. `queue`: where a backward that runs now
    puts weight gradients, or None: it gives them to autograd."""

    splitting: bool = False
    queue: Queue | None = None


@dataclass(frozen=True)
class Op:
    """A layer's function of (x, weight, bias) and some arguments.

    `plain` is the function itself. `forward` gives its value and tensors to keep for the backward. `x_gradient(dy, x,
    weight, kept, *args)`. `gradients(dy, x, weight, bias, kept, *args)`: those of weight and bias. `add`, of the same
    arguments: adds them to `.grad`, where that is faster than making them first. `low`: autocast runs it in low
    precision.
    """

    plain: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    x_gradient: Callable[..., Tensor]
    gradients: Callable[..., Gradients]
    add: Callable[..., None] | None = None
    low: bool = False


def run_queue(queue: Queue) -> None:
    """The W pass: work off the queue, freeing each piece as it is done; gradients are added to `.grad`."""
    with torch.no_grad():
        while queue:
            queue.popleft()()


# --- Calling an op ---


def splits(deferral: Deferral, x: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Is this call to be split? Asked first under torch.compile, where the answer is no: what is compiled stays whole."""
    return (
        not torch.compiler.is_compiling()
        and deferral.splitting
        and weight.requires_grad
        and weight.is_leaf
        and weight.is_floating_point()
        and (bias is None or bias.is_leaf)
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
    )


def call(op: Op, deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """The op's value, with a split backward."""
    if op.low and torch.is_autocast_enabled(x.device.type):
        x = _lowered(x, torch.get_autocast_dtype(x.device.type))
    result: Tensor = _apply(x, weight, bias, op, args, deferral)  # type: ignore[no-untyped-call]
    return result


def _lowered(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """As autocast casts: floating-point tensors, but no doubles."""
    return tensor.to(kind) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op, args: tuple[Any, ...], deferral: Deferral
    ) -> Tensor:
        ctx.rest = weight, bias, op, args, deferral
        if op.low and torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            weight, bias = _lowered(weight, kind), None if bias is None else _lowered(bias, kind)
        y, kept = op.forward(x, weight, bias, *args)
        ctx.save_for_backward(x, weight, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, bias, op, args, deferral = ctx.rest
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, dy), None, None, None)
        x, low, *kept = ctx.saved_tensors
        dx = op.x_gradient(dy, x, low, kept, *args) if ctx.needs_input_grad[0] else None
        # The saved input may be part of autograd's graph, which must not live on in the queue.
        given = dy, x.detach(), weight, bias, kept, *args
        if deferral.queue is None or _hooked(weight) or (bias is not None and _hooked(bias)):
            return (dx, *op.gradients(*given), None, None, None)
        deferral.queue.append(partial(op.add or partial(_add, op.gradients), *given))
        return dx, None, None, None, None, None


# Without Function.apply's own Python, which looks for functorch transforms (`splits` did): 3 of 20 µs a call.
_apply = super(torch.autograd.Function, _Split).apply


def _hooked(parameter: Tensor) -> bool:
    """Hooks run where autograd brings the gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _differentiable(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Gradients of x, weight and bias that can be differentiated again."""
    weight, bias, op, args, _ = ctx.rest
    x = ctx.saved_tensors[0]
    low = (weight.to(x.dtype), None if bias is None else bias.to(x.dtype)) if op.low else (weight, bias)
    wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(op.plain(x, *low, *args), wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


def _add(make: Callable[..., Gradients], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    for parameter, gradient in zip((weight, bias), make(dy, x, weight, bias, *rest), strict=True):
        if parameter is not None and gradient is not None:
            accumulate(parameter, gradient)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does: of the parameter's type and, where its memory is dense, its strides."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
