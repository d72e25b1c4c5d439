"""A wrapped layer as if nobody had wrapped it: for tracers, which run no hooks.

The view is made of modules of the classes that a person wrote. They share parameters and buffers with the layer's own, so
they have what is gathered now. Casts under mixed precision, which FSDP's hooks do, are a part of their forward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensors import is_wrapped, own_type, wrapped_modules
from ..base.torch_private import children_of, fsdp_casts, fsdp_hooks, fsdp_mark, tree_map


def unsharded_view(layer: nn.Module) -> nn.Module:
    """The view; the layer itself where FSDP has wrapped nothing of it."""
    return _view(layer, {}) if wrapped_modules(layer) else layer


def _view(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    kind, wrapped = own_type(module), is_wrapped(module)
    kind = _casting(kind, *fsdp_casts(module)) if wrapped else kind  # type: ignore[arg-type]
    made = seen[id(module)] = kind.__new__(kind)
    held = {name: value for name, value in vars(module).items() if not fsdp_mark(name)}
    if wrapped:
        ours = fsdp_hooks(module)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            held[name] = type(held[name])((i, hook) for i, hook in held[name].items() if i not in ours)
    held["_modules"] = {name: child and _view(child, seen) for name, child in children_of(module).items()}
    vars(made).update(held)
    return made


@cache
def _casting(kind: type[nn.Module], given: torch.dtype | None, made: torch.dtype | None) -> type[nn.Module]:
    """The class, with a forward that casts floating-point inputs to the type `given` and outputs to the type `made`."""
    if given is None and made is None:
        return kind

    class Casting(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return _cast(kind.forward(self, *_cast(args, given), **_cast(kwargs, given)), made)

    Casting.__name__ = Casting.__qualname__ = kind.__name__
    return Casting


def _cast(value: Any, kind: torch.dtype | None) -> Any:
    if kind is None:
        return value

    def one(leaf: Any) -> Any:
        return leaf.to(kind) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, value)
