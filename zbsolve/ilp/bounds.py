"""Lower bounds that hold for every schedule: closed forms, then searches over some ranks' orders (`onerank.py`).

Each keeps one rank, or a few, and replaces all others by longest-path lags along necessary arcs (`arcs.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ..clock import Clock
from ..greedy.arrays import arrays
from ..problem import Ints, Problem
from .arcs import FAR, NOWHERE, arcs, heads_and_tails, ordered
from .area import area, least_lifespans
from .idle import Window, idle
from .onerank import NOBODY, Answer, Lanes, lanes_of, refute
from .onerank_climb import NARROW, Climb
from .onerank_induct import by_induction, is_long
from .window import one_machine

EFFORT = 4_000_000  # passes walked over in one closed form
STATE = 1.5e-6  # seconds that one partial order counts for
# Partial orders in one try: at first, how many times as many next, at most (a few GB at worst).
LEAST, MORE, MOST = 3_000, 6, 8_000_000
VAIN = 3  # groups that may take all their states in vain before others of their size are left
# Part of the time, and seconds at least, after which the searches are given up where none has gained on the closed forms: of
# 192 problems 48 ended so after all of it, and of the others one gained later (0.04 %).
HOPE, LEAST_HOPE = 0.25, 0.5
GRAIN = 64  # a group of ranks that can gain less than this part of the gap is left
WHOLE = "whole problem"  # kind of the bounds that an exact solver proved
MANY, WHOLE_MOST = 8, 4  # ranks kept at most, lean or whole
LEAP = 0.3  # of the time left may go into a first look at whether all ranks refute the incumbent's value
BROAD, GROWTH = 16, 2.5  # times the breadth of that look, and how many times its states, that an answer takes at most
PROBE = 100_000  # partial orders that show how fast an induction is
SETTLED = 0.98  # times what it was a round before: the incumbent's value is worth a look from then on
# Of the time left, for one try of an induction: of the first rank, of all in a long problem, in another. Lanes at most.
FIRST, ALL, HALF, LANES = 0.1, 0.95, 0.5, 24
NEAR = 0.99  # part of the incumbent's value that is asked for where the value itself takes too many partial orders
GROUPS = ("ranks", "lean ranks")  # kinds of bounds from a search over some ranks' passes, see onerank.lanes_of
Group = tuple[tuple[int, ...], bool]  # ranks, and whether only the first is kept whole (lean)


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule whose lanes run in table order has a smaller value than `value` µs; `proof` says why.

    kind: the relaxation ("path", "work", "idle", "area": closed forms; or one of GROUPS, a search); ranks: which ranks it
    keeps. With both, the bound can be proven again from the problem alone (`recheck`).
    """

    value: int
    proof: str
    kind: str = ""
    ranks: tuple[int, ...] = ()


_made: WeakKeyDictionary[Problem, tuple[Bound, ...]] = WeakKeyDictionary()


def closed_form(problem: Problem) -> Bound:
    """The best bound in closed form: the longest path, and for every rank one stream with heads and tails, idle time
    around memory, and memory over time."""
    if problem not in _made:
        _made[problem] = tuple(_closed_forms(problem))
    return max(_made[problem], key=lambda bound: bound.value)


def _closed_forms(problem: Problem) -> Iterator[Bound]:
    """All of them, ranks in order."""
    if problem.objective == "makespan":
        a = arcs(problem)
        value = int((a.depth + problem.passes.duration + a.after).max())
        yield Bound(value, "longest path through the graph, lanes in order, memory's waits", "path")
    spans = _lifespans(problem)
    look = _worth_a_look(problem)
    for whose in look if problem.objective == "span" else [-1]:
        head, tail = heads_and_tails(problem, whose)
        for rank in look:
            mine = ordered(problem, rank)
            window = Window(rank, mine, head[mine], tail[mine])
            yield from _of_rank(problem, window, spans, whose if whose >= 0 else rank)
            yield from _beside(problem, rank, head, tail, whose if whose >= 0 else rank)
    yield Bound(0, "nothing", "path")


def _worth_a_look(problem: Problem) -> list[int]:
    """All ranks; in very large problems the busiest, the first, the last and some between, for each costs a walk over all
    passes where the span is the objective."""
    count = max(3, EFFORT // len(problem.passes))
    if problem.objective == "makespan" or problem.ranks <= count:
        return list(range(problem.ranks))
    work = np.bincount(problem.passes.rank, problem.passes.duration, problem.ranks)
    spread = np.linspace(0, problem.ranks - 1, count).round().astype(int).tolist()
    return list(dict.fromkeys([0, problem.ranks - 1, int(work.argmax()), *spread]))


def _of_rank(problem: Problem, window: Window, spans: Ints | None, whose: int) -> Iterator[Bound]:
    """The closed forms of one rank within the window of rank `whose` (for the makespan all ranks have the same one). Of
    another rank's window passes may lie outside where no path leads from it or to it: those count nowhere, but for idle
    time, which asks for paths only where it begins and ends. Ranks with several streams have no idle form, but for
    streams beside compute without memory, whose passes are lags here."""
    rank, sure = window.rank, (window.head > NOWHERE) & (window.tail > NOWHERE)
    duration, room = problem.passes.duration[window.mine], int(arrays(problem).room[rank])
    used = {problem.passes.stream_sets[s] for s in set(problem.passes.streams[window.mine].tolist())}
    ranks: tuple[int, ...] = (rank,) if whose == rank else (whose, rank)
    name = f"rank {rank}" if whose == rank else f"rank {rank} in the window of rank {whose}"
    if len(used) == 1 and sure.any():
        work = int(duration.sum())
        value = int(one_machine(window.head[sure], duration[sure], window.tail[sure]))
        yield Bound(value, f"{name}: its passes on one stream, with arrivals and departures", "work", ranks)
        first, last = idle(problem, window, room)
        proof = f"{name}: work {work} + idle {first} until memory is freed + idle {last} once all is taken"
        if work + first + last > 0:
            yield Bound(work + first + last, proof, "idle", ranks)
    if spans is None or problem.capacity is None:
        return
    edges = problem.edges
    rows = np.flatnonzero((edges.bytes > 0) & (problem.passes.rank[edges.before] == rank))
    at = np.searchsorted(window.mine, np.stack([edges.before[rows], edges.after[rows]]))
    inside = sure[at[0]] & sure[at[1]]
    rows, at = rows[inside], at[:, inside]
    if len(rows) == 0 or int(edges.bytes[rows].sum()) <= room:
        return
    value = area(edges.bytes[rows], spans[rows], room, window.head[at[0]], window.tail[at[1]])
    yield Bound(value, f"{name}: bytes times the time they are held, over {room} bytes", "area", ranks)


def _beside(problem: Problem, rank: int, head: Ints, tail: Ints, whose: int) -> Iterator[Bound]:
    """The one closed form of streams beside compute: their passes, one at a time."""
    rows = problem.beside[problem.passes.rank[problem.beside] == rank]
    rows = rows[(head[rows] > NOWHERE) & (tail[rows] > NOWHERE)]
    for number in np.unique(problem.passes.streams[rows]).tolist():
        mine, stream = rows[problem.passes.streams[rows] == number], problem.passes.stream_sets[number][0]
        value = int(one_machine(head[mine], problem.passes.duration[mine], tail[mine]))
        ranks = (rank,) if whose == rank else (whose, rank)
        yield Bound(value, f"{stream}: its passes, with arrivals and departures", "work", ranks)


def _lifespans(problem: Problem) -> Ints | None:
    """The least lifespan of each edge with bytes, µs, by row of the table of edges (0 where it has none)."""
    rows = np.flatnonzero(problem.edges.bytes > 0)
    if problem.capacity is None or len(rows) == 0:
        return None
    spans = np.zeros(len(problem.edges), np.int64)
    spans[rows] = least_lifespans(problem, rows)
    return spans


def improve(problem: Problem, best: Bound, clock: Clock, seconds: float, incumbent: Ints = NOBODY) -> Iterator[Bound]:
    """Higher bounds than `best` as they are found, cheap ones first, until the incumbent's value (µs, one number, which
    another thread may lower meanwhile; FAR or more: there is none) or time is reached: after the closed forms single ranks,
    exactly, then groups of them, all with few states each, then again with more; early on one look at whether all ranks
    together refute a better value at once. Fewer where no search gains anything in the first part of the time."""
    closed_form(problem)
    forms = sorted(_made[problem], key=lambda bound: -bound.value)
    if forms[0].value > best.value:
        best = forms[0]
        yield best
    search = _Search(problem, best, incumbent, clock, clock.used + seconds)
    alone: list[Group] = [((rank,), False) for rank in dict.fromkeys(rank for bound in forms for rank in bound.ranks)]
    if not alone:  # no rank has one stream alone: nothing to keep whole
        return
    states, roots, gained = LEAST, dict[bool, tuple[int, ...]](), {True: 1, False: 1}
    before_that, leapt = search.ceiling, False
    while states <= MOST and not search.over:
        if states > LEAST and not leapt and search.ceiling > SETTLED * before_that:
            leapt = yield from search.leap(_all_ranks(problem, [*search.best.ranks[:1], *(rank for (rank,), _ in alone)]))
        before_that = search.ceiling
        if len(search.best.ranks) < 2 or states == LEAST:
            yield from search.climb(alone, states)
        for lean in (True, False):
            if gained[lean] == 0 < gained[not lean]:
                continue  # the other kind's turn, until it gains nothing either
            began = search.best.value
            root = roots.setdefault(lean, next(bound.ranks for bound in (search.best, *forms) if bound.ranks)[:2])
            most = min(MANY if lean else WHOLE_MOST, problem.ranks)
            for size in range(2 if len(root) < 3 else min(most, len(root) + 1), 1 + most):
                before = search.best
                yield from search.climb(_groups(problem, root, size, lean), states, once=size > 2)
                if search.best is not before:
                    root = search.best.ranks
                elif len(root) < size:
                    break  # worth it with more states
            yield from search.climb([(root, lean)], states)
            roots[lean] = root
            gained[lean] = search.best.value - began
        states *= MORE


class _Search:
    """The best bound so far, and what is known of each group of ranks."""

    def __init__(self, problem: Problem, best: Bound, incumbent: Ints, clock: Clock, until: float) -> None:
        self.problem, self.best, self.incumbent, self.clock, self.until = problem, best, incumbent, clock, until
        self.unknown = 4 * best.value
        self.climbs: dict[Group, Climb | None] = {}
        self.breadth = NARROW  # what the last group's answer took: the next one's first try
        self.rate = 500_000.0  # states a second, measured
        self.form, self.hope = best, clock.used + max(LEAST_HOPE, HOPE * (until - clock.used))

    @property
    def ceiling(self) -> int:
        """What there is to reach: the incumbent's value."""
        value = int(self.incumbent[0])
        return self.unknown if value >= FAR else value

    @property
    def affordable(self) -> int:
        """As many partial orders as there is time for."""
        return int(self.rate * min(self.clock.left, self.until - self.clock.used))

    @property
    def over(self) -> bool:
        """Whether the ceiling or the end of the time is reached, or there is nothing to hope for."""
        vain = self.best is self.form and self.clock.used >= self.hope
        return vain or self.best.value >= self.ceiling or self.clock.used >= self.until or self.clock.left <= 0

    def climb(self, groups: list[Group], states: int, once: bool = False) -> Iterator[Bound]:
        """Higher bounds from each group in turn, as long as it gives one with `states` partial orders a try, and no more
        after a few took all theirs in vain (the others are as large); once: no more than the first bound."""
        spent = 0
        for group in groups:
            if group not in self.climbs:
                lanes = lanes_of(self.problem, *group)
                gap = self.ceiling - self.best.value
                least, step = max(1, gap // 32), gap // 5
                climb = None if lanes is None else Climb(lanes, self.ceiling, least, step, self.breadth, self.incumbent)
                self.climbs[group] = climb
            climb = self.climbs[group]
            if climb is not None:
                climb.fits = min(climb.fits, self.ceiling)
            while climb is not None and spent < VAIN and not self.over:
                window = climb.window(self.best.value - 1, (self.ceiling - self.best.value) // GRAIN)
                allowed = min(states, self.affordable)
                if window is None or allowed < 1_000:
                    break
                began = self.clock.used
                answer, tried = climb.attempt(window, allowed)
                self.count(tried, began)
                if answer is Answer.REFUTED:
                    self.best, self.breadth = _of_group(group, window + 1), climb.breadth if len(group[0]) > 1 else NARROW
                    yield self.best
                    if once:
                        return
                elif answer is not Answer.FITS:
                    spent += once and 2 * tried > states
                    if 4 * tried > states or window - self.best.value < climb.least:
                        break

    def count(self, tried: int, began: float) -> None:
        """Partial orders tried since `began`: what that says of the time they take."""
        self.clock.spend(tried * STATE)
        if tried >= 20_000:
            self.rate = tried / max(1e-9, self.clock.used - began)

    def leap(self, groups: list[Group]) -> Generator[Bound, None, bool]:
        """The incumbent's value itself as a bound from the first of the groups that gives it, where a look with few states a
        place lets hope that there is time for it: smaller steps would take most of the time below what is of interest.
        Returns False where the value fell meanwhile, so that another look is worth it."""
        for ranks, lean in groups:
            lanes = None if self.over or self.incumbent[0] >= FAR else lanes_of(self.problem, ranks, lean)
            if lanes is None:
                return True
            before = self.ceiling
            if is_long(lanes):  # the value itself would take too many
                yield from self.induct(ranks, lean)
                return self.ceiling > SETTLED * before
            window, states, answer = before - 1, int(LEAP * self.affordable), Answer.MERGED
            for breadth in (NARROW, BROAD * NARROW):
                began = self.clock.used
                answer, tried = refute(lanes, window, breadth, states, True, self.incumbent)
                self.count(tried, began)
                if answer is not Answer.MERGED or GROWTH * tried > self.affordable:
                    break
                states = self.affordable
            if answer is Answer.REFUTED:
                self.best = _of_group((ranks, lean), window + 1)
                yield self.best
            if self.ceiling < before:
                return False
            if answer is not Answer.FITS:
                if answer is not Answer.REFUTED:
                    yield from self.induct(ranks, lean)
                return self.ceiling > SETTLED * before
        return True

    def induct(self, ranks: tuple[int, ...], lean: bool) -> Iterator[Bound]:
        """Nearly the incumbent's value by induction over microbatches: without the last rank, which takes the fewest partial
        orders, then with it. Of too many lanes what the first rank gives."""
        for kept in (ranks[:-1], ranks):
            value, began = int(NEAR * self.ceiling) + 1, self.clock.used
            lanes = None if self.over or value <= self.best.value else lanes_of(self.problem, kept, lean)
            if lanes is None:
                continue
            if len(lanes.home) > LANES:
                yield from self.climb([(ranks[:1], False)], int(FIRST * self.affordable))
                return
            answer, tried = by_induction(lanes, value, PROBE, self.incumbent)  # says how fast states are here
            self.count(tried, began)
            if answer is Answer.TOO_MANY and self.affordable > PROBE:
                began = self.clock.used
                most = int((ALL if is_long(lanes) else HALF) * self.affordable)
                answer, tried = by_induction(lanes, value, most, self.incumbent)
                self.count(tried, began)
            if answer is Answer.TOO_MANY:
                return
            if answer is Answer.REFUTED:
                self.best = _of_group((kept, lean), value)
                yield self.best


def _of_group(group: Group, value: int) -> Bound:
    ranks, lean = group
    who, whose = (f"ranks {', '.join(map(str, ranks))}", "their") if len(ranks) > 1 else (f"rank {ranks[0]}", "its")
    which = f"{whose} passes" + (" (leaving out weight gradients of all but the first)" if lean else "")
    return Bound(value, f"{who}: no order of {which} fits {value - 1} µs", GROUPS[lean], ranks)


def _groups(problem: Problem, ranks: tuple[int, ...], size: int, lean: bool) -> list[Group]:
    """The first of `ranks`, filled up with others, each time with another one, where that makes `size` ranks: the last one's
    neighbours first, whose queues are most of one with its own."""
    others = [rank for rank in range(problem.ranks) if rank not in ranks]
    kept = (*ranks, *others)[: size - 1]
    near = sorted((rank for rank in range(problem.ranks) if rank not in kept), key=lambda rank: abs(rank - kept[-1]))
    return [((*kept, other), lean) for other in near]


def _all_ranks(problem: Problem, firsts: list[int]) -> list[Group]:
    """All ranks, where there are not too many: each of the given ones as the first, then whole."""
    if problem.ranks > MANY:
        return []
    groups = [(first, *(rank for rank in range(problem.ranks) if rank != first)) for first in dict.fromkeys(firsts)]
    return [*((ranks, True) for ranks in groups), (groups[0], False)]


def recheck(problem: Problem, bound: Bound, seconds: float) -> Bound:
    """Prove a stated bound again from the problem alone, as one of the same kind and ranks; lower than stated where it
    cannot be proven, or not within `seconds`."""
    if bound.value <= problem.work:
        return Bound(bound.value, "the work of the busiest rank", "work")
    if bound.kind == WHOLE:
        from .cp import refutes  # CP-SAT takes a second to load, and few bounds need it

        proven = refutes(problem, bound.value, seconds)
        return Bound(bound.value, "cp-sat: the whole problem", WHOLE) if proven else Bound(0, "not proven again", WHOLE)
    if bound.kind in GROUPS:
        lean = bound.kind == GROUPS[True]
        lanes = lanes_of(problem, bound.ranks, lean)
        if lanes is not None and _refuted(lanes, bound.value, int(300_000 * seconds)):
            return _of_group((bound.ranks, lean), bound.value)
        return Bound(0, "not proven again", bound.kind, bound.ranks)
    closed_form(problem)
    same = [one for one in _made[problem] if (one.kind, one.ranks) == (bound.kind, bound.ranks)]
    return max(same, key=lambda one: one.value, default=Bound(0, "not proven again", bound.kind, bound.ranks))


def _refuted(lanes: Lanes, value: int, states: int) -> bool:
    """Whether less than `value` µs is refuted with so many partial orders."""
    answer, tried = by_induction(lanes, value, states // 2)
    if answer is not Answer.REFUTED:
        answer, _ = Climb(lanes, FAR, 1).attempt(value - 1, states - tried)
    return answer is Answer.REFUTED
