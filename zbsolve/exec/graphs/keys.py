"""Which blocks may share graphs: those that are alike in all that a trace can have read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ..backward.distributed import Layout
from ..base.dtensors import is_dtensor
from ..base.torch_private import buffers_of, children_of, module_hooks, parameters_of, tree_flatten, unwrapped

PLAIN = (bool, int, float, str, bytes, complex, NoneType, torch.dtype, torch.device, torch.Size, type, Enum)
CODE = (FunctionType, BuiltinFunctionType)
# What every module has, and no trace reads as a number: its name for hooks, its parts (which have keys of their own), and
# its compiled call, which a trace goes through.
BOOKKEEPING = {name for name in (*vars(nn.Module()), "_compiled_call_impl") if name != "training"}


class _Unknown(Exception):
    """An attribute that cannot be compared."""


def block_key(block: nn.Module) -> Any:
    """Blocks with equal keys have equal graphs for equal inputs: the same classes, plain attributes, shapes, types and
    gradients wanted, in the same places. None: it has attributes that cannot be compared, so it shares with nobody."""
    seen: dict[int, int] = {}
    try:
        return _module_key(block, seen)
    except _Unknown:
        return None


def inputs_key(x: Any) -> Any:
    """What a trace reads of inputs, a pytree: their structure, shapes, types, which of them require a gradient; and
    autocast, which it finds as it is now."""
    leaves, spec = ([x], "") if isinstance(x, Tensor) else tree_flatten(x)
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind))
    return str(spec), tuple(_leaf_key(leaf) for leaf in leaves), casts


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _tensor_key(leaf)
    return type(leaf), leaf if isinstance(leaf, PLAIN) else id(leaf)


def _tensor_key(tensor: Tensor) -> Any:
    layout = Layout.of(tensor) if is_dtensor(tensor) else None
    return layout, type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _module_key(module: nn.Module, seen: dict[int, int]) -> Any:
    if unwrapped(module) is not module:
        return "compiled", _module_key(unwrapped(module), seen)
    if id(module) in seen:
        return "again", seen[id(module)]
    seen[id(module)] = len(seen)
    own = {name: value for name, value in vars(module).items() if name not in BOOKKEEPING}
    held = {**parameters_of(module), **buffers_of(module)}
    return (
        type(module),
        tuple((name, _held_key(tensor, seen)) for name, tensor in held.items()),
        tuple((name, None if child is None else _module_key(child, seen)) for name, child in children_of(module).items()),
        tuple((name, _plain_key(value)) for name, value in sorted(own.items())),
        tuple(_hook_key(hook) for hook in module_hooks(module)),
    )


def _held_key(tensor: Tensor | None, seen: dict[int, int]) -> Any:
    if tensor is None:
        return None
    place = seen.setdefault(id(tensor), len(seen))  # tied inside the block, or not
    return place, _tensor_key(tensor)


def _plain_key(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_plain_key(one) for one in value)
    if isinstance(value, Mapping):
        return type(value), tuple((name, _plain_key(one)) for name, one in value.items())
    if isinstance(value, CODE) and not getattr(value, "__closure__", None):
        return value
    if isinstance(value, partial):
        return partial, value.func, _plain_key(value.args), _plain_key(value.keywords)
    if type(value).__module__.startswith("torch.distributed."):  # meshes and placements; how a module is parallelized
        return value if _compares(value) else (type(value), _plain_key(vars(value)))
    raise _Unknown


def _compares(value: Any) -> bool:
    """Does it say what is equal to it?"""
    return getattr(type(value), "__eq__", None) is not object.__eq__


def _hook_key(hook: Any) -> Any:
    """The code of a hook and what it was made with."""
    cells = getattr(hook, "__closure__", None) or ()
    return getattr(hook, "__code__", None) or _plain_key(hook), tuple(_plain_key(cell.cell_contents) for cell in cells)
