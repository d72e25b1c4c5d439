"""DTensors in a split backward, and the product that every split adds to a gradient.

The weight gradient of a linear layer is made of each rank's own parts, where no other rank's are needed. A tensor-parallel
layer (torch's `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`) has such placements: then W neither communicates nor
pays for DTensor's dispatch. `.grad` gets the placements that eager mode gives it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base.values import Layout, is_dtensor, local


def add_linear(dy: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Add the gradients of weight and bias to their `.grad`, from each rank's parts alone. False, and nothing is done, where
    placements do not allow that.

    dy: (…, out), x: (…, in), all DTensors on one mesh.
    """
    if not all(is_dtensor(one) and one.device_mesh == weight.device_mesh for one in (dy, x, weight)):
        return False
    over = [_product(of_dy, of_x, dy.dim() - 1) for of_dy, of_x in zip(dy.placements, x.placements, strict=True)]
    if None in over:
        return False
    sums = [_row_sum(of_dy, dy.dim() - 1) for of_dy in dy.placements]
    trained = bias is not None and bias.requires_grad
    if trained and None in sums:
        return False
    rows, columns = (rows_of(local(one)) for one in (dy, x))
    grad = weight.grad
    if grad is not None and grad.placements == tuple(over) and grad.dtype == dy.dtype:
        add_product(local(grad), rows.t(), columns)
    else:
        add(weight, Layout(weight.device_mesh, tuple(over), weight.shape).whole(rows.t().mm(columns)))
    if trained:
        add(bias, Layout(bias.device_mesh, tuple(sums), bias.shape).whole(rows.sum(0)))
    return True


def add(parameter: Any, gradient: Any) -> None:
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


def _product(of_dy: Any, of_x: Any, last: int) -> Any:
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

    return _product(of_dy, of_dy if isinstance(_cut(of_dy, last), int) else Replicate(), last)


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
