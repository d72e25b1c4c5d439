"""`SharedGraphs`: graphs that equal layers share, and keys that tell which layers are equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache, partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...models.losses import auxiliary_losses
from ..backward.layer_split import run_layers
from ..backward.replay import as_written, mode_of, undisturbed
from ..backward.stage import Split
from ..base import torch_private as private
from ..base.values import (
    Layout,
    cast,
    constant,
    detached,
    is_dtensor,
    is_wrapped,
    leaves_of,
    local,
    own_type,
    tensors_of,
    wrapped_modules,
)
from .graph_split import Graphs, GraphSplit, graphs_of
from .joint import Untraceable

PLAIN = (bool, int, float, str, bytes, complex, NoneType, torch.dtype, torch.device, torch.Size, type, Enum)
CODE = (FunctionType, BuiltinFunctionType)
# Attributes of every module that no trace reads: those for hooks, children (which have keys of their own), and the compiled
# call, through which a trace goes.
BOOKKEEPING = {name for name in (*vars(nn.Module()), "_compiled_call_impl") if name != "training"}


class SharedGraphs:
    """Graphs by block and inputs, each made at its first use. make(block, x): traces one."""

    def __init__(self, make: Callable[[nn.Module, Any], Graphs] = graphs_of) -> None:
        self.make = make
        self._found: dict[Any, Graphs] = {}

    def split(self, layer: nn.Module, number: int, x: Any, seed: int) -> GraphSplit:
        """Layer `number`, split by its graphs for inputs like `x`. New graphs are compared with eager mode. Raises
        Untraceable."""
        wanted = shared_key(layer := private.unwrapped(layer), x)
        if wanted in self._found:
            return GraphSplit(layer, number, self._found[wanted])
        if any(isinstance(part, torch.jit.ScriptModule) for part in layer.modules()):
            raise Untraceable(f"{own_type(layer).__name__} is a script, which no graph goes through")
        with undisturbed(layer):
            part = GraphSplit(layer, number, self.make(unsharded_view(layer), x))
        check_forward(layer, number, part, x, seed)
        self._found[wanted] = part.graphs
        return part


def shared_key(layer: nn.Module, x: Any) -> Any:
    """A key that is equal for layers that may share graphs for inputs like `x`."""
    key = block_key(unsharded_view(layer))
    if key is None:  # a layer shares with itself alone, in the same mode and with the same parameters trained
        key = id(layer), mode_of(layer.modules()), *(p.requires_grad for p in layer.parameters())
    return key, inputs_key(x)


def check_forward(layer: nn.Module, number: int, part: Split, x: Any, seed: int) -> None:
    """Raise Untraceable where `part` gives other outputs than `layer`, or leaves other buffers: a trace may have taken
    something for constant that is not."""
    given = detached(x)
    with undisturbed(layer), as_written(), auxiliary_losses() as extra:
        right = _outcome(layer, (run_layers([layer], given, number, seed), extra.total))
    if any(map(private.hooked, tensors_of(given))):
        raise Untraceable(f"{type(layer).__name__} puts hooks on its input, which graphs do not run")
    with undisturbed(layer), auxiliary_losses() as extra:
        made = _outcome(layer, (part.forward(x, None, split=True, seed=seed)[0], extra.total))
    for what in ("output", "gradient", "buffer"):
        pairs = zip(made[what].items(), right[what].items(), strict=True)
        for (name, value), (_, other) in pairs:
            if not _alike(value, other):
                which = f"gradient of output {name}" if what == "gradient" else f"{what} {name}"
                raise Untraceable(f"{type(layer).__name__}'s graph gives another {which} than eager mode")


def _outcome(layer: nn.Module, y: Any) -> dict[str, dict[Any, Any]]:
    # What layers add to the loss is handed on detached (see `Split`), so outputs alone say whether they need a gradient.
    needs = dict(enumerate(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(y[0])))
    return {"output": dict(enumerate(leaves_of(constant(y)))), "gradient": needs, "buffer": dict(layer.named_buffers())}


def _alike(a: Any, b: Any) -> bool:
    """Equal up to rounding: by half of the dtype's digits of the largest number."""
    if not isinstance(b, Tensor) or not isinstance(a, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or is_dtensor(a) != is_dtensor(b):
        return False
    a, b = local(a), local(b)
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    if not b.numel():
        return True
    largest = b.abs().nan_to_num(posinf=0.0).max()
    limit = torch.finfo(b.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=0.0, atol=float(largest) * limit, equal_nan=True)


class Unknown(Exception):
    """An attribute that cannot be compared."""


def block_key(block: nn.Module) -> Any:
    """A key that is equal for blocks with equal graphs for equal inputs: with the same classes, plain attributes, shapes,
    dtypes and `requires_grad`, in the same places. None: some attributes cannot be compared, so the block shares no
    graphs."""
    try:
        return Keys().of(block)
    except Unknown:
        return None


def inputs_key(x: Any) -> Any:
    """What a trace depends on: the inputs' structure, shapes, dtypes and `requires_grad`, and the autocast settings of the
    moment."""
    leaves, spec = ([x], "") if isinstance(x, Tensor) else private.tree_flatten(x)
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind))
    constants = ((type(leaf), leaf if isinstance(leaf, PLAIN) else id(leaf)) for leaf in leaves)
    keys = tuple(tensor_key(leaf) if isinstance(leaf, Tensor) else key for leaf, key in zip(leaves, constants, strict=True))
    return str(spec), keys, casts


def tensor_key(tensor: Tensor) -> Any:
    """A key that is equal for tensors that differ only in their values."""
    layout = Layout.of(tensor) if is_dtensor(tensor) else None
    return layout, type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _refused(value: Any) -> Any:
    raise Unknown


class Keys:
    """Keys of modules. left_out: names of attributes that do not count. other: the key of an attribute of another type than
    PLAIN; its exceptions are passed on."""

    def __init__(self, left_out: Collection[str] = (), other: Callable[[Any], Any] = _refused) -> None:
        self._left_out, self._other, self._seen = BOOKKEEPING.union(left_out), other, dict[int, int]()

    def of(self, module: nn.Module) -> Any:
        """The key of a module with everything in it."""
        if private.unwrapped(module) is not module:
            return "compiled", self.of(private.unwrapped(module))
        if id(module) in self._seen:
            return "again", self._seen[id(module)]
        self._seen[id(module)] = len(self._seen)
        own = [pair for pair in sorted(vars(module).items(), key=itemgetter(0)) if pair[0] not in self._left_out]
        held = {**private.parameters_of(module), **private.buffers_of(module)}
        return (
            type(module),
            tuple((name, self._held(tensor)) for name, tensor in held.items()),
            tuple((name, None if child is None else self.of(child)) for name, child in private.children_of(module).items()),
            tuple((name, self._value(value)) for name, value in own),
            tuple(self._hook(hook) for hook in private.module_hooks(module)),
        )

    def _held(self, tensor: Tensor | None) -> Any:
        """The key of a tensor; its number shows if it is tied inside the block."""
        if tensor is not None and is_lazy(tensor):  # its key changes with the first forward
            raise Unknown
        return None if tensor is None else (self._seen.setdefault(id(tensor), len(self._seen)), tensor_key(tensor))

    def _value(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, tuple | list):
            return type(value), tuple(self._value(part) for part in value)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self._value(part) for part in value)
        if isinstance(value, Mapping):
            return type(value), tuple((name, self._value(part)) for name, part in value.items())
        if isinstance(value, CODE) and not getattr(value, "__closure__", None):
            return value
        if isinstance(value, partial):
            return partial, value.func, self._value(value.args), self._value(value.keywords)
        if type(value).__module__.startswith("torch.distributed."):  # meshes and placements; how a module is parallelized
            says_equal = getattr(type(value), "__eq__", None) is not object.__eq__
            return value if says_equal else (type(value), self._value(vars(value)))
        return self._other(value)

    def _hook(self, hook: Any) -> Any:
        """The code of a hook, and the values in its closure."""
        cells = getattr(hook, "__closure__", None) or ()
        code = getattr(hook, "__code__", None) or self._value(hook)
        return code, tuple(self._value(cell.cell_contents) for cell in cells)


def unsharded_view(layer: nn.Module) -> nn.Module:
    """A view of the layer without FSDP's wrappers and hooks; the layer itself where FSDP has wrapped nothing of it."""
    return _view(layer, {}) if wrapped_modules(layer) else layer


def _view(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    if id(module) in seen:
        return seen[id(module)]
    kind, wrapped = own_type(module), is_wrapped(module)
    kind = _casting(kind, *private.fsdp_casts(module)) if wrapped else kind  # type: ignore[arg-type]
    made = seen[id(module)] = kind.__new__(kind)
    held = {name: value for name, value in vars(module).items() if not private.fsdp_mark(name)}
    if wrapped:
        ours = private.fsdp_hooks(module)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            held[name] = type(held[name])((i, hook) for i, hook in held[name].items() if i not in ours)
    held["_modules"] = {name: child and _view(child, seen) for name, child in private.children_of(module).items()}
    vars(made).update(held)
    return made


@cache
def _casting(kind: type[nn.Module], given: torch.dtype | None, made: torch.dtype | None) -> type[nn.Module]:
    """The class, with a forward that casts floating-point inputs to dtype `given` and outputs to dtype `made`."""
    if given is None and made is None:
        return kind

    class Casting(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return cast(kind.forward(self, *cast(args, given), **cast(kwargs, given)), made)

    Casting.__name__ = Casting.__qualname__ = kind.__name__
    return Casting
