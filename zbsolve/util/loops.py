"""Loops over columns that numpy has no word for: as they stand over few rows, compiled over many."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MANY_ROWS = 50_000  # beyond, loading numba and its compiled code is worth it


def looped(loop: Callable[..., Any], *columns: NDArray[np.int64]) -> Any:
    """`loop(*columns)`: with lists where the longest column has few rows, else compiled and with arrays. What it writes to
    it must return."""
    if max(map(len, columns)) < MANY_ROWS:
        return loop(*(column.tolist() for column in columns))
    return compiled(loop)(*(np.ascontiguousarray(column, np.int64) for column in columns))


@cache
def compiled(loop: Callable[..., Any]) -> Any:
    """The loop as a kernel, when it is first called: numba takes long to load, which short commands have no use for."""
    from .kernels import kernel

    return kernel(loop)
