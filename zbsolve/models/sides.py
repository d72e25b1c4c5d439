"""Side inputs of a model: a layer's attribute `gives` names what it returns after its output, and `takes` names the
arguments that later layers receive after their input. A layer with `begins` takes the batch instead of the previous layer's
output (see `docs/side-inputs.md`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..layer import INPUTS, TARGETS, Names
from ..util.errors import BadInput


class Carried(NamedTuple):
    """What layers pass on where there are side inputs: the main value, and the side inputs by name."""

    row: Any
    sides: dict[str, Any]


def names_of(layer: nn.Module, number: int | None = None) -> Names:
    """The side inputs that a layer gives and takes, and whether it starts from the batch. number: of the layer, for errors.
    Raises BadInput for wrong types."""
    each, where = dict[str, tuple[str, ...]](), type(layer).__name__ if number is None else f"layer {number}"
    for what in ("gives", "takes"):
        value = getattr(layer, what, ())
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
            raise BadInput(f"{where}: '{what}' is a {type(value).__name__}: the names of side inputs are needed")
        each[what] = tuple(names)
    begins = getattr(layer, "begins", False)
    if not isinstance(begins, bool):
        raise BadInput(f"{where}: 'begins' is a {type(begins).__name__}: True, where it begins a row of its own")
    return Names(each["gives"], each["takes"], begins)


def outer_names(layers: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What layers give together, and what they take from earlier layers and from the batch, sorted."""
    gives, takes = set[str](), set[str]()
    for layer in layers:
        given, taken, begins = names_of(layer)
        takes |= {*taken, *([INPUTS] if begins else ())} - gives
        gives |= {*given}
    return tuple(sorted(gives)), tuple(sorted(takes))


def batch_with(layers: Any, inputs: Any, target: Any) -> Any:
    """The input of the first of all `layers`: the inputs, with what later layers take from the batch."""
    batch = {name: {INPUTS: inputs, TARGETS: target}[name] for name in outer_names(layers)[1] if name in (INPUTS, TARGETS)}
    return Carried(inputs, batch) if batch else inputs


def called(layer: nn.Module, x: Any) -> Any:
    """A layer's output, with side inputs where there are some. Raises BadInput where it does not give what it declares, or
    takes something that does not exist."""
    return called_by(layer, names_of(layer), x)


def called_by(layer: nn.Module, names: Names, x: Any) -> Any:
    """The same for a layer with known names: the form that can be traced."""
    gives, takes, begins = names
    row, sides = x if isinstance(x, Carried) else (x, {})
    row = sides.get(INPUTS, row) if begins else row
    if missing := [name for name in takes if name not in sides]:
        raise BadInput(f"{type(layer).__name__}: takes '{missing[0]}', which no layer before it gives")
    y = layer(row, *(sides[name] for name in takes))
    if gives:
        if not isinstance(y, tuple) or len(y) != 1 + len(gives):
            says = f"its output and behind it {', '.join(map(repr, gives))}, as a tuple"
            raise BadInput(f"{type(layer).__name__}: 'gives' says that it returns {says}; it returns a {type(y).__name__}")
        y, sides = y[0], {**sides, **dict(zip(gives, y[1:], strict=True))}
    return Carried(y, sides) if sides else y


def row_of(x: Any) -> Any:
    """The main value without side inputs."""
    return x.row if isinstance(x, Carried) else x
