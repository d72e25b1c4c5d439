"""Closed forms for very many microbatches, from the step of one: they take as long for 8 microbatches as for 8 million.

All microbatches are alike, and wait for nothing but passes of their own. Lanes may be taken to run in order (see
`Problem.alike`). So paths within one microbatch give the least start of the first one's passes, and the least
time behind the last one's; both hold whatever the others do. A lane's first pass is the first microbatch's, and its last one
the last one's. So the closed forms of single ranks need no others:

* a rank works count · work, and is idle for what `unavoidable_idle` says before and after;
* what edges hold of a rank's memory, bytes times their least time (the longest path between their ends), is count times that
  of one microbatch, and must fit under the capacity. Until the j-th microbatch's pass can start, j passes of its lane before
  it have ended: so memory fills no faster, and empties no faster, which costs at both ends.

Idle time of two ranks together rests on paths within one microbatch alone, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...build.mixing import with_microbatches
from ...problem import Ints, Problem
from ...util.errors import BadInput
from .bound import AREA, BUSIEST, IDLE, WORK, Bound, rounded_up, value_unit
from .energy import Stays, energy_of, least_lifespans
from .idle_time import IdleTerms, RankWindow, idle_terms, unavoidable_idle
from .necessary_arcs import WHOLE_STEP, heads_and_tails
from .two_ends import idle_of_two


def bound_of_many(problem: Problem, count: int) -> Bound:
    """The best closed form of a step of `count` microbatches that are all like the only one of `problem`. Raises BadInput
    where passes share streams or collectives, or bytes lie off the devices."""
    check_plain(problem)
    unit = value_unit(problem)  # divides every value
    return max((rounded_up(bound, unit) for bound in _forms(problem, count)), key=lambda bound: bound.value)


def repeated_microbatch(problem: Problem) -> Problem | None:
    """The step of one microbatch that `problem` is several times, but for passes of the step as a whole that nothing waits
    for (exchanges of gradients): its bounds hold without those. None where it is not, or has what `bound_of_many` does not
    know."""
    step = without_last(problem)
    first = step.head(1)
    try:
        check_plain(first)
        return first if with_microbatches(first, step.microbatches) == step else None
    except BadInput:
        return None


def without_last(problem: Problem) -> Problem:
    """The problem without passes of no microbatch that take no compute stream and that nothing waits for."""
    waited = np.bincount(problem.edges.before, minlength=len(problem.passes)) > 0
    last = ~problem.in_microbatch & ~problem.computing & ~waited
    return problem.only(np.flatnonzero(~last)) if last.any() else problem


def check_plain(problem: Problem) -> None:
    """Raise BadInput for a step that is none of one microbatch with one stream a rank, all memory on devices and times above
    0: no more is known of many microbatches then."""
    p = problem.passes
    wrong = {
        "is not one of a single microbatch": problem.microbatches != 1 or not problem.in_microbatch.all(),
        "has several streams on a rank": len(problem.streams) != problem.ranks or len(problem.side_stream) > 0,
        "has memory beside the devices": len(problem.pools) > 0,
        "has collectives": bool((problem.collective >= 0).any()),
        "has a pass that takes no time": int(p.duration.min()) == 0,
    }
    for why, there in wrong.items():
        if there:
            raise BadInput(f"many microbatches: the step {why}")


def _forms(step: Problem, count: int) -> Iterator[Bound]:
    """The work of the busiest rank; for the span the windows of the first rank, the last and the busiest, else the step."""
    p = step.passes
    work = np.bincount(p.rank, p.duration, step.ranks).astype(np.int64)
    yield Bound(count * int(work.max()), BUSIEST, WORK)
    rows = [np.flatnonzero(p.rank == rank) for rank in range(step.ranks)]
    room = step.room.tolist()
    terms = [idle_terms(step, rows[rank], room[rank], count) for rank in range(step.ranks)]
    stays = _stays(step) if step.capacity is not None else []
    windows = [WHOLE_STEP] if step.objective == "makespan" else list(dict.fromkeys([0, step.ranks - 1, int(work.argmax())]))
    for whose in windows:
        head, tail = heads_and_tails(step, whose)
        for rank in range(step.ranks) if whose < 0 else (whose,):
            yield _idle(rank, count * int(work[rank]), terms[rank], RankWindow(head[rows[rank]], tail[rows[rank]]))
        for rank, stay in enumerate(stays):
            if whose in (-1, rank) and len(stay.size) and room[rank] > 0:
                yield _energy(rank, stay, room[rank], count, (head, tail, p.duration))
    yield from idle_of_two(step, count)


def _idle(rank: int, work: int, terms: IdleTerms, window: RankWindow) -> Bound:
    """A rank's work, and what it must be idle before and after."""
    first, last = unavoidable_idle(terms, window)
    proof = f"rank {rank}: {work} µs of work, and no order avoids {first} µs idle before or {last} µs idle after"
    return Bound(work + first + last, f"{proof}, whatever the number of microbatches", IDLE, (rank,))


def _energy(rank: int, stays: Stays, room: int, count: int, times: tuple[Ints, Ints, Ints]) -> Bound:
    """Bytes times the least time that they are held, of all microbatches, and what is lost while memory fills and empties.

    A window of T µs holds T · room less both losses at most, where filling and emptying do not overlap in it. times: heads,
    tails and durations of one microbatch's passes, µs."""
    head, tail, duration = times
    need = energy_of(stays.size, stays.span, room)
    most = need.most * need.unit
    if most == 0:
        return Bound(0, "nothing", AREA, (rank,))
    energy = count * sum(size * span for size, span in zip(stays.size.tolist(), stays.span.tolist(), strict=True))
    value = -(-energy // most)
    if count * sum(stays.size.tolist()) >= most:
        filling, risen = _lost(head[stays.first], duration[stays.first], stays.size, most, count)
        emptying, fallen = _lost(tail[stays.last], duration[stays.last], stays.size, most, count)
        both = -(-(energy + filling + emptying) // most)
        value = both if both > risen + fallen else value
    proof = f"rank {rank}: what passes hold there, for as long as they must hold it, does not fit {room} bytes sooner"
    return Bound(value, proof, AREA, (rank,))


def _lost(first: Ints, each: Ints, size: Ints, most: int, count: int) -> tuple[int, int]:
    """Byte·µs by which memory of `most` bytes is not full at least, where edge e's j-th microbatch of `count` comes first[e]
    + j · each[e] µs after the window's end or later, with size[e] bytes; and when it can be full, µs.

    All bytes together reach `most`. Sums of what comes at even distances are in closed form: an edge may hold a byte."""
    begin, apart, size = (column.astype(object) for column in (first, each, size))  # whole numbers of any length

    def come(at: int) -> Any:
        return np.clip((at - begin) // apart + 1, 0, count)

    full = bisect_left(range(max(begin + apart * count)), most, key=lambda at: (come(at) * size).sum())
    number = come(full)
    return most * full - (size * (number * (full - begin) - apart * (number * (number - 1) // 2))).sum(), full


def _stays(problem: Problem) -> list[Stays]:
    """What one microbatch holds of each rank's memory."""
    e = problem.edges
    rows = np.flatnonzero(problem.device_bytes > 0)
    spans, rank = least_lifespans(problem, rows), problem.passes.rank[e.before[rows]]
    columns = e.before[rows], e.after[rows], e.bytes[rows], spans
    return [Stays(*(column[rank == one_rank] for column in columns)) for one_rank in range(problem.ranks)]
