"""Numbers that users give to builders, as whole µs and bytes; and checks of the order in which features are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import LATER, OVERLAP
from ..problem import Problem
from ..problem.tables import Ints
from ..util.errors import BadInput, Infeasible
from ..util.text import exact_bytes

LARGEST = 2**52  # µs or bytes
Numbers = Sequence[float] | NDArray[Any] | float
# A number for each stage, or for each stage a row with a number for each microbatch.
Table = Numbers | Sequence[Sequence[float] | NDArray[Any] | float]


def whole_numbers(values: Any, what: str, count: int) -> Ints:
    """`count` integers from 0 up; a single number stands for all. A fraction is rounded, or refused if rounding changes it
    by more than 0.1 %. Raises BadInput naming `what` and the position."""
    row = np.array(values, dtype=object).ravel()
    if not _several(values):
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


def _several(values: Any) -> bool:
    """Are these several values, not one?"""
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return isinstance(values, Sequence) and not isinstance(values, str)


def whole_table(values: Any, what: str, rows: int, microbatches: int) -> Ints:
    """A table of integers, shape (rows, microbatches), from one number, one a row (a stage, or a boundary between two),
    or rows that each have one number a microbatch or one for all. Raises BadInput like `whole_numbers`."""
    whole = isinstance(values, np.ndarray) and values.dtype == np.int64 and values.shape == (rows, microbatches)
    if whole and values.min(initial=0) >= 0 and values.max(initial=0) <= LARGEST:
        return np.asarray(values)
    if not _several(values) or not any(_several(row) for row in values):
        return np.repeat(whole_numbers(values, what, rows)[:, None], microbatches, axis=1)
    if len(values) != rows:
        raise BadInput(f"{what}: {len(values)} rows, {rows} are needed")
    table = [whole_numbers(row, f"{what}[{i}]", microbatches) for i, row in enumerate(values)]
    return np.array(table, np.int64).reshape(rows, microbatches)


def check_room(needs: Ints, capacity: Iterable[int] | None, what: str = "one microbatch", also: str = "") -> None:
    """Raise Infeasible where a rank has fewer bytes than it needs for `what`; capacity None: unlimited."""
    for rank, (need, room) in enumerate(zip(needs, () if capacity is None else capacity, strict=False)):
        if need > room:
            text = f"capacity: rank {rank} needs {exact_bytes(need)} for {what}, but has {exact_bytes(room)}{also}"
            raise Infeasible(f"{text}: no schedule exists")


def check_before(problem: Problem, feature: str) -> None:
    """Raise BadInput where a step has the feature already (see `kinds.Kind`), or one that must be added after it."""
    if problem.has(feature):
        raise BadInput(f"{feature}: the problem has {feature} already")
    check_apart(problem, feature)


def check_apart(problem: Problem, feature: str) -> None:
    """Raise BadInput where a step has a feature that must be added after this one (see `LATER`), or joined passes of several
    stages (see `joined`), to which no other feature can be added."""
    for name in (*LATER.get(feature, ()), OVERLAP):
        if problem.has(name):
            how = "they exclude each other" if feature in LATER.get(name, ()) else f"put {feature} in before"
            raise BadInput(f"{feature}: the problem has {name} already: {how}")
