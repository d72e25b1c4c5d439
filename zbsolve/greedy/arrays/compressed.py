"""Compressed rows: entries grouped by a key, as compiled code reads them."""

from __future__ import annotations

import numpy as np

from ...problem import Ints


def compressed_rows(keys: Ints, count: int, *columns: Ints) -> tuple[Ints, ...]:
    """Columns grouped by key: (first, columns sorted by key); key k has the entries first[k]:first[k + 1]."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64)
    return (first, *(column[order] for column in columns))
