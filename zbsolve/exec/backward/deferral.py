"""What a split backward needs of a layer, and the one autograd function that defers its weight gradients;
and the split of several linear layers of one size that are one product (`BatchedLinear`, as of experts).

Some calls are left to autograd, and so to B: those inside torch.compile; those whose weights are no leaves
(parametrizations) or have hooks; DTensors in other layers than Linear and Embedding; a backward that is itself
differentiated; `autograd.grad` outside a B pass.

Under autocast layers cast as autocast would: gradients have low precision, and are added to `.grad` in its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.blocks import BatchedLinear
from ..base.torch_private import FakeTensor, applied, functorch_active, hooked
from ..base.values import is_dtensor
from .distributed import add, add_product

Task = Callable[[], None]
Queue = deque[Task]
Gradients = tuple[Tensor | None, Tensor | None]
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # to others a sum may mean something else


@dataclass(slots=True)
class Deferral:
    """What the layers of a stage do now. splitting: their forward prepares a split backward. queue: where a backward that
    runs now puts its weight gradients; None: it gives them to autograd."""

    splitting: bool = False
    queue: Queue | None = None


@dataclass(frozen=True)
class Op:
    """A layer's function of (x, weight, bias) and some arguments.

    plain: the function itself. x_gradient(dy, x, weight, *args): the gradient of x. gradients(dy, x, weight, bias, *args):
    those of weight and bias. add: of the same arguments; adds them to `.grad`, where that is faster than making them first.
    low: autocast runs it in low precision.
    """

    plain: Callable[..., Tensor]
    x_gradient: Callable[..., Tensor]
    gradients: Callable[..., Gradients]
    add: Callable[..., None] | None = None
    low: bool = False


def run_queue(queue: Queue) -> None:
    """The W pass: work the queue off. Gradients are added to `.grad`, and the memory of each piece goes when it is done."""
    with torch.no_grad():
        while queue:
            queue.popleft()()


# --- Calling an op ---


def splits(deferral: Deferral, x: Any, weight: Tensor, bias: Tensor | None, *, distributed: bool = False) -> bool:
    """Is this call to be split? The first question is about torch.compile, where the answer is no: what is compiled stays
    whole. distributed: the op takes DTensors too."""
    return (
        not torch.compiler.is_compiling()
        and deferral.splitting
        and weight.requires_grad
        and weight.is_leaf
        and weight.is_floating_point()
        and (bias is None or bias.is_leaf)
        and (
            (type(x) in PLAIN_TENSORS and type(weight) in PLAIN_TENSORS)
            or (distributed and is_dtensor(x) and is_dtensor(weight))
        )
        and torch.is_grad_enabled()
        and not functorch_active()
    )


def call(op: Op, deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """The op's value, with a split backward."""
    if op.low and torch.is_autocast_enabled(x.device.type):
        x = _lowered(x, torch.get_autocast_dtype(x.device.type))
    result: Tensor = _apply(x, weight, bias, op, args, deferral)
    return result


def _lowered(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Cast as autocast does: floating-point tensors, but no doubles."""
    return tensor.to(kind) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


class _Split(torch.autograd.Function):
    """An op whose weight gradient goes into the queue of the backward that runs, where there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op, args: tuple[Any, ...], deferral: Deferral
    ) -> Tensor:
        """The op's value."""
        ctx.rest = weight, bias, op, args, deferral
        if op.low and torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            weight, bias = _lowered(weight, kind), None if bias is None else _lowered(bias, kind)
        ctx.save_for_backward(x, weight)
        return op.plain(x, weight, bias, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradient of x, and those of weight and bias where nothing defers them."""
        weight, bias, op, args, deferral = ctx.rest
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, dy), None, None, None)
        x, low = ctx.saved_tensors
        dx = op.x_gradient(dy, x, low, *args) if ctx.needs_input_grad[0] else None
        # The saved input may be part of autograd's graph, which must not live on in the queue.
        given = dy, x.detach(), weight, bias, *args
        if deferral.queue is None or hooked(weight) or (bias is not None and hooked(bias)):
            return (dx, *op.gradients(*given), None, None, None)
        deferral.queue.append(partial(op.add or partial(_add, op.gradients), *given))
        return dx, None, None, None, None, None


_apply = applied(_Split)


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
    """Add to `.grad` as autograd does: of the parameter's type and, where its memory is dense, its strides. A DTensor
    keeps its placements."""
    if is_dtensor(gradient):
        add(parameter, gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right, of matrices or of batches of them, to `.grad`: where that is there already by `add_product`."""
    if parameter.grad is not None and parameter.grad.dtype == left.dtype and not is_dtensor(parameter):
        add_product(parameter.grad, left, right)
    else:
        accumulate(parameter, left.mm(right) if left.dim() == 2 else left.bmm(right))


def _product(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


BATCHED = Op(
    plain=_product,
    x_gradient=lambda dy, x, weight: dy.bmm(weight),
    gradients=lambda dy, x, weight, bias: (dy.transpose(1, 2).bmm(x), None),
    add=lambda dy, x, weight, bias: accumulate_product(weight, dy.transpose(1, 2), x),
    low=True,
)


def batched_linear(layer: BatchedLinear, deferral: Deferral, x: Tensor) -> Tensor:
    """Its forward, split where the call is to be."""
    if splits(deferral, x, layer.weight, None):
        return call(BATCHED, deferral, x, layer.weight, None)
    return BatchedLinear.forward(layer, x)
