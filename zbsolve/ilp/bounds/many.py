"""Closed forms for very many microbatches from the step of one: 8 million take as long as 8.

All microbatches are alike and wait only for passes of their own. Lanes can be assumed to run in order (see `Problem.alike`).
So paths within one microbatch give the least start of the first microbatch's passes, and the least time behind the last
one's, whatever the others do. The first and the last pass of a lane belong to the first and the last microbatch. So closed
forms of single ranks need no other microbatches:

* A rank works count · work, and is idle before and after as `unavoidable_idle` tells.
* The energy of a rank's memory, bytes times the least time that they are held (the longest path between an edge's ends), is
  count times that of one microbatch, and must fit under the capacity. Before the j-th microbatch's pass can start, j passes
  of its lane have ended: so memory cannot fill or empty faster, which costs time at both ends.

Idle time of two ranks together needs paths within one microbatch only, too.
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
from .energy import HELD, WHOLE_ONES, Stays, energy_of, least_lifespans
from .idle_time import IdleTerms, RankWindow, idle_terms, unavoidable_idle
from .memory_states import best_prices
from .necessary_arcs import WHOLE_STEP, heads_and_tails
from .two_ends import idle_of_two


def bound_of_many(problem: Problem, count: int) -> Bound:
    """The best closed form of a step of `count` equal microbatches. problem: the step of one. Raises BadInput for several
    streams on a rank, collectives, or bytes beside the devices."""
    check_plain(problem)
    unit = value_unit(problem)  # divides every value
    return max((rounded_up(bound, unit) for bound in _forms(problem, count)), key=lambda bound: bound.value)


def repeated_microbatch(problem: Problem) -> Problem | None:
    """The step of one microbatch of which `problem` is a multiple, or None. Passes of the step for which nothing waits (such
    as exchanges of gradients) are ignored: bounds without them hold too. None also if `check_plain` refuses the step."""
    step = without_last(problem)
    try:
        check_plain(first := step.head(1))
        return first if with_microbatches(first, step.microbatches) == step else None
    except BadInput:
        return None


def without_last(problem: Problem) -> Problem:
    """The problem without side passes that belong to no microbatch and for which nothing waits."""
    waited = np.bincount(problem.edges.before, minlength=len(problem.passes)) > 0
    last = ~problem.in_microbatch & ~problem.computing & ~waited
    return problem.only(np.flatnonzero(~last)) if last.any() else problem


def check_plain(problem: Problem) -> None:
    """Raise BadInput unless this is a step of one microbatch with one stream a rank, all memory on devices, no collectives,
    and durations above 0."""
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
    """All closed forms: of the makespan in the whole step, of the span in windows of the first, last and busiest rank."""
    p = step.passes
    work = np.bincount(p.rank, p.duration, step.ranks).astype(np.int64)
    yield Bound(count * int(work.max()), BUSIEST, WORK)
    rows = [np.flatnonzero(p.rank == rank) for rank in range(step.ranks)]
    room = step.room.tolist()
    terms = [idle_terms(step, rows[rank], room[rank], count) for rank in range(step.ranks)]
    stays = list(_stays(step)) if step.capacity is not None else []
    windows = [WHOLE_STEP] if step.objective == "makespan" else list(dict.fromkeys([0, step.ranks - 1, int(work.argmax())]))
    for whose in windows:
        head, tail = heads_and_tails(step, whose)
        for rank in range(step.ranks) if whose < 0 else (whose,):
            yield _idle(rank, count * int(work[rank]), terms[rank], RankWindow(head[rows[rank]], tail[rows[rank]]))
        for rank, stay, most, why in stays:
            if whose in (-1, rank) and len(stay.size) and most > 0:
                yield _energy(stay, most, count, (head, tail, p.duration), f"rank {rank}: {why}", rank)
    yield from idle_of_two(step, count)


def _idle(rank: int, work: int, terms: IdleTerms, window: RankWindow) -> Bound:
    """The bound by a rank's work and its idle time before and after."""
    first, last = unavoidable_idle(terms, window)
    proof = f"rank {rank}: {work} µs of work, and no order avoids {first} µs idle before or {last} µs idle after"
    return Bound(work + first + last, f"{proof}, whatever the number of microbatches", IDLE, (rank,))


def _energy(stays: Stays, room: int, count: int, times: tuple[Ints, Ints, Ints], proof: str, rank: int) -> Bound:
    """The bound by the energy of memory of all microbatches, and the energy lost while memory fills and empties.

    A window of T µs holds at most T · room less both losses, if filling and emptying do not overlap. times: heads, tails and
    durations of one microbatch's passes, µs."""
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
    return Bound(value, proof, AREA, (rank,))


def _lost(first: Ints, each: Ints, size: Ints, most: int, count: int) -> tuple[int, int]:
    """The least byte·µs by which memory of `most` bytes is not full near one end of the window, and when it can be full, µs.
    Microbatch j of `count` of edge e brings size[e] bytes no sooner than first[e] + j · each[e] µs from that end.

    All bytes together reach `most`. The sums are in closed form, since there may be very many microbatches."""
    begin, apart, size = (column.astype(object) for column in (first, each, size))  # whole numbers of any length

    def come(at: int) -> Any:
        return np.clip((at - begin) // apart + 1, 0, count)

    full = bisect_left(range(max(begin + apart * count)), most, key=lambda at: (come(at) * size).sum())
    number = come(full)
    return most * full - (size * (number * (full - begin) - apart * (number * (number - 1) // 2))).sum(), full


def _stays(problem: Problem) -> Iterator[tuple[int, Stays, int, str]]:
    """The `Stays` of one microbatch in each rank's memory, and its bytes; then those of whole microbatches, in prices, and
    the most that prices of one moment add up to. The last value says it in words."""
    e, room = problem.edges, problem.room.tolist()
    rows = np.flatnonzero(problem.device_bytes > 0)
    spans, rank = least_lifespans(problem, rows), problem.passes.rank[e.before[rows]]
    columns = e.before[rows], e.after[rows], e.bytes[rows], spans
    for one_rank in range(problem.ranks):
        own = Stays(*(column[rank == one_rank] for column in columns))
        yield one_rank, own, room[one_rank], HELD.format(room=room[one_rank])
    for one_rank, p in best_prices(problem):
        stays = Stays(p.first[:, 0], p.last[:, 0], p.price, p.life)
        yield one_rank, stays, p.most, WHOLE_ONES.format(room=room[one_rank])
