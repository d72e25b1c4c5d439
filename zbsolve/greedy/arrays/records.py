"""Records for compiled code: a table of them is one array, and passing it on costs one count of references."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]  # a table of records
Row = Any  # one of them; its fields are attributes


def record(fields: str) -> np.dtype[Any]:
    """A record of whole numbers, by the names of its fields with blanks between."""
    return np.dtype([(name, np.int64) for name in fields.split()])
