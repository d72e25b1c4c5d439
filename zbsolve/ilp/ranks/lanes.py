"""The relaxation that a search over ranks works on: it keeps the lanes of one or a few ranks, and turns all other ranks into
lags. Also the groups of ranks that searches are for.

The ranks' passes keep their streams, memory, heads and tails. Other ranks become lags from pass j of one lane to pass j of
another. All other lags are left out, and where microbatches differ the least lag counts. Both only relax the problem, so a
window that these lanes refute is refuted for the whole problem.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import UNLIMITED, Ints, Problem
from ...schedule.timeline import Floats
from ..bounds.bound import GROUP_KINDS, OWN_WINDOWS, SEARCHED_RANKS, WINDOW_KINDS, Bound, rank_names, serial_length
from ..bounds.energy import paths_within
from ..bounds.memory_arcs import INFINITE, bytes_within, held_beside
from ..bounds.necessary_arcs import heads_and_tails
from ..bounds.path_walks import NO_PATH

WINDOW_BEGIN = 1 << 28  # µs: when a further window begins on its own clock (see `Windows`)


class Windows(NamedTuple):
    """The windows of further ranks, for the span. Each one is as long as the first, on its own clock.

    The clock shows `WINDOW_BEGIN` when the window begins. A pass to which no path leads from there has the head 0, which is
    earlier. Tails, µs, lead from a pass's end on that clock to the window's end. One row for each window; else as `Lanes`.
    """

    head: Ints
    tail: Ints
    slack: Ints
    end_energy: Floats


class Lanes(NamedTuple):
    """The lanes of some ranks, all of one length, in a topological order. Times in µs, memory in bytes.

    For each lane: rank, as an index among these ranks; duration; taken and freed.
    For each rank: capacity; slack, how much later than the window the rank may end.
    Shape (lanes, microbatches): head and tail, the least time before a pass starts and after it ends.
    Shape (lanes, lanes): lag, from the end of pass j of one lane to the start of pass j of the other (−1: nothing leads
      there, or the lag follows from two others).
    Shape (n, 4): held, rows of (lane that takes, lane that frees, bytes, least time held).
    Shape (ranks, n, 3): end_energy, for each rank rows of (time before the window's end; byte·µs that the rank can hold from
      then to the end; bytes that it can hold just before then).
    windows: those of further ranks, which must fit as well.
    """

    rank: Ints
    duration: Ints
    taken: Ints
    freed: Ints
    capacity: Ints
    slack: Ints
    head: Ints
    tail: Ints
    lag: Ints
    held: Ints
    end_energy: Floats
    windows: Windows


def lanes_of(
    problem: Problem, ranks: tuple[int, ...], lean: bool = False, whose: int = -1, own: bool = False
) -> Lanes | None:
    """The lanes of `ranks`; lanes on side streams count as lags only.

    None where lanes differ in length, where passes of a lane differ in duration or bytes, and where a rank has several other
    streams or unlimited memory. Bytes that side streams hold whenever a pass takes memory are subtracted from the capacity;
    their other bytes are ignored. whose: the rank whose window it is, for the span (−1: the first of `ranks`); it need not
    be among them. The ranks may begin and end outside that window, and must depend on its first start. own: their own
    windows must fit too. lean: ranks after the first lack the passes of `left_out`; bytes that only these free are ignored.
    """
    a = arrays_of(problem)
    capacity = a.capacity[list(ranks)]
    if capacity.max() >= UNLIMITED:
        return None
    capacity = np.maximum(0, capacity - held_beside(problem).held[list(ranks)])
    kept = np.isin(problem.passes.rank, ranks) & problem.computing
    if lean:
        kept[left_out(problem, ranks)] = False
    rows_of = sorted((rows for rows in problem.lanes if kept[rows[0]]), key=lambda rows: int(a.depth[rows[0]]))
    if len({len(rows) for rows in rows_of}) > 1 or len(rows_of) <= 1:
        return None
    passes = np.sort(np.concatenate(rows_of))
    used = {problem.passes.stream_sets[s] for s in np.unique(problem.passes.streams[passes]).tolist()}
    if len(used) != len(ranks) or max(map(len, used)) > 1:
        return None
    table = np.stack(rows_of)
    columns = [column[table] for column in (a.duration, *bytes_within(problem, passes))]
    if any((column != column[:, :1]).any() for column in columns):
        return None
    duration, taken, freed = (column[:, 0].copy() for column in columns)  # kernels are compiled for contiguous arrays only
    whose = ranks[0] if whose < 0 else whose
    head, tail = (column[passes] for column in heads_and_tails(problem, whose))
    if head.min() < 0:
        return None
    place = np.searchsorted(passes, table)
    inside = np.array([problem.objective == "makespan" or r == whose for r in ranks])
    lag = _lags(problem, table, duration)
    held = _held(problem, table, duration, lag)
    end_energy = np.stack([_end_energy(problem, passes, tail, rank) for rank in ranks])
    _thin(lag, duration)
    rank_of = np.array([ranks.index(int(a.rank[rows[0]])) for rows in rows_of], np.int64)
    slack = np.where(inside, 0, INFINITE)
    counts = own and problem.objective == "span" and serial_length(problem) < WINDOW_BEGIN
    windows = _windows(problem, ranks, [r for r in ranks if r != whose and counts], passes, place)
    return Lanes(rank_of, duration, taken, freed, capacity, slack, head[place], tail[place], lag, held, end_energy, windows)


def _windows(problem: Problem, ranks: tuple[int, ...], whose: list[int], rows: Ints, place: Ints) -> Windows:
    """The windows of the ranks `whose`, which are among `ranks`. rows: the passes of `ranks` on their own streams; place:
    shape (lanes, microbatches), where each lane's passes are among those."""
    if not whose:
        return no_windows(place.shape, len(ranks))
    times = [[column[rows] for column in heads_and_tails(problem, rank)] for rank in whose]
    head, tail = (np.stack([pair[i] for pair in times]) for i in (0, 1))
    return Windows(  # contiguous, as kernels are compiled for one layout
        np.where(head > NO_PATH, WINDOW_BEGIN + head, 0).take(place, axis=1),
        np.where(tail > NO_PATH, tail - WINDOW_BEGIN, NO_PATH).take(place, axis=1),
        np.array([[WINDOW_BEGIN if rank == own else INFINITE for rank in ranks] for own in whose]),
        np.stack([[_end_energy(problem, rows, row, rank) for rank in ranks] for row in tail]),
    )


def no_windows(shape: tuple[int, ...], ranks: int) -> Windows:
    """No further windows, for lanes and microbatches of this shape."""
    times = np.zeros((0, *shape), np.int64)
    return Windows(times, times, np.zeros((0, ranks), np.int64), np.zeros((0, ranks, 1, 3)))


def left_out(problem: Problem, ranks: tuple[int, ...]) -> Ints:
    """Rows of the passes that the lean relaxation of `ranks` leaves out: each lane of all ranks but the first that no pass
    on a compute stream waits for and that takes no memory."""
    a, e = arrays_of(problem), problem.edges
    awaited = np.bincount(e.before[problem.computing[e.after]], minlength=len(problem.passes)) > 0
    dropped = [np.zeros(0, np.int64)]
    for rows in (rows for rows in problem.lanes if int(a.rank[rows[0]]) in ranks[1:]):
        if not awaited[rows].any() and not a.taken[rows].any():
            dropped.append(np.setdiff1d(rows, problem.side_stream))
    return np.concatenate(dropped)


def _thin(lag: Ints, duration: Ints) -> None:
    """Remove the lags that follow from two others, in place."""
    for k in range(1, len(lag) - 1):
        into, out, across = lag[:k, k, None], lag[k, k + 1 :], lag[:k, k + 1 :]
        across[(into >= 0) & (out >= 0) & (into + duration[k] + out >= across)] = -1


def _lags(problem: Problem, table: Ints, duration: Ints) -> Ints:
    """The least time, µs, from the end of pass j of a lane to the start of pass j of a later one, for every j; −1: none.

    table: the lanes' rows, shape (lanes, microbatches).
    """
    pairs = [(a, b) for a in range(len(table)) for b in range(a + 1, len(table))]
    before, after = (np.concatenate([table[pair[i]] for pair in pairs]) for i in range(2))
    spans = paths_within(problem, before, after).reshape(len(pairs), -1).min(axis=1)
    lag = np.full((len(table), len(table)), -1, np.int64)
    for (a, b), span in zip(pairs, spans.tolist(), strict=True):
        lag[a, b] = max(-1, span - int(duration[a] + duration[b]))
    return lag


def _held(problem: Problem, table: Ints, duration: Ints, lag: Ints) -> Ints:
    """Rows of (lane that takes, lane that frees, bytes, least time held) of edges within a microbatch."""
    edges = problem.edges
    lane = np.full(len(problem.passes), -1, np.int64)
    place = np.full(len(problem.passes), -1, np.int64)
    for number, rows in enumerate(table):
        lane[rows], place[rows] = number, np.arange(len(rows))
    rows = np.flatnonzero(
        (problem.device_bytes > 0) & (lane[edges.before] >= 0) & (place[edges.before] == place[edges.after])
    )
    sizes: dict[tuple[int, int], Ints] = {}
    for e in rows.tolist():
        key = int(lane[edges.before[e]]), int(lane[edges.after[e]])
        sizes.setdefault(key, np.zeros(table.shape[1], np.int64))[place[edges.before[e]]] += edges.bytes[e]
    rows_of = [(a, b, int(size.min()), int(duration[a] + duration[b] + max(0, lag[a, b]))) for (a, b), size in sizes.items()]
    return np.array(rows_of, np.int64).reshape(-1, 4)


def _end_energy(problem: Problem, passes: Ints, tail: Ints, rank: int) -> Floats:
    """The rows of `Lanes.end_energy` of a rank, as many for every rank. tail: µs, of `passes`. An edge can hold its bytes
    only until its second pass ends."""
    edges = problem.edges
    rows = np.flatnonzero((problem.device_bytes > 0) & np.isin(edges.before, passes) & np.isin(edges.after, passes))
    here = problem.passes.rank[edges.before[rows]] == rank
    time = np.maximum(tail[np.searchsorted(passes, edges.after[rows])], 0)
    order = np.argsort(time, kind="stable")
    level = np.minimum(int(arrays_of(problem).capacity[rank]), np.cumsum(np.where(here, edges.bytes[rows], 0)[order]))
    when = np.concatenate([[0], time[order]])
    levels = np.concatenate([[0], level])
    energy = np.concatenate([[0.0], np.cumsum(np.diff(when) * levels[:-1].astype(float))])
    return np.stack([when.astype(float), energy, levels.astype(float)], axis=1)


MAX_LEAN_RANKS, MAX_WHOLE_RANKS = 8, 4  # ranks of a group at most


class Group(NamedTuple):
    """Ranks that a search keeps; all others are lags.

    lean: only the first keeps all its passes (see `left_out`). whose: the rank whose span the window is, if that is not the
    first of them; −1: the first of them, or the window is the makespan. own: each rank has its own window, for the span.
    """

    ranks: tuple[int, ...]
    lean: bool = False
    whose: int = -1
    own: bool = False


def group_of(problem: Problem, bound: Bound) -> Group:
    """The group that a bound keeps, in the window that it is about. Where a bound on the span has two ranks or more, its
    first rank only gives the window, if it comes from a closed form or its kind is one of `WINDOW_KINDS`."""
    lean = bound.kind in (GROUP_KINDS[True], WINDOW_KINDS[True])
    if bound.kind == OWN_WINDOWS:
        return Group(bound.ranks, own=True)
    searched = bound.kind in SEARCHED_RANKS
    whole = len(bound.ranks) < 2 or (bound.kind in GROUP_KINDS if searched else problem.objective == "makespan")
    return Group(bound.ranks, lean) if whole else Group(bound.ranks[1:], lean, bound.ranks[0])


def group_bound(problem: Problem, group: Group, value: int) -> Bound:
    """The bound that no order of the group's passes fits `value` − 1 µs, with a proof that says what is left out."""
    ranks, lean, whose, own = group
    window = ", each in its window" if own else "" if whose < 0 else f" in the window of rank {whose}"
    of = "their" if len(ranks) > 1 else "its"
    proof = f"{rank_names(ranks)}{window}: no order of {of} passes fits {value - 1} µs, whatever other ranks do"
    missing = len(left_out(problem, ranks)) if lean else 0
    if missing:
        proof += (
            f"; left out: {missing} passes of {rank_names(ranks[1:])} in lanes that no compute waits for and that take no "
            "memory, and the bytes that these passes free"
        )
    beside = int(np.isin(problem.passes.rank[problem.side_stream], ranks).sum())
    if beside:
        proof += (
            f"; {beside} passes on side streams there are delays alone, and what they hold counts where it is always held"
        )
    if own or whose < 0:
        return Bound(value, proof, OWN_WINDOWS if own else GROUP_KINDS[lean], ranks)
    return Bound(value, proof, WINDOW_KINDS[lean], (whose, *ranks))


def grown(problem: Problem, root: Group, size: int) -> list[Group]:
    """Groups of `size` ranks: the root's first ones, filled up with others if those are too few, and in the last place each
    further rank. Neighbours of the rank before it come first, since queues between ranks matter most there."""
    others = [rank for rank in range(problem.ranks) if rank not in root.ranks]
    kept = (*root.ranks, *others)[: size - 1]
    near = sorted((rank for rank in range(problem.ranks) if rank not in kept), key=lambda rank: abs(rank - kept[-1]))
    return [root._replace(ranks=(*kept, other)) for other in near]


def in_own_windows(group: Group) -> Group:
    """At most two ranks, each in its window, with which a search for the span begins: first that of the group's window."""
    ranks = group.ranks if group.whose < 0 else tuple(dict.fromkeys((group.whose, *group.ranks)))
    return Group(ranks[:2], own=True)


def all_ranks(problem: Problem, firsts: list[Group]) -> list[Group]:
    """Groups of all ranks, if few: a lean one for each given group, with its first rank and window; then one not lean."""
    if problem.ranks > MAX_LEAN_RANKS:
        return []
    groups = [
        Group((first.ranks[0], *(rank for rank in range(problem.ranks) if rank != first.ranks[0])), True, first.whose)
        for first in firsts
    ]
    return [*dict.fromkeys(groups), groups[0]._replace(lean=False)]
