"""Lower bounds in closed form: longest paths, and one rank at a time with all others replaced by longest-path lags."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.problem_arrays import arrays_of
from ...problem import Ints, Problem
from ...util.clock import Clock
from .beside import held_beside
from .bound import IDLE, PATH, WORK, Bound
from .closed_form_kernels import one_machine
from .idle_time import RankWindow, unavoidable_idle
from .necessary_arcs import NO_PATH, heads_and_tails, necessary_arcs_of, ordered_passes
from .pool_energy import bounds_of_pools, stays_of_pools

LONGEST_CHAIN = "the longest chain of passes that wait for each other, or for memory to be freed, takes as long"
ONE_BY_ONE = "its passes run one at a time, none before its input can be there, and others wait for the last ones"
MAX_VISITS = 4_000_000  # passes walked over in one closed form

_known: WeakKeyDictionary[Problem, tuple[Bound, ...]] = WeakKeyDictionary()


def closed_form(problem: Problem) -> Bound:
    """The best bound in closed form: the longest path; for every rank one machine with heads and tails, idle time around
    memory, and the energy of memory."""
    return max(all_closed_forms(problem), key=lambda bound: bound.value)


def all_closed_forms(problem: Problem) -> tuple[Bound, ...]:
    """All closed forms, ranks in order, remembered while the problem lives."""
    return tuple(each_closed_form(problem))


def each_closed_form(problem: Problem, clock: Clock | None = None) -> Iterator[Bound]:
    """All closed forms as they are found, remembered while the problem lives. Raises TimeUp where no time is left."""
    if problem not in _known:
        found = []
        for bound in _closed_forms(problem, clock):
            found.append(bound)
            yield bound
            if clock is not None:
                clock.check()
        _known[problem] = tuple(found)
    else:
        yield from _known[problem]


def _closed_forms(problem: Problem, clock: Clock | None) -> Iterator[Bound]:
    """The closed forms one after the other, and a bound of 0 where there is none."""
    if problem.objective == "makespan":
        a = necessary_arcs_of(problem, clock)
        value = int((a.head + problem.passes.duration + a.tail).max())
        yield Bound(value, LONGEST_CHAIN, PATH)
    pools = stays_of_pools(problem)
    look = _worth_a_look(problem)
    for whose in look if problem.objective == "span" else [-1]:
        head, tail = heads_and_tails(problem, whose)
        for rank in look:
            mine = ordered_passes(problem, rank)
            window, within = RankWindow(rank, mine, head[mine], tail[mine]), whose if whose >= 0 else rank
            yield from _of_rank(problem, window, within)
            yield from _of_side_streams(problem, rank, head, tail, within)
        yield from bounds_of_pools(pools, (head, tail), whose)
    yield Bound(0, "nothing", PATH)


def _worth_a_look(problem: Problem) -> list[int]:
    """All ranks. In very large problems whose objective is the span each rank costs a walk over all passes: there only the
    busiest, the first, the last, and some between."""
    count = max(3, MAX_VISITS // len(problem.passes))
    if problem.objective == "makespan" or problem.ranks <= count:
        return list(range(problem.ranks))
    work = np.bincount(problem.passes.rank, problem.passes.duration, problem.ranks)
    spread = np.linspace(0, problem.ranks - 1, count).round().astype(int).tolist()
    return list(dict.fromkeys([0, problem.ranks - 1, int(work.argmax()), *spread]))


def _of_rank(problem: Problem, window: RankWindow, whose: int) -> Iterator[Bound]:
    """The closed forms of one rank's compute stream within the window of rank `whose` (for the makespan all ranks have the
    same window).

    Passes may lie outside another rank's window where no path leads from it or to it. Those count nowhere, but for idle
    time, which asks for paths only where it begins and ends. Ranks with several compute streams have none; passes on side
    streams are lags here, and the bytes that they hold all the time are not there for others.
    """
    rank, sure = window.rank, (window.head > NO_PATH) & (window.tail > NO_PATH)
    duration = problem.passes.duration[window.passes]
    capacity = int(arrays_of(problem).capacity[rank] - held_beside(problem).held[rank])
    used = {problem.passes.stream_sets[s] for s in set(problem.passes.streams[window.passes].tolist())}
    ranks, name = _kept(rank, whose)
    if len(used) != 1 or not sure.any():
        return
    work = int(duration.sum())
    value = int(one_machine(window.head[sure], duration[sure], window.tail[sure]))
    yield Bound(value, f"{name}: {ONE_BY_ONE}", WORK, ranks)
    first, last = unavoidable_idle(problem, window, max(0, capacity))
    proof = (
        f"{name}: {work} µs of work, and no order avoids {first} µs idle until memory is freed and {last} µs idle once "
        "all memory was taken"
    )
    if work + first + last > 0:
        yield Bound(work + first + last, proof, IDLE, ranks)


def _kept(rank: int, whose: int) -> tuple[tuple[int, ...], str]:
    """The ranks that a closed form of `rank` in the window of `whose` keeps, and what it calls them."""
    return ((rank,), f"rank {rank}") if whose == rank else ((whose, rank), f"rank {rank} in the window of rank {whose}")


def _of_side_streams(problem: Problem, rank: int, head: Ints, tail: Ints, whose: int) -> Iterator[Bound]:
    """The one closed form of side streams: their passes run one at a time. A stream that ranks share counts with the first
    of them."""
    p, side = problem.passes, ~problem.computing
    for stream, rows in problem.members.items():
        mine = rows[side[rows] & (head[rows] > NO_PATH) & (tail[rows] > NO_PATH)]
        if len(mine) and int(p.rank[mine].min()) == rank:
            value = int(one_machine(head[mine], p.duration[mine], tail[mine]))
            yield Bound(value, f"{stream}: {ONE_BY_ONE}", WORK, _kept(rank, whose)[0])
