"""Whether the microbatches of a step differ only by their number."""

from __future__ import annotations

import numpy as np

from .tables import Bools, Edges, Ints, Passes


def microbatches_alike(passes: Passes, edges: Edges, lanes: list[Ints], in_microbatch: Bools) -> bool:
    """Whether the passes of each lane differ only by their microbatch: they take equally long, and an edge from one of them
    to a pass of its microbatch has its like, of the same lag, bytes and pool, at every other one.

    Then any schedule can have its lanes sorted: the k-th pass of a lane to start becomes that of the k-th microbatch, no
    pass waits longer, and ranks hold what they held. So some best schedule runs its lanes in order. Edges between
    microbatches, and those of passes that belong to none (updates, gathers), count for nothing here: builders write them
    for that order. But passes of free kinds (see `kinds.Kind`) go along with all of a lane, or with none.
    """
    lane, length = np.empty(len(passes), np.int64), np.array([len(rows) for rows in lanes])
    if length.max(initial=0) <= 1:
        return True
    for at, rows in enumerate(lanes):
        lane[rows] = at
    for column in (passes.duration, passes.streams):
        if any((column[rows] != column[rows[0]]).any() for rows in lanes if in_microbatch[rows[0]]):
            return False
    a, b, number = edges.before, edges.after, passes.microbatch[edges.before]
    for free, other in ((a, b), (b, a)):
        one = np.flatnonzero(passes.that(free=True)[free] & in_microbatch[other] & (edges.bytes == 0))
        met, count = np.unique(free[one] * len(lanes) + lane[other[one]], return_counts=True)
        if (count != length[met % len(lanes)]).any():
            return False
    within = np.flatnonzero(in_microbatch[a] & in_microbatch[b] & (number == passes.microbatch[b]))
    pair = lane[a[within]] * len(lanes) + lane[b[within]]
    order = np.lexsort((edges.pool[within], edges.bytes[within], edges.lag[within], number[within], pair))
    for rows in np.split(within[order], np.flatnonzero(np.diff(pair[order])) + 1):
        if len(rows) and not _alike(edges, number, rows, set(length[lane[[a[rows[0]], b[rows[0]]]]].tolist())):
            return False
    return True


def _alike(edges: Edges, number: Ints, rows: Ints, lengths: set[int]) -> bool:
    """Whether every microbatch has the same edges between two lanes. rows: of those edges, by microbatch, lag, bytes and
    pool; number: the microbatch of every edge; lengths: of the lanes."""
    most = max(lengths)
    if len(lengths) > 1 or len(rows) % most:
        return False
    table = rows.reshape(most, -1)
    same = np.all([one[table] == one[table[0]] for one in (edges.lag, edges.bytes, edges.pool)], axis=0)
    return bool(same.all() and (number[table] == number[table[:, :1]]).all())
