"""Adding a product of matrices to a gradient that is there: one kernel, or two where one would be less exact."""

from __future__ import annotations

from torch import Tensor

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
