"""Columns of whole numbers packed for a page: differences, little-endian, gzip, base64. `unpacking.js` unpacks them.

Passes stand in lanes, where nearly every column grows evenly: its differences repeat, and gzip makes little of them.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def packed(columns: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """One text for all columns, each of shape (n,), and how to read it: `columns` has (name, type, length) in the order in
    which they stand in `text`. Types: `i4` and `f8` of the differences of neighbours; `f8` holds whole numbers to 2⁵³."""
    found, pieces = [], []
    for name, values in columns.items():
        steps = np.diff(np.asarray(values, np.int64), prepend=0)
        narrow = len(steps) == 0 or bool(np.abs(steps).max() < 2**31)
        found.append((name, "i4" if narrow else "f8", len(steps)))
        pieces.append(steps.astype("<i4" if narrow else "<f8").tobytes())
    text = base64.b64encode(gzip.compress(b"".join(pieces), 6, mtime=0)).decode("ascii")  # no clock: the same file each time
    return {"columns": found, "text": text}
