"""The backward split: weight gradients are deferred inside the layers.

A B pass runs autograd through the layers. Linear layers, embeddings, batched products of experts and convolutions compute
the gradient of their input at once, and queue what the gradient of their weight needs. A W pass computes what is in the
queue. All other parameters get their gradients in B, so every model trains correctly. (To go through autograd's graph once
for each parameter instead takes as long as 2 to 7 fused backwards.)

Norms stay in B. In W they would need their input and output gradient for longer, and read both once more, to defer very
little work. On transformer blocks (`benchmarks/results/split.json`) that took 25 % more bytes between B and W. (B + W) / BW
was 1.03 to 1.07 instead of 1.01 to 1.04 at width 192, and 1.13 to 1.30 instead of 0.96 to 1.10 at width 64 (a busy machine).

Parameters keep their names and identity. Only the `forward` of a layer object is replaced: it runs the layer's `Op` where
the call can be split, and else the layer's own forward. Not replaced are layers named in `deferral`, those with a forward of
their own, and those under DistributedDataParallel or FSDP1, which reduce gradients in autograd's hooks. (For FSDP2, which
puts a class of its own in front of a layer's, see `sharding`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.blocks import BatchedLinear
from ..base.torch_private import output_padding, padding_around
from ..base.values import is_dtensor, own_type
from .deferral import Deferral, Gradients, Op, accumulate, accumulate_product, add_linear, call, rows_of, splits

aten = torch.ops.aten
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}  # by name: importing them takes seconds
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Row = TypeVar("Row")
# What a subclass may define without changing what a call of the layer does.
HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "__module__", "__qualname__", "__doc__"}
HARMLESS |= {"__annotations__", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"}
HARMLESS |= {"__init_subclass__", "_apply"}  # used to make a class, and by `to` and `to_empty` (torchtitan's layers)


def _trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _linear_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Gradients:
    rows = rows_of(dy)
    return rows.t().mm(rows_of(x)), rows.sum(0) if _trained(bias) else None


def linear_add(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add the gradients of a linear layer to `.grad`."""
    if is_dtensor(weight) and add_linear(dy, x, weight, bias):
        return
    rows = rows_of(dy)
    accumulate_product(weight, rows.t(), rows_of(x))
    if bias is not None and bias.requires_grad:
        accumulate(bias, rows.sum(0))


LINEAR = Op(
    plain=functional.linear,
    x_gradient=lambda dy, x, weight: dy.matmul(weight),
    gradients=_linear_gradients,
    add=linear_add,
    low=True,
)


def _linear(layer: nn.Linear, deferral: Deferral, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias  # read once: attributes of modules are slow
    if splits(deferral, x, weight, bias, distributed=True):
        return call(LINEAR, deferral, x, weight, bias)
    return functional.linear(x, weight, bias)


# Several linear layers of the same size as one product, as in experts.
BATCHED = Op(
    plain=lambda x, weight, bias: torch.bmm(x, weight.transpose(1, 2)),
    x_gradient=lambda dy, x, weight: dy.bmm(weight),
    gradients=lambda dy, x, weight, bias: (dy.transpose(1, 2).bmm(x), None),
    add=lambda dy, x, weight, bias: accumulate_product(weight, dy.transpose(1, 2), x),
    low=True,
)


def _batched_linear(layer: BatchedLinear, deferral: Deferral, x: Tensor) -> Tensor:
    """The layer's forward, split if possible."""
    if splits(deferral, x, layer.weight, None):
        return call(BATCHED, deferral, x, layer.weight, None)
    return BatchedLinear.forward(layer, x)


EMBEDDING = Op(
    plain=lambda ids, weight, bias, padding, by_frequency: functional.embedding(
        ids, weight, None if padding < 0 else padding, scale_grad_by_freq=by_frequency
    ),
    x_gradient=lambda *args: None,  # type: ignore[arg-type]  # whole numbers have no gradient
    gradients=lambda dy, ids, weight, bias, *args: (aten.embedding_dense_backward(dy, ids, weight.shape[0], *args), None),
)


def _embedding(layer: nn.Embedding, deferral: Deferral, ids: Tensor) -> Tensor:
    # max_norm changes the weight in place, and sparse gradients have another layout: those stay with autograd.
    if layer.max_norm is None and not layer.sparse and splits(deferral, ids, layer.weight, None, distributed=True):
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        return call(EMBEDDING, deferral, ids, layer.weight, None, padding, layer.scale_grad_by_freq)
    return nn.Embedding.forward(layer, ids)


def _convolution_parts(
    mask: list[bool], dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, args: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = None if bias is None else bias.shape
    return aten.convolution_backward(dy, x, weight, sizes, *args, mask)


CONVOLUTION = Op(
    plain=torch.convolution,
    x_gradient=lambda dy, x, weight, *args: _convolution_parts([True, False, False], dy, x, weight, None, args)[0],
    gradients=lambda dy, x, weight, bias, *args: _convolution_parts(
        [False, True, _trained(bias)], dy, x, weight.to(dy.dtype), bias, args
    )[1:],
    low=True,
)


def _convolution(layer: Convolution, deferral: Deferral, x: Tensor) -> Tensor:
    if not splits(deferral, x, layer.weight, layer.bias):
        return type(layer).forward(layer, x)  # type: ignore[arg-type]
    padding: Any = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = functional.pad(x, padding_around(layer), mode)
        padding = (0,) * len(layer.kernel_size)
    return _batched(layer, deferral, x, padding, False, (0,) * len(layer.kernel_size))


def _transposed(layer: Transposed, deferral: Deferral, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    if not splits(deferral, x, layer.weight, layer.bias):
        return type(layer).forward(layer, x, output_size)  # type: ignore[arg-type]
    return _batched(layer, deferral, x, list(layer.padding), True, output_padding(layer, x, output_size))


def _batched(
    layer: Convolution | Transposed, deferral: Deferral, x: Tensor, padding: Any, transposed: bool, extra: Sequence[int]
) -> Tensor:
    """Call the op with a batch; layers also take a single sample."""
    single = x.dim() == len(layer.kernel_size) + 1
    args = layer.stride, padding, layer.dilation, transposed, extra, layer.groups
    y = call(CONVOLUTION, deferral, x.unsqueeze(0) if single else x, layer.weight, layer.bias, *args)
    return y.squeeze(0) if single else y


FORWARDS: dict[type, Callable[..., Tensor]] = {
    nn.Linear: _linear,
    BatchedLinear: _batched_linear,
    nn.Embedding: _embedding,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed),
}


def defer(module: nn.Module, deferral: Deferral) -> None:
    """Replace the forward of every layer in `module` that can be split, in place, even if another `defer` has replaced it.
    Subclasses that change more than their construction, and layers whose forward was replaced, stay as they are: they
    may compute anything."""
    if WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
        return
    make = row_of(own_type(module), FORWARDS)
    own = module.__dict__.get("forward")
    if isinstance(own, _Forward):
        del module.__dict__["forward"]
        own = None
    if make is not None and own is None:
        module.forward = _Forward(make, module, deferral)
    for child in module.children():
        defer(child, deferral)


def restore(module: nn.Module) -> None:
    """Undo `defer`."""
    for layer in module.modules():
        if isinstance(layer.__dict__.get("forward"), _Forward):
            del layer.__dict__["forward"]


class _Forward(partial[Any]):
    """A replaced forward, recognized by its type. A partial, since deepcopy copies it with its layer."""


def row_of(kind: type, table: Mapping[type, Row]) -> Row | None:
    """The table's row for a class, or for a base from which it inherits all that counts in a call; else None."""
    base = next((cls for cls in kind.__mro__ if cls in table), None)
    if base is None or kind is base:
        return None if base is None else table[base]
    changed = {name for name in dir(base) if getattr_static(kind, name) is not getattr_static(base, name)}
    return table[base] if changed <= HARMLESS and not any(hasattr(kind, name) for name in ("weight", "bias")) else None
