"""Columns of whole numbers packed for a page: differences, little-endian, gzip, base64. `unpacking.js` unpacks them.

A page adds differences up in the type in which they came, so a column is as narrow as its values and its differences allow.

Passes stand in lanes, where nearly every column grows evenly: its differences repeat, and gzip makes little of them.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..problem import Ints

NARROW, EXACT = 2**31 - 1, 2**53  # what 32 bits hold, and up to what a double holds each whole number
STEPS, WIDE_STEPS, VALUES = "i4", "f8", "values"


def packed(columns: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """One text for all columns, each of shape (n,), and how to read it: `columns` has (name, type, length) in the order in
    which they stand in `text`. Types: `i4` and `f8`: differences of neighbours in 32 bits, and in doubles; `values`: doubles
    as they are, where a sum of differences would not be exact."""
    found, pieces = [], []
    for name, values in columns.items():
        column = np.asarray(values, np.int64)
        steps = np.diff(column, prepend=0)
        kind = _type_of(column)
        found.append((name, kind, len(column)))
        pieces.append((column if kind == VALUES else steps).astype("<i4" if kind == STEPS else "<f8").tobytes())
    text = base64.b64encode(gzip.compress(b"".join(pieces), 6, mtime=0)).decode("ascii")  # no clock: the same file each time
    return {"columns": found, "text": text}


def _type_of(column: Ints) -> str:
    """The narrowest type that holds every value and every difference. Floats do not wrap, as 64 bits may."""
    values = column.astype(float)
    largest = max(np.abs(values).max(initial=0), np.abs(np.diff(values, prepend=0)).max(initial=0))
    return STEPS if largest <= NARROW else WIDE_STEPS if largest < EXACT else VALUES
