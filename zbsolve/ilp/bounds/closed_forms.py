"""Lower bounds in closed form: longest paths, and one rank at a time with all others replaced by longest-path lags."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import Ints, Problem
from ...util.clock import Clock
from .bound import IDLE, PATH, WORK, Bound
from .closed_form_kernels import one_machine
from .energy import PoolStays, bounds_of_pools, stays_of_pools
from .idle_time import IdleTerms, RankWindow, Reach, idle_between, idle_terms, reach_of, unavoidable_idle
from .memory_arcs import INFINITE, held_beside
from .necessary_arcs import WHOLE_STEP, heads_and_tails, necessary_arcs_of, ordered_passes
from .path_walks import NO_PATH
from .two_ends import idle_of_two

LONGEST_CHAIN = "the longest chain of passes that wait for each other, or for memory to be freed, takes as long"
ONE_BY_ONE = "its passes run one at a time, none before its input can be there, and others wait for the last ones"
FULL = "and while its memory is full of what one microbatch needs it waits between passes, in sum"
MAX_VISITS = 4_000_000  # the most passes that windows of ranks walk over

_known: WeakKeyDictionary[Problem, tuple[Bound, ...]] = WeakKeyDictionary()


def closed_form(problem: Problem) -> Bound:
    """The best bound in closed form: of the longest path; and for every rank one machine with heads and tails, idle time by
    memory, and the energy of memory."""
    return max(all_closed_forms(problem), key=lambda bound: bound.value)


def all_closed_forms(problem: Problem) -> tuple[Bound, ...]:
    """All closed forms; for the span those in each window that may give the best. Cached as long as the problem lives."""
    return tuple(each_closed_form(problem))


def each_closed_form(problem: Problem, clock: Clock | None = None) -> Iterator[Bound]:
    """`all_closed_forms`, one by one. Raises TimeUp when the clock has no time left."""
    if problem not in _known:
        bounds = []
        for bound in _closed_forms(problem, clock):
            bounds.append(bound)
            yield bound
            if clock is not None:
                clock.check()
        _known[problem] = tuple(bounds)
    else:
        yield from _known[problem]


def closed_forms_within(problem: Problem, whose: int, clock: Clock | None = None) -> Iterator[Bound]:
    """The closed forms of the span in the window of rank `whose`, one by one, its own first. Raises TimeUp."""
    for bound in _of_window(_Relaxations(problem), whose):
        yield bound
        if clock is not None:
            clock.check()


def _closed_forms(problem: Problem, clock: Clock | None) -> Iterator[Bound]:
    """The closed forms one by one, and at last a bound of 0."""
    a, relaxations = necessary_arcs_of(problem, clock), _Relaxations(problem)
    if problem.objective == "makespan":
        value = int((a.head + problem.passes.duration + a.tail).max())
        yield Bound(value, LONGEST_CHAIN, PATH)
        yield from _of_window(relaxations, WHOLE_STEP)
        yield from idle_of_two(problem)
    else:
        yield from _of_windows(relaxations)
    yield Bound(0, "nothing", PATH)


def _of_windows(relaxations: _Relaxations) -> Iterator[Bound]:
    """The closed forms of the span. The window of the first rank usually gives the best and comes first; then the others,
    the most promising first, each only with forms that may beat the best so far."""
    best, (first, *others) = 0, relaxations.look
    for bound in _of_window(relaxations, first):
        best = max(best, bound.value)
        yield bound
    ceilings = relaxations.ceilings
    for whose in sorted(others, key=lambda rank: ceilings.around[rank]):
        if ceilings.most_in(whose) <= best:
            return
        for bound in _of_window(relaxations, whose, best):
            best = max(best, bound.value)
            yield bound


def _of_window(relaxations: _Relaxations, whose: int, least: int = 0) -> Iterator[Bound]:
    """The closed forms within the window of rank `whose`, its own first, without those that cannot exceed `least` µs."""
    problem, times = relaxations.problem, heads_and_tails(relaxations.problem, whose)
    for form in relaxations.ranks_above(least, whose):
        yield from _of_rank(form, *times, whose)
    yield from _of_side_streams(problem, relaxations.streams, times, whose)
    yield from bounds_of_pools(relaxations.pools_above(least, whose), times, whose)


def _worth_a_look(problem: Problem) -> list[int]:
    """The ranks whose windows are tried: all. For the span of a very large problem, where each rank costs a walk over all
    passes: the first, the last, the busiest, and some between."""
    if problem.objective == "makespan":
        return list(range(problem.ranks))
    count = min(problem.ranks, max(3, MAX_VISITS // len(problem.passes)))
    work = np.bincount(problem.passes.rank, problem.passes.duration, problem.ranks)
    spread = np.linspace(0, problem.ranks - 1, count).round().astype(int).tolist()
    return list(dict.fromkeys([0, problem.ranks - 1, int(work.argmax()), *spread]))


class _Ceilings(NamedTuple):
    """Estimates of the most that closed forms reach in windows, µs. of_rank, of_pool: what they reach in the whole step.
    around: for each rank the least time before its first start plus that after its last end, which its window lacks.

    They tell which windows need not be tried; no bound depends on them. They are not exact: in 6 of 1,630 random problems a
    window gave more (by about 1 %), in none of them more than the best window.
    """

    of_rank: Ints
    of_pool: Ints
    around: Ints

    def most_in(self, whose: int) -> int:
        """The most in the window of rank `whose`, µs."""
        return int(max(self.of_rank.max(), self.of_pool.max(initial=0)) - self.around[whose])


class _Relaxations:
    """The parts of closed forms that do not depend on the window. Each is made when it is first needed.

    look: the ranks that count, and whose windows are tried.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.look = problem, _worth_a_look(problem)
        self._forms: dict[int, _RankForm | None] = {WHOLE_STEP: None}

    @cached_property
    def pools(self) -> list[PoolStays]:
        """What pools must hold."""
        return stays_of_pools(self.problem)

    @cached_property
    def streams(self) -> dict[str, Ints]:
        """The rows of each side stream's passes."""
        side, members = ~self.problem.computing, self.problem.members
        return {stream: rows[side[rows]] for stream, rows in members.items() if side[rows].any()}

    @cached_property
    def _reach(self) -> Reach | None:
        return reach_of(self.problem)

    def _form(self, rank: int) -> _RankForm | None:
        if rank not in self._forms:
            self._forms[rank] = _rank_form(self.problem, rank, self._reach)
        return self._forms[rank]

    def ranks_above(self, least: int, whose: int) -> Iterator[_RankForm]:
        """The forms of ranks that may exceed `least` µs in the window of rank `whose`, its own first."""
        for rank in dict.fromkeys([whose, *self.look]):
            form = self._form(rank)
            if form is not None and (least <= 0 or self.ceilings.of_rank[rank] - self.ceilings.around[whose] > least):
                yield form

    def pools_above(self, least: int, whose: int) -> list[PoolStays]:
        """The pools that may exceed `least` µs in the window of rank `whose`."""
        if least <= 0:
            return self.pools
        most = self.ceilings.of_pool - self.ceilings.around[whose]
        return [pool for pool, value in zip(self.pools, most.tolist(), strict=True) if value > least]

    @cached_property
    def ceilings(self) -> _Ceilings:
        """The estimates. With side streams or further pools there are none, since bytes outside a window do not count there,
        and fewer bytes may need more time."""
        problem, ranks = self.problem, self.problem.ranks
        around, of_rank = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        if len(problem.side_stream) or problem.pools:
            return _Ceilings(of_rank + INFINITE, np.full(len(self.pools), INFINITE), around)
        step = heads_and_tails(problem, WHOLE_STEP)
        for form in self.ranks_above(0, WHOLE_STEP):
            of_rank[form.rank] = max(bound.value for bound in _of_rank(form, *step, WHOLE_STEP))
        of_pool = [bound.value for pool in self.pools for bound in bounds_of_pools([pool], step, WHOLE_STEP)]
        for times in step:
            least = np.full(ranks, INFINITE)
            np.minimum.at(least, problem.passes.rank, times)
            around += least
        return _Ceilings(of_rank, np.array(of_pool, np.int64), around)


class _RankForm(NamedTuple):
    """The parts of one rank's closed forms that do not depend on the window. passes: rows. duration, work: µs of each pass
    and of all. idle: see `IdleTerms`. between: the least idle time between its passes, µs."""

    rank: int
    passes: Ints
    duration: Ints
    work: int
    idle: IdleTerms
    between: int


def _rank_form(problem: Problem, rank: int, reach: Reach | None) -> _RankForm | None:
    """The `_RankForm` of a rank; None if it does not have exactly one compute stream. Side passes count as lags; bytes that
    they hold all the time are taken off the capacity."""
    p, passes = problem.passes, ordered_passes(problem, rank)
    if len({p.stream_sets[s] for s in set(p.streams[passes].tolist())}) != 1:
        return None
    capacity = int(arrays_of(problem).capacity[rank] - held_beside(problem).held[rank])
    duration, between = p.duration[passes], 0 if reach is None else idle_between(problem, reach, passes, max(0, capacity))
    return _RankForm(rank, passes, duration, int(duration.sum()), idle_terms(problem, passes, max(0, capacity)), between)


def _of_rank(form: _RankForm, head: Ints, tail: Ints, whose: int) -> Iterator[Bound]:
    """The closed forms of one rank's compute stream within the window of rank `whose` (or the whole step, which is every
    rank's window for the makespan).

    head, tail: one value a pass of the problem, µs. A pass without a path from or to the window's rank may lie outside the
    window, so it does not count; only idle time needs no paths except where it begins and ends.
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
    if form.between and whose == WHOLE_STEP:
        value = form.work + form.between + int(window.head.min() + window.tail.min())
        yield Bound(value, f"{name}: {form.work} µs of work, {FULL} {form.between} µs", IDLE, ranks)


def _kept(rank: int, whose: int) -> tuple[tuple[int, ...], str]:
    """The ranks that a closed form of `rank` in the window of `whose` keeps, and their name in the proof."""
    if whose in (rank, WHOLE_STEP):
        return (rank,), f"rank {rank}"
    return (whose, rank), f"rank {rank} in the window of rank {whose}"


def _of_side_streams(problem: Problem, streams: dict[str, Ints], times: tuple[Ints, Ints], whose: int) -> Iterator[Bound]:
    """The closed form of side streams: their passes run one at a time. A shared stream counts for the first of its ranks."""
    (head, tail), p = times, problem.passes
    for stream, rows in streams.items():
        known = rows[(head[rows] > NO_PATH) & (tail[rows] > NO_PATH)]
        if len(known):
            value = int(one_machine(head[known], p.duration[known], tail[known]))
            yield Bound(value, f"{stream}: {ONE_BY_ONE}", WORK, _kept(int(p.rank[known].min()), whose)[0])
