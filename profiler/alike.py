"""Which layers are equal, so that one of them speaks for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from zbsolve.exec.base.torch_private import buffers_of, parameters_of

PLAIN_DATA = (int, float, bool, str, bytes, complex, type(None))
NUMBERING = {"layer_idx", "layer_id"}  # Hugging Face numbers its layers; training computes nothing from that


def fingerprint(layer: nn.Module) -> Hashable:
    """Equal for layers of the same classes, shapes, types and settings, whatever numbers their parameters hold. What is
    neither plain data nor a tensor counts by identity. So equal layers may have unequal fingerprints, and never the other
    way round."""
    return tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())


def _settings(module: nn.Module) -> Hashable:
    rows = [
        ("tensor", name, _tensor(value)) for name, value in (*parameters_of(module).items(), *buffers_of(module).items())
    ]
    own = [
        (name, _value(value))
        for name, value in sorted(vars(module).items())
        if name not in NUMBERING and not name.startswith("_") and name != "forward"
    ]
    return module.extra_repr(), tuple(rows), tuple(own)


def _tensor(value: Tensor | None) -> Hashable:
    return None if value is None else (tuple(value.shape), value.dtype, value.requires_grad, value.stride())


def _value(value: Any) -> Hashable:
    if isinstance(value, PLAIN_DATA):
        return (type(value), value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_value(one) for one in value))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_value(one) for one in value))
    if isinstance(value, partial):
        return (partial, value.func, _value(value.args), _value(value.keywords))
    if isinstance(value, dict):
        return tuple((_value(key), _value(one)) for key, one in value.items())
    return (type(value), value if isinstance(value, Hashable) else _Itself(value))


class _Itself:
    """Equal to itself alone. It holds the object, because the address of one that is gone could be another's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def chosen(
    prints: Sequence[Hashable], inputs: Sequence[Hashable], output: Hashable, copies: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which layers to measure, and for every layer the first one that is equal.

    prints: a fingerprint each. inputs: what goes into each (shape, type); output: what leaves the last. At most `copies` of
    each kind are taken. The first layer (it makes no input gradient) and the last (it has the loss) equal no other. The
    layers taken must follow each other: where the output of one would not be the input of the next, all layers are taken.
    """
    first: dict[Hashable, int] = {}
    count: dict[int, int] = {}
    kinds, taken = [], []
    outputs = [*inputs[1:], output]
    ends = [(i == 0, i == len(prints) - 1) for i in range(len(prints))]
    for i, key in enumerate(zip(prints, inputs, outputs, ends, strict=True)):
        kind = first.setdefault(key, i)
        kinds.append(kind)
        count[kind] = count.get(kind, 0) + 1
        if count[kind] <= copies:
            taken.append(i)
    if any(outputs[a] != inputs[b] for a, b in zip(taken, taken[1:], strict=False)):
        taken = list(range(len(prints)))
    return tuple(taken), tuple(kinds)
