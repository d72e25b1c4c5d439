"""What a `Problem` must keep: columns that belong together, nothing negative, sums that can be counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .kinds import KINDS
from .tables import WHOLE, Edges, Ints, Passes, Pool, Slowdown
from .util.errors import BadInput

MAX_FACTOR = 1000.0
EXACT = 2.0**53  # µs of all passes and lags, and bytes of one pass, are below: there sums of floats are whole numbers
MAX_SUM = 2.0**62  # bytes of all edges, so that sums are whole numbers of 64 bits


def check_tables(passes: Passes, edges: Edges, pools: Sequence[Pool]) -> None:
    """Raises BadInput, naming column, pass, pool or edge: where the tables are none; where passes or pools have no name of
    their own; and where all times, or all bytes, together do not fit into 64 bits."""
    _check_passes(passes)
    names = [one.name for one in pools]
    for i, one in enumerate(pools):
        if not one.name or one.name in names[:i]:
            raise BadInput(f"pool {i}: '{one.name}' is no name of its own")
        if one.capacity is not None and one.capacity < 0:
            raise BadInput(f"pool {one.name}: its capacity is negative ({one.capacity})")
    if len(edges):
        _check_edges(edges, passes, len(pools))
    for what, columns, most in (("times", (passes.duration, edges.lag), EXACT), ("bytes", (edges.bytes,), MAX_SUM)):
        if sum(float(column.sum(dtype=np.float64)) for column in columns) >= most:
            raise BadInput(f"problem: its {what} add up to more than zbsolve can count")
    if max(np.bincount(end, edges.bytes, 1).max() for end in (edges.before, edges.after)) >= EXACT:
        raise BadInput("problem: a pass takes or frees more bytes than zbsolve can count")


def _check_passes(passes: Passes) -> None:
    if len(passes) == 0:
        raise BadInput("problem: no passes")
    for what in ("stage", "microbatch", "slice", "rank", "duration", "streams"):
        column = getattr(passes, what)
        if len(column) != len(passes):
            raise BadInput(f"problem: column '{what}' has {len(column)} rows, not {len(passes)}")
        if column.min() < 0:
            worst = int(column.argmin())
            raise BadInput(f"pass {passes[worst].name}: {what} is negative ({column[worst]})")
    if passes.kind.min() < 0 or passes.kind.max() >= len(KINDS):
        raise BadInput("problem: column 'kind' names an unknown kind")
    if passes.streams.max() >= len(passes.stream_sets):
        raise BadInput("problem: column 'streams' points outside its table")
    if not _all_differ(passes.kind, passes.stage, passes.microbatch, passes.slice):
        seen: set[str] = set()
        double = next(one.name for one in passes if one.name in seen or seen.add(one.name))  # type: ignore[func-returns-value]
        raise BadInput(f"pass {double}: named twice in the problem")


def _check_edges(edges: Edges, passes: Passes, pools: int) -> None:
    """Raises BadInput, naming the edge, for edges that point to no pass or pool, have a negative field, send longer than
    their pass takes, or hold device memory between two ranks."""
    ends = np.concatenate([edges.before, edges.after])
    if ends.min() < 0 or ends.max() >= len(passes):
        raise BadInput("problem: an edge points outside the table of passes")

    def name(row: int) -> str:
        return f"edge {passes[int(edges.before[row])].name} → {passes[int(edges.after[row])].name}"

    for what in ("lag", "bytes", "sent"):
        column = getattr(edges, what)
        if column.min() < 0:
            raise BadInput(f"{name(int(column.argmin()))}: {what} is negative")
    sending = np.bincount(edges.before, edges.sent, len(passes)).astype(np.int64)
    if (over := np.flatnonzero(sending > passes.duration)).size:
        i = int(over[0])
        raise BadInput(f"pass {passes[i].name}: sends for {sending[i]} µs of its {passes.duration[i]} µs")
    if edges.pool.min() < 0 or edges.pool.max() > pools:
        i = int(np.flatnonzero((edges.pool < 0) | (edges.pool > pools))[0])
        raise BadInput(f"{name(i)}: there is no pool {edges.pool[i]} beside the devices ({pools} are)")
    apart = passes.rank[edges.before] != passes.rank[edges.after]
    if (bad := np.flatnonzero((edges.bytes > 0) & (edges.pool == 0) & apart)).size:
        raise BadInput(f"{name(int(bad[0]))}: bytes on an edge between two ranks")


def check_slowdowns(slowdowns: Sequence[Slowdown], times: float = 0.0) -> None:
    """Raises BadInput for unknown kinds, two factors of one pair, and factors that are not 1 to 1000. times: all passes'."""
    seen = set[tuple[str, str]]()
    for one in slowdowns:
        said, pair = f"slowdown of {one.kind[:20]} beside {one.beside[:20]}", (one.kind, one.beside)
        if unknown := [kind for kind in pair if kind not in KINDS]:
            raise BadInput(f"{said}: there is no kind '{unknown[0][:20]}'")
        if pair in seen:
            raise BadInput(f"{said}: said twice")
        if not 1 <= one.factor <= MAX_FACTOR:
            raise BadInput(f"{said}: {one.factor:g} is not from 1 to {MAX_FACTOR:g}")
        seen.add(pair)
    if slowdowns and times * WHOLE > MAX_SUM:
        raise BadInput("problem: its times add up to more than zbsolve can count where passes slow each other")


def check_capacity(capacity: Sequence[int] | None, ranks: int) -> None:
    """Raises BadInput for a capacity that does not name every rank, or is negative."""
    if capacity is None:
        return
    if len(capacity) != ranks:
        raise BadInput(f"capacity: {len(capacity)} values for {ranks} ranks")
    if min(capacity) < 0:
        raise BadInput(f"capacity: rank {int(np.argmin(capacity))} is negative ({min(capacity)})")


def check_notes(lengths: Sequence[float], slices: int, counts: Sequence[int], layers: Sequence[int]) -> None:
    """Raises BadInput for lengths that do not name every slice, or are no numbers above 0; and for counts of layers that are
    made again that are not of every stage's."""
    if lengths and (len(lengths) < slices or not all(math.isfinite(one) and one > 0 for one in lengths)):
        raise BadInput(f"problem: slice_lengths {list(lengths)}: {slices} numbers above 0 are needed")
    if counts and (len(counts) != len(layers) or not all(0 <= n <= of for n, of in zip(counts, layers, strict=True))):
        raise BadInput(f"problem: recomputed {list(counts)} are not from 0 to the layers of each stage, {list(layers)}")


def _all_differ(*columns: Ints) -> bool:
    """Whether no two rows are alike; columns of whole numbers from 0 up, shape (rows,) each."""
    widths = [int(column.max()) + 1 for column in columns]
    if math.prod(widths) >= 2**62:
        return len(set(zip(*(column.tolist() for column in columns), strict=True))) == len(columns[0])
    key = np.zeros(len(columns[0]), np.int64)
    for column, width in zip(columns, widths, strict=True):
        key = key * width + column
    key.sort()  # np.unique's hashing takes ten times as long where keys are dense
    return bool((np.diff(key) > 0).all())
