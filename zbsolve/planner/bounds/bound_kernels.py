"""Least makespans over every partition of blocks into stages, one layout a row: compiled searches by halving.

A makespan X is possible only if blocks can be laid on ranks whole so that no rank has more than X leaves room for. Each
condition below says how many blocks a rank can have at most; if all ranks together cannot have all, no partition has X.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ...util.kernels import kernel
from .bound_row import BoundRow, Rows
from .chunk_kernels import possible_chunks
from .memory_kernels import fitting, spread, staying
from .split_kernels import MAX_SLACK, possible_split
from .stage_kernels import possible_single

NEVER = -1  # no makespan is enough: one microbatch does not fit
FIRST_STEP = 1 << 10  # one part in so many of a makespan


@kernel
def least_makespans(rows: Rows) -> Ints:
    """µs that no schedule of any partition of a row's layout undercuts; `NEVER` where none fits. Shape (layouts,).

    Splits of ranks between their stages take longest, so they come last: only for makespans that all else leaves possible.

    rows: of `bound_rows`, shape (layouts,).
    """
    bounds = np.zeros(len(rows), np.int64)
    scratch = np.zeros(scratch_size(rows), np.int64)
    for i in range(len(rows)):
        row = rows[i]
        most = row.serial
        if not possible(row, most, scratch):
            bounds[i] = NEVER
            continue
        least = least_between(row, row.chain - 1, most, False, scratch)
        if least < most and not possible(row, least, scratch):
            step = 1 + least // FIRST_STEP
            while least + step < most and not possible(row, least + step, scratch):
                step, least = 2 * step, least + step
            least = least_between(row, least, min(most, least + step), True, scratch)
        bounds[i] = least
    return bounds


@kernel
def least_between(row: BoundRow, low: int, high: int, all_rules: bool, scratch: Ints) -> int:
    """The least possible makespan above `low`, µs, where `high` is possible. all_rules: whether splits count, too."""
    while high - low > 1:
        middle = (low + high) // 2
        if possible(row, middle, scratch) if all_rules else possible_ranks(row, middle, scratch):
            high = middle
        else:
            low = middle
    return high


@kernel
def scratch_size(rows: Rows) -> int:
    """Whole numbers that looking at any of the rows needs."""
    return 1 + int(rows["ranks"].max()) + 2 * (MAX_SLACK + 1) * (int(rows["blocks"].max()) + 1)


@kernel
def possible(row: BoundRow, x: int, scratch: Ints) -> bool:
    """Whether no condition forbids a makespan of x µs. scratch: `scratch_size` whole numbers that are overwritten."""
    return possible_ranks(row, x, scratch) and (row.single == 1 or possible_split(row, x, scratch))


@kernel
def possible_ranks(row: BoundRow, x: int, scratch: Ints) -> bool:
    """The same without a look at how each rank's blocks lie on its stages."""
    way = x - row.last_exchange
    if way < row.chain + (spread(row, float(staying(row, way)), fitting(row), 0) if row.slices == 1 else 0.0):
        return False
    return possible_single(row, x) if row.single else possible_chunks(row, x, scratch)


@kernel
def refuted(rows: Rows, bounds: Ints) -> NDArray[np.bool_]:
    """Of each row whether no makespan below its bound is possible; of a negative bound, whether none is at all.

    All passes one after the other take `serial` µs. So a larger bound holds only where nothing fits, and it is not tried:
    sums of such numbers may overflow.

    rows: of `bound_rows`, shape (layouts,).
    bounds: µs, shape (layouts,).
    """
    impossible = np.zeros(len(rows), np.bool_)
    scratch = np.zeros(scratch_size(rows), np.int64)
    for i in range(len(rows)):
        most = rows[i].serial
        x = most if bounds[i] < 0 or bounds[i] > most else bounds[i] - 1
        impossible[i] = not possible(rows[i], x, scratch)
    return impossible
