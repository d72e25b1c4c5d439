"""Numbers that people give to builders, as whole µs and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tables import Ints
from ..util.errors import BadInput

LARGEST = 2**52  # µs or bytes; and a whole step stays below 2**60, so that sums are whole numbers of 64 bits
Numbers = Sequence[float] | NDArray[Any] | float


def whole_numbers(values: Any, what: str, count: int) -> Ints:
    """`count` whole numbers from 0 up; one number stands for all. A fraction is rounded, and refused where that changes it
    by more than 0.1 %. Raises BadInput naming `what` and the position."""
    row = np.array(values, dtype=object).ravel()
    if np.ndim(values) == 0:
        row = np.full(count, values, dtype=object)
    if len(row) != count:
        raise BadInput(f"{what}: {len(row)} values, {count} are needed")
    result = np.zeros(count, np.int64)
    for i, value in enumerate(row):
        try:
            exact = float(value)
            result[i] = round(exact)
        except OverflowError:
            raise BadInput(f"{what}[{i}]: larger than {LARGEST}") from None
        except (TypeError, ValueError):
            raise BadInput(f"{what}[{i}]: not a number: {value!r}") from None
        if exact < 0:
            raise BadInput(f"{what}[{i}]: {value} is negative")
        if exact > LARGEST:
            raise BadInput(f"{what}[{i}]: {value} is larger than {LARGEST}")
        if abs(exact - result[i]) > 1e-3 * exact:
            raise BadInput(f"{what}[{i}]: {value} is not whole; give whole µs and bytes (for example 1000 times as many)")
    return result
