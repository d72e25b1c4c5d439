"""Columns packed for a page, unpacked as the page unpacks them: each value comes back, and no sum leaves its type."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
import pytest

from zbsolve.show.pages import packed

GIB = 1 << 30
COLUMNS = {
    "none": [],
    "one": [7],
    "evenly": list(range(0, 3_000, 3)),
    "up and down": [5, -5, 5, -5],
    "just 32 bits": [2**31 - 1, 0, -(2**31) + 1],
    "a value beyond, its steps within": [3 * GIB // 2 * i for i in range(9)],
    "beyond and back": [0, 2**31 - 1, 2**31, 2**31 - 1, 0],
    "a step beyond, its values within": [2**31 - 1, -(2**31)],
    "64 bits": [17 * GIB, 3, 2**52, -(2**52) + 1, 80 * GIB],
    "to where doubles are whole": [2**53 - 1, 0, 2**53 - 1],
    "steps beyond that": [2**53 - 1, -(2**53) + 1, 2**53 - 3],
    "as much as a problem has": [2**62, 1, 2**61 + 2**40],
}


def unpacked(said: dict[str, Any]) -> dict[str, np.ndarray]:
    """As `unpacking.js`: typed arrays, with sums that wrap where their type does."""
    data, at, found = gzip.decompress(base64.b64decode(said["text"])), 0, {}
    for name, kind, length in said["columns"]:
        of = np.dtype("<i4" if kind == "i4" else "<f8")
        column = np.frombuffer(data, of, length, at)
        at += length * of.itemsize
        with np.errstate(over="ignore"):
            found[name] = column if kind == "values" else np.add.accumulate(column, dtype=of)
    assert at == len(data)
    return found


@pytest.mark.parametrize("name", COLUMNS)
def test_each_value_comes_back(name: str) -> None:
    found = unpacked(packed({name: COLUMNS[name]}))[name]
    assert found.tolist() == [float(value) for value in COLUMNS[name]]


def test_columns_lie_behind_each_other() -> None:
    said = packed(COLUMNS)
    for name, column in unpacked(said).items():
        assert column.tolist() == [float(value) for value in COLUMNS[name]]
    kinds = {name: kind for name, kind, _ in said["columns"]}
    assert [name for name, kind in kinds.items() if kind == "i4"] == list(COLUMNS)[:5]  # where that does, they are small
    assert [name for name, kind in kinds.items() if kind == "values"] == list(COLUMNS)[-2:]


def test_random_columns_of_64_bits() -> None:
    random = np.random.default_rng(0)
    for bits in range(2, 62):
        column = random.integers(-(2**bits), 2**bits, 200)
        for values in (column, np.sort(column), np.cumsum(column >> 8)):
            found = unpacked(packed({"some": values}))["some"]
            assert (found == values.astype(float)).all()
            assert bits > 52 or (found.astype(np.int64) == values).all()
