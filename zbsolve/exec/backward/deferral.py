"""What a split backward needs of a layer, the one autograd function that defers its weight gradients, and how to add them.

Some calls are left to autograd, and so to B: those inside torch.compile; those whose weights are no leaves
(parametrizations) or have hooks; DTensors in other layers than Linear and Embedding; a backward that is itself
differentiated; `autograd.grad` outside a B pass.

Under autocast layers cast as autocast would: gradients have low precision, and are added to `.grad` in its own.

The weight gradient of a linear layer of DTensors is made of each rank's own parts, where no other rank's are needed. A
tensor-parallel layer (torch's `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`) has such placements: then W neither
communicates nor pays for DTensor's dispatch. `.grad` gets the placements that eager mode gives it.
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
PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)  # to others a sum may mean something else


@dataclass(slots=True)
class Deferral:
    """What the layers of a stage do now. splitting: their forward prepares a split backward. queue: where a backward that
    runs now puts its weight gradients; None: it gives them to autograd."""

    splitting: bool = False
    queue: Queue | None = None

    def during(self, splitting: bool, queue: Queue | None = None) -> Deferral:
        """What they do inside this; afterwards nothing."""
        self.splitting, self.queue = splitting, queue
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.splitting, self.queue = False, None


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
    return _apply(x, weight, bias, op, args, deferral)


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
        y = op.plain(x, weight, bias, *args)
        return y.detach() if y.dim() > 2 else y  # else it may be a view, which layers behind cannot change in place

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
    """In W autograd does not look whether what it saved is what it was, as it does in B."""
    if version_of(x) != version:
        what = f"the input of a layer of weight {tuple(weight.shape)} was changed in place between its B and its W"
        raise BadInput(f"{what}, by another microbatch's forward: give the layer a copy of it (clone)")
    add(dy, x, weight, *args)


def _add(make: Callable[..., Gradients], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> None:
    for parameter, gradient in zip((weight, bias), make(dy, x, weight, bias, *args), strict=True):
        if parameter is not None and gradient is not None:
            accumulate(parameter, gradient)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does: of the parameter's type and, where its memory is dense, its strides. A DTensor
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
    """Add left · right, of matrices or of batches of them, to `.grad`: where that is there already by `add_product`."""
    if parameter.grad is not None and parameter.grad.dtype == left.dtype and not is_dtensor(parameter):
        add_product(parameter.grad, left, right)
    else:
        accumulate(parameter, left.mm(right) if left.dim() == 2 else left.bmm(right))


def add_linear(dy: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Add the gradients of weight and bias to their `.grad`, from each rank's parts alone. False, and nothing is done, where
    placements do not allow that.

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
    """Add a DTensor to `.grad`, which gets its placements where there is none yet. Equal placements need no other rank."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    elif grad.placements == gradient.placements and grad.device_mesh == gradient.device_mesh:
        local(grad).add_(local(gradient))
    else:
        parameter.grad = grad + gradient.to(grad.dtype)


def rows_of(tensor: Tensor) -> Tensor:
    """All rows of a tensor as one matrix."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])  # (of no numbers -1 says nothing)


def _placement(of_dy: Any, of_x: Any, last: int) -> Any:
    """The placement of dyᵀ·x along one dimension of the mesh; None: a product of the parts is no part of it."""
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
    """The placement of the sum of dy's rows, a product with ones; None: the parts' sums are no part of it."""
    from torch.distributed.tensor import Replicate

    return _placement(of_dy, of_dy if isinstance(_cut(of_dy, last), int) else Replicate(), last)


def _cut(placement: Any, last: int) -> str | int:
    """How a tensor is cut: not at all ("whole"), into summands ("sum"), by its last dimension ("columns"), by another one
    (its number), or in a way that nothing is known about ("")."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(placement, Replicate):
        return "whole"
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "sum"
    if type(placement) is Shard:  # a subclass is cut in other ways
        return "columns" if placement.dim % (last + 1) == last else placement.dim % (last + 1)
    return ""


THIN = 16  # rows or columns; a router, an adapter or a head of one number has as few


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, of matrices or of batches of them.

    Product and sum are one kernel, but for thin matrices on a CPU. There BLAS may add term by term to the number that is in
    memory, so each microbatch brings the rounding of a sum of all terms so far, and autograd's product of its own only that
    of its own terms: gradients were up to 12 times less exact than autograd's. Of up to 7 rows or columns MKL did so always
    or never, depending on the processor, of more up to 12.
    """
    if left.is_cpu and type(left) is Tensor and min(total.shape[-2:]) <= THIN:  # a fake tensor stands for one on a GPU
        total.add_(left.mm(right) if left.dim() == 2 else left.bmm(right))
    elif total.dim() == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)
