"""A few ranks of a problem, all others replaced by lags: a smaller problem whose optimum no schedule undercuts."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from ..problem import KINDS, Edges, Ints, Passes, Problem
from .arcs import NOWHERE, arcs, ends, starts


def relax(problem: Problem, ranks: Sequence[int]) -> Problem:
    """The passes, streams and memory of `ranks` alone. Between two of their passes lies the longest path through others;
    before and after lie heads and tails, written as edges from a first and to a last pass without length on a rank of
    their own. The value of every schedule of `problem` is that of some schedule of this one, or more.

    For the span of one rank its first start is the first pass and its last end the last: the makespan of this problem.
    For the span of several ranks there are no heads and tails.
    """
    keep = np.isin(problem.passes.rank, np.array(ranks))
    mine = np.flatnonzero(keep).astype(np.int64)
    ends = problem.objective == "makespan" or len(ranks) == 1
    before, after, lag = _lags(problem, mine)
    place = np.full(len(keep), -1, np.int64)
    place[mine] = np.arange(len(mine))
    edges = problem.edges
    own = np.flatnonzero(keep[edges.before] & keep[edges.after])
    columns = [
        (place[before], place[after], lag, np.zeros(len(lag), np.int64)),
        (place[edges.before[own]], place[edges.after[own]], edges.lag[own], edges.bytes[own]),
    ]
    first, last = len(mine), len(mine) + 1
    if ends:
        head, tail = heads_and_tails(problem, mine)
        zero = np.zeros(len(mine), np.int64)
        columns += [
            (zero + first, np.arange(len(mine)), head, zero),
            (np.arange(len(mine)), zero + last, tail, zero),
        ]
    return Problem(
        _table(problem, list(ranks), mine, ends),
        Edges(*(np.concatenate([column[i] for column in columns]).astype(np.int64) for i in range(4))),
        None if problem.capacity is None else (*(problem.capacity[r] for r in ranks), *([0] if ends else [])),
        "makespan" if ends else "span",
    )


def heads_and_tails(problem: Problem, mine: Ints) -> tuple[Ints, Ints]:
    """Least time before each start and after each end of passes of one rank, µs: from the step's begin and to its end for
    the makespan, from the rank's first start and to its last end for the span."""
    a = arcs(problem)
    if problem.objective == "makespan":
        return a.depth[mine], a.after[mine]
    begin = np.full(len(problem.passes), NOWHERE, np.int64)
    begin[mine] = 0
    return starts(problem, a, begin)[mine], ends(problem, a, begin)[mine]


def _table(problem: Problem, ranks: list[int], mine: Ints, ends: bool) -> Passes:
    """The rows of `mine`, ranks renumbered; and with `ends` a first and a last pass without length."""
    passes = problem.passes
    number = np.zeros(problem.ranks, np.int64)
    number[ranks] = np.arange(len(ranks))
    sets, streams = np.unique(passes.streams[mine], return_inverse=True)
    more = [0, 0] if ends else []
    new_set = len(sets)

    def column(values: Ints, extra: Sequence[int]) -> Ints:
        return np.concatenate([values, np.array(extra, np.int64)]).astype(np.int64)

    return Passes(
        kind=column(passes.kind[mine], [KINDS.index("C"), KINDS.index("U")] if ends else []),
        stage=column(passes.stage[mine], [int(passes.stage.max()) + 1] * len(more)),
        microbatch=column(passes.microbatch[mine], more),
        slice=column(passes.slice[mine], more),
        rank=column(number[passes.rank[mine]], [len(ranks)] * len(more)),
        duration=column(passes.duration[mine], more),
        streams=column(streams.ravel(), [new_set] * len(more)),
        stream_sets=(*(passes.stream_sets[s] for s in sets.tolist()), *([("ends",)] if ends else [])),
    )


def _lags(problem: Problem, mine: Ints) -> tuple[Ints, Ints, Ints]:
    """Arcs (before, after, lag) between kept passes, less what follows from other arcs."""
    far = lags_within(problem, mine)
    before, after = np.nonzero(_needed(far, problem.passes.duration[mine]))
    return mine[before], mine[after], far[before, after]


def lags_within(problem: Problem, mine: Ints) -> Ints:
    """The least time from each pass's end to each other's start, µs; NOWHERE where nothing leads from one to the other.
    Machines of the kept lanes are left to the relaxed problem itself."""
    a = arcs(problem)
    own = np.zeros(len(a.length), bool)
    own[a.lane[mine]] = True
    fan = np.where(own, 0, np.diff(a.mate_first))
    inside = np.repeat(own, np.diff(a.mate_first))
    others = a._replace(mate_first=np.concatenate([[0], np.cumsum(fan)]).astype(np.int64), mates=a.mates[~inside])
    far = np.full((len(mine), len(mine)), NOWHERE, np.int64)
    begin = np.full(len(problem.passes), NOWHERE, np.int64)
    for row, i in enumerate(mine.tolist()):
        begin[i] = 0
        reached = starts(problem, others, begin)[mine]
        far[row] = np.where(reached > NOWHERE, reached - problem.passes.duration[i], NOWHERE)
        far[row, row] = begin[i] = NOWHERE
    return far


@numba.njit(cache=True, nogil=True)
def _needed(far, duration):  # type: ignore[no-untyped-def]
    """Which lags do not follow from two others by way of a pass in between."""
    n = len(far)
    needed = far > NOWHERE
    for i in range(n):
        for k in range(n):
            if far[i, k] > NOWHERE:
                via = far[i, k] + duration[k]
                for j in range(n):
                    if far[k, j] > NOWHERE and via + far[k, j] >= far[i, j]:
                        needed[i, j] = False
    return needed
