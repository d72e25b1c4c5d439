"""Side inputs of a model (see `docs/side-inputs.md`). A layer's attribute `gives` names the values that it returns after its
output; `takes` of a later layer names those that it gets as arguments after its input. A layer with `begins` gets the batch
as its input, and not the output of the layer before it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..partition.layer import INPUTS, TARGETS, Names
from ..util.errors import BadInput

# Layer → its own attributes, and what they name: to look for attributes that a module lacks takes 4 µs.
_known = WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Names]]()


class Carried(NamedTuple):
    """The value that is passed from layer to layer of a model with side inputs. row: the last layer's output. sides: name →
    side input."""

    row: Any
    sides: dict[str, Any]


def names_of(layer: nn.Module, number: int | None = None) -> Names:
    """The attributes `gives`, `takes` and `begins` of a layer. number: of the layer, for errors. Raises BadInput for values
    of other types."""
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
    """The side inputs that consecutive layers give, and those that they take from earlier layers or the batch; sorted."""
    gives, takes = set[str](), set[str]()
    for layer in layers:
        given, taken, begins = names_of(layer)
        takes |= {*taken, *([INPUTS] if begins else ())} - gives
        gives |= {*given}
    return tuple(sorted(gives)), tuple(sorted(takes))


def batch_with(layers: Any, inputs: Any, target: Any) -> Any:
    """The input of the first of all `layers`: the batch's inputs, with the parts of the batch that later layers take."""
    batch = {name: {INPUTS: inputs, TARGETS: target}[name] for name in outer_names(layers)[1] if name in (INPUTS, TARGETS)}
    return Carried(inputs, batch) if batch else inputs


def called(layer: nn.Module, x: Any) -> Any:
    """Call a layer with its input and its side inputs. Raises BadInput if it does not return what `gives` names, or if no
    earlier layer gives what it takes."""
    own, known = tuple(map(layer.__dict__.get, Names._fields)), _known.get(layer)
    if known is None or known[0] != own:
        names = names_of(layer)
        known = _known[layer] = deepcopy(own), names
    return called_by(layer, known[1], x)


def called_by(layer: nn.Module, names: Names, x: Any) -> Any:
    """`called` for a layer whose names are known; it can be traced."""
    gives, takes, begins = names
    row, sides = x if isinstance(x, Carried) else (x, {})
    row = sides.get(INPUTS, row) if begins else row
    if missing := [name for name in takes if name not in sides]:
        raise BadInput(f"{type(layer).__name__}: takes '{missing[0]}', which no layer before it gives")
    y = layer(row, *(sides[name] for name in takes))
    if gives:
        if not isinstance(y, tuple) or len(y) != 1 + len(gives):
            says = f"its output and after it {', '.join(map(repr, gives))}, as a tuple"
            raise BadInput(f"{type(layer).__name__}: 'gives' says that it returns {says}; it returns a {type(y).__name__}")
        y, sides = y[0], {**sides, **dict(zip(gives, y[1:], strict=True))}
    return Carried(y, sides) if sides else y


def row_of(x: Any) -> Any:
    """The value without side inputs."""
    return x.row if isinstance(x, Carried) else x
