"""What a split backward needs: a record of each layer's function and its gradients (`Op`), an autograd function that defers
weight gradients, and ways to add them.

Some calls are left to autograd, so all their gradients come in B: those inside torch.compile; those whose weights are not
leaves (parametrizations) or have hooks; DTensors in other layers than Linear and Embedding; a backward that is
differentiated itself; `autograd.grad` outside a B pass.

Under autocast layers cast as autocast would: gradients have low precision, and are added to `.grad` in its own.

Where a linear layer has DTensors and no other rank's parts are needed, each rank computes the weight gradient from its local
tensors. The placements of tensor parallelism (torch's `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`) allow that:
W then neither communicates nor dispatches DTensor operations. `.grad` gets the placements that eager mode gives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ..base.torch_private import FakeTensor, applied, functorch_active, hooked, version_of
from ..base.values import Layout, is_dtensor, local

Task = Callable[[], None]
Queue = deque[Task]
Gradients = tuple[Tensor | None, Tensor | None]
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # subclasses may define sums differently


@dataclass(slots=True)
class Deferral:
    """What a stage's layers do at the moment. splitting: their forward prepares a split backward. queue: where the current
    backward puts its weight gradients; None: it gives them to autograd."""

    splitting: bool = False
    queue: Queue | None = None

    def during(self, splitting: bool, queue: Queue | None = None) -> Deferral:
        """A context in which they do so; afterwards they do neither."""
        self.splitting, self.queue = splitting, queue
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.splitting, self.queue = False, None


@dataclass(frozen=True)
class Op:
    """A layer's function of (x, weight, bias) and further arguments.

    plain: the function. x_gradient(dy, x, weight, *args): the gradient of x. gradients(dy, x, weight, bias, *args): those
    of weight and bias. add: takes the same arguments and adds these to `.grad`, where that is faster than computing them
    first. low: autocast runs it in low precision.
    """

    plain: Callable[..., Tensor]
    x_gradient: Callable[..., Tensor]
    gradients: Callable[..., Gradients]
    add: Callable[..., None] | None = None
    low: bool = False


def run_queue(queue: Queue) -> None:
    """The W pass: compute the queued gradients and add them to `.grad`. Each task frees its memory when it is done."""
    with torch.no_grad():
        while queue:
            queue.popleft()()


def splits(deferral: Deferral, x: Any, weight: Tensor, bias: Tensor | None, *, distributed: bool = False) -> bool:
    """Should this call be split? It must ask about torch.compile first: compiled code is never split. distributed: the op
    also takes DTensors."""
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
    """The op's output, with a split backward."""
    if op.low and torch.is_autocast_enabled(x.device.type):
        x = _lowered(x, torch.get_autocast_dtype(x.device.type))
    return _apply(x, weight, bias, op, args, deferral)


def _lowered(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Cast as autocast does: floating-point tensors, but no doubles."""
    return tensor.to(kind) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


class _Split(torch.autograd.Function):
    """An op whose backward puts the weight gradients into the current queue, if there is one."""

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
        y = op.plain(x, weight, bias, *args)
        return y.detach() if y.dim() > 2 else y  # a view could not be changed in place behind it

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradient of x, and those of weight and bias if they are not deferred."""
        weight, bias, op, args, deferral = ctx.rest
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, dy), None, None, None)
        x, low = ctx.saved_tensors
        dx = op.x_gradient(dy, x, low, *args) if ctx.needs_input_grad[0] else None
        # The saved input may belong to autograd's graph, which the queue must not keep alive.
        given = dy, x.detach(), weight, bias, *args
        if deferral.queue is None or hooked(weight) or (bias is not None and hooked(bias)):
            return (dx, *op.gradients(*given), None, None, None)
        deferral.queue.append(partial(_added_unchanged, version_of(x), op.add or partial(_add, op.gradients), *given))
        return dx, None, None, None, None, None


_apply = applied(_Split)


def _differentiable(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Gradients of x, weight and bias that can be differentiated again."""
    weight, bias, op, args, _ = ctx.rest
    x = ctx.saved_tensors[0]
    low = (weight.to(x.dtype), None if bias is None else bias.to(x.dtype)) if op.low else (weight, bias)
    wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    gradients = iter(torch.autograd.grad(op.plain(x, *low, *args), wanted, dy, create_graph=True, allow_unused=True))
    return [next(gradients) if needed else None for needed in ctx.needs_input_grad[:3]]


def _added_unchanged(version: int, add: Callable[..., None], dy: Tensor, x: Tensor, weight: Tensor, *args: Any) -> None:
    """Add gradients in W, after a check that autograd makes only in B: is the saved input unchanged?"""
    if version_of(x) != version:
        what = f"the input of a layer of weight {tuple(weight.shape)} was changed in place between its B and its W"
        raise BadInput(f"{what}, by another microbatch's forward: give the layer a copy of it (clone)")
    add(dy, x, weight, *args)


def _add(make: Callable[..., Gradients], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> None:
    for parameter, gradient in zip((weight, bias), make(dy, x, weight, bias, *args), strict=True):
        if parameter is not None and gradient is not None:
            accumulate(parameter, gradient)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does: in the parameter's dtype and, where its memory is dense, its strides. A DTensor
    keeps its placements."""
    if is_dtensor(gradient):
        _add_dtensor(parameter, gradient)
    elif parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right (matrices, or batches of them) to `.grad`; by `add_product` where that exists already."""
    if parameter.grad is not None and parameter.grad.dtype == left.dtype and not is_dtensor(parameter):
        add_product(parameter.grad, left, right)
    else:
        accumulate(parameter, left.mm(right) if left.dim() == 2 else left.bmm(right))


def add_linear(dy: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Add the gradients of weight and bias to their `.grad`, each rank from its local tensors alone. Returns False, and does
    nothing, where the placements do not allow that.

    dy: (…, out), x: (…, in), all DTensors on one mesh.
    """
    if not all(is_dtensor(tensor) and tensor.device_mesh == weight.device_mesh for tensor in (dy, x, weight)):
        return False
    over = [_placement(of_dy, of_x, dy.dim() - 1) for of_dy, of_x in zip(dy.placements, x.placements, strict=True)]
    if None in over:
        return False
    sums = [_row_sum(of_dy, dy.dim() - 1) for of_dy in dy.placements]
    trained = bias is not None and bias.requires_grad
    if trained and None in sums:
        return False
    rows, columns = (rows_of(local(tensor)) for tensor in (dy, x))
    grad = weight.grad
    if grad is not None and grad.placements == tuple(over) and grad.dtype == dy.dtype:
        add_product(local(grad), rows.t(), columns)
    else:
        _add_dtensor(weight, Layout(weight.device_mesh, tuple(over), weight.shape).whole(rows.t().mm(columns)))
    if trained:
        _add_dtensor(bias, Layout(bias.device_mesh, tuple(sums), bias.shape).whole(rows.sum(0)))
    return True


def _add_dtensor(parameter: Any, gradient: Any) -> None:
    """Add a DTensor to `.grad`, which takes over its placements if it is empty. Equal placements need no communication."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    elif grad.placements == gradient.placements and grad.device_mesh == gradient.device_mesh:
        local(grad).add_(local(gradient))
    else:
        parameter.grad = grad + gradient.to(grad.dtype)


def rows_of(tensor: Tensor) -> Tensor:
    """A tensor as one matrix of all its rows."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])  # (an empty tensor cannot infer -1)


def _placement(of_dy: Any, of_x: Any, last: int) -> Any:
    """The placement of dyᵀ·x along one dimension of the mesh; None where products of local tensors are no part of it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dy, x = _cut(of_dy, last), _cut(of_x, last)
    match (dy, x):
        case ("whole", "whole"):
            return Replicate()
        case ("columns", "whole"):
            return Shard(0)
        case ("whole", "columns"):
            return Shard(1)
        case ("sum", "whole") | ("whole", "sum"):
            return Partial()
    return Partial() if isinstance(dy, int) and dy == x else None


def _row_sum(of_dy: Any, last: int) -> Any:
    """The placement of the sum of dy's rows, a product with ones; None where sums of local tensors are no part of it."""
    from torch.distributed.tensor import Replicate

    return _placement(of_dy, of_dy if isinstance(_cut(of_dy, last), int) else Replicate(), last)


def _cut(placement: Any, last: int) -> str | int:
    """How a tensor is divided: not at all ("whole"), into summands ("sum"), along its last dimension ("columns"), along
    another one (its number), or in an unknown way ("")."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(placement, Replicate):
        return "whole"
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "sum"
    if type(placement) is Shard:  # subclasses divide in other ways
        return "columns" if placement.dim % (last + 1) == last else placement.dim % (last + 1)
    return ""


THIN = 16  # rows or columns, as in a router, an adapter or a head with one output


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, of matrices or of batches of them.

    One kernel multiplies and adds, except for thin matrices on a CPU. There BLAS may add term by term to the value in
    memory, so each microbatch adds the rounding error of the whole sum so far; autograd's separate product has only that of
    its own terms. Gradients were up to 12 times less exact than autograd's. With up to 7 rows or columns MKL did so always
    or never, depending on the processor, with more up to 12.
    """
    if left.is_cpu and type(left) is Tensor and min(total.shape[-2:]) <= THIN:  # (fake tensors take the GPU's way)
        total.add_(left.mm(right) if left.dim() == 2 else left.bmm(right))
    elif total.dim() == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)
