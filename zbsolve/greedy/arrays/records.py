"""Tables for compiled code: records, and compressed rows. A table of records is one array, and passing it on costs one count
of references.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...problem import Ints

Records = NDArray[Any]  # a table of records
Row = Any  # one of them; its fields are attributes


def record(fields: str) -> np.dtype[Any]:
    """A record of whole numbers, by the names of its fields with blanks between."""
    return np.dtype([(name, np.int64) for name in fields.split()])


def compressed_rows(keys: Ints, count: int, *columns: Ints) -> tuple[Ints, ...]:
    """Columns grouped by key: (first, columns sorted by key); key k has the entries first[k]:first[k + 1]."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64)
    return (first, *(column[order] for column in columns))
