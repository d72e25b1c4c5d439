"""Subclasses of torch's layers that do what the layer does, as engines and libraries make them."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from typing import TypeVar

Row = TypeVar("Row")

# What a subclass may have of its own while calling it still does what the layer does.
HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "__module__", "__qualname__", "__doc__"}
HARMLESS |= {"__annotations__", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"}
HARMLESS |= {"__init_subclass__", "_apply"}  # asked when a class is made, and by `to` and `to_empty` (torchtitan's layers)


def row_of(kind: type, table: Mapping[type, Row]) -> Row | None:
    """The table's row of a class, or of the class from which it inherits all that counts when it is called; else None."""
    base = next((one for one in kind.__mro__ if one in table), None)
    if base is None or kind is base:
        return None if base is None else table[base]
    changed = {name for name in dir(base) if getattr_static(kind, name) is not getattr_static(base, name)}
    return table[base] if changed <= HARMLESS and not any(hasattr(kind, name) for name in ("weight", "bias")) else None
