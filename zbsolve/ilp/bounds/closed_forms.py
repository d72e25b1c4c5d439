"""Lower bounds in closed form: longest paths, and one rank at a time with all others replaced by longest-path lags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import Ints, Problem
from ...util.clock import Clock
from .beside import held_beside
from .bound import IDLE, PATH, WORK, Bound
from .closed_form_kernels import one_machine
from .full_memory import Reach, idle_between, reach_of
from .idle_time import IdleTerms, RankWindow, idle_terms, unavoidable_idle
from .necessary_arcs import NO_PATH, heads_and_tails, necessary_arcs_of, ordered_passes
from .pool_energy import bounds_of_pools, stays_of_pools

LONGEST_CHAIN = "the longest chain of passes that wait for each other, or for memory to be freed, takes as long"
ONE_BY_ONE = "its passes run one at a time, none before its input can be there, and others wait for the last ones"
FULL = "and while its memory is full of what one microbatch needs it waits between passes, in sum"
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
    """The closed forms one after the other, and a bound of 0 where there is none. For the span the windows of the first
    rank, of the last and of the busiest come first: they give the best bound as a rule."""
    if problem.objective == "makespan":
        a = necessary_arcs_of(problem, clock)
        value = int((a.head + problem.passes.duration + a.tail).max())
        yield Bound(value, LONGEST_CHAIN, PATH)
    look, reach = _worth_a_look(problem), reach_of(problem)
    forms = {rank: form for rank in look if (form := _rank_form(problem, rank, reach)) is not None}
    pools, streams = stays_of_pools(problem), _side_streams(problem)
    for whose in look if problem.objective == "span" else [-1]:
        head, tail = heads_and_tails(problem, whose)
        for rank in dict.fromkeys([whose, *look]):
            if rank in forms:
                yield from _of_rank(forms[rank], head, tail, whose)
        yield from _of_side_streams(problem, streams, (head, tail), whose)
        yield from bounds_of_pools(pools, (head, tail), whose)
    yield Bound(0, "nothing", PATH)


def _worth_a_look(problem: Problem) -> list[int]:
    """All ranks. In very large problems whose objective is the span each rank costs a walk over all passes: there only the
    first, the last, the busiest, and some between."""
    if problem.objective == "makespan":
        return list(range(problem.ranks))
    count = min(problem.ranks, max(3, MAX_VISITS // len(problem.passes)))
    work = np.bincount(problem.passes.rank, problem.passes.duration, problem.ranks)
    spread = np.linspace(0, problem.ranks - 1, count).round().astype(int).tolist()
    return list(dict.fromkeys([0, problem.ranks - 1, int(work.argmax()), *spread]))


class _RankForm(NamedTuple):
    """What the closed forms of one rank rest on, whatever the window: its passes (rows), µs of each and of all, what its
    idle time rests on, and µs that it is idle between its passes at least."""

    rank: int
    passes: Ints
    duration: Ints
    work: int
    idle: IdleTerms
    between: int


def _rank_form(problem: Problem, rank: int, reach: Reach | None) -> _RankForm | None:
    """What a rank's closed forms rest on. Ranks with several compute streams, or none, have none; passes on side streams are
    lags here, and the bytes that they hold all the time are not there for others."""
    p, passes = problem.passes, ordered_passes(problem, rank)
    if len({p.stream_sets[s] for s in set(p.streams[passes].tolist())}) != 1:
        return None
    capacity = int(arrays_of(problem).capacity[rank] - held_beside(problem).held[rank])
    duration, between = p.duration[passes], 0 if reach is None else idle_between(problem, reach, passes, max(0, capacity))
    return _RankForm(rank, passes, duration, int(duration.sum()), idle_terms(problem, passes, max(0, capacity)), between)


def _of_rank(form: _RankForm, head: Ints, tail: Ints, whose: int) -> Iterator[Bound]:
    """The closed forms of one rank's compute stream within the window of rank `whose` (−1: the whole step, which is every
    rank's window for the makespan).

    head, tail: one value a pass of the problem, µs. Passes may lie outside another rank's window where no path leads from
    it or to it. Those count nowhere, but for idle time, which asks for paths only where it begins and ends.
    """
    window, duration = RankWindow(head[form.passes], tail[form.passes]), form.duration
    sure = (window.head > NO_PATH) & (window.tail > NO_PATH)
    if not sure.any():
        return
    ranks, name = _kept(form.rank, whose)
    value = int(one_machine(window.head[sure], duration[sure], window.tail[sure]))
    yield Bound(value, f"{name}: {ONE_BY_ONE}", WORK, ranks)
    first, last = unavoidable_idle(form.idle, window)
    proof = (
        f"{name}: {form.work} µs of work, and no order avoids {first} µs idle until memory is freed and {last} µs idle once "
        "all memory was taken"
    )
    if form.work + first + last > 0:
        yield Bound(form.work + first + last, proof, IDLE, ranks)
    if form.between and whose == -1:
        value = form.work + form.between + int(window.head.min() + window.tail.min())
        yield Bound(value, f"{name}: {form.work} µs of work, {FULL} {form.between} µs", IDLE, ranks)


def _kept(rank: int, whose: int) -> tuple[tuple[int, ...], str]:
    """The ranks that a closed form of `rank` in the window of `whose` keeps, and what it calls them."""
    if whose in (rank, -1):
        return (rank,), f"rank {rank}"
    return (whose, rank), f"rank {rank} in the window of rank {whose}"


def _side_streams(problem: Problem) -> dict[str, Ints]:
    """The rows of each side stream's passes."""
    side = ~problem.computing
    return {stream: rows[side[rows]] for stream, rows in problem.members.items() if side[rows].any()}


def _of_side_streams(problem: Problem, streams: dict[str, Ints], times: tuple[Ints, Ints], whose: int) -> Iterator[Bound]:
    """The one closed form of side streams: their passes run one at a time. A stream that ranks share counts with the first
    of them."""
    (head, tail), p = times, problem.passes
    for stream, rows in streams.items():
        mine = rows[(head[rows] > NO_PATH) & (tail[rows] > NO_PATH)]
        if len(mine):
            value = int(one_machine(head[mine], p.duration[mine], tail[mine]))
            yield Bound(value, f"{stream}: {ONE_BY_ONE}", WORK, _kept(int(p.rank[mine].min()), whose)[0])
