"""The split backward of several linear layers of one size that are one product (`BatchedLinear`, as of experts)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...models.blocks.weights import BatchedLinear
from .deferral import Deferral, Gradients, Op, accumulate, call, splits
from .products import add_product


def _product(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: None, kept: Any) -> Gradients:
    return dy.transpose(1, 2).bmm(x), None


def _add(dy: Tensor, x: Tensor, weight: Tensor, bias: None, kept: Any) -> None:
    """See `products` for a gradient that is there already."""
    if weight.grad is not None and weight.grad.dtype == dy.dtype:
        add_product(weight.grad, dy.transpose(1, 2), x)
    else:
        accumulate(weight, dy.transpose(1, 2).bmm(x))


BATCHED = Op(
    plain=_product,
    forward=lambda *args: (_product(*args), ()),
    x_gradient=lambda dy, x, weight, kept: dy.bmm(weight),
    gradients=_gradients,
    add=_add,
    low=True,
)


def batched_linear(layer: BatchedLinear, deferral: Deferral, x: Tensor) -> Tensor:
    """Its forward, split where the call is to be."""
    if splits(deferral, x, layer.weight, None):
        return call(BATCHED, deferral, x, layer.weight, None)
    return BatchedLinear.forward(layer, x)
