"""A user's own work beside the step: which ranks do it, how much fits without a longer step, and a proof of the most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..build.work import MOST_PIECES, Work, homes_of, with_work
from ..ilp.bounds.closed_forms import closed_form
from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.errors import BadInput, NotFound
from .certify import QUICK_PASSES
from .solver import solve

FEW_CHOICES, MOST_VISITS = 64, 5_000  # up to so many choices all are tried; steps of listing them at most
SEARCHES = 5  # searches that `work_room` needs, about
ALONE_SHARE, FIRST_SHARE, LOOK_SHARE = 0.2, 0.2, 0.02  # of the time: the step alone; a first choice; every other choice
Homes = tuple[tuple[int, ...], ...]  # for each work the rank of each of its pieces


class Placed(NamedTuple):
    """schedule: of the best choice of ranks. bound: a proven lower bound over every choice, µs."""

    schedule: Schedule
    bound: int


def is_open(works: Sequence[Work]) -> bool:
    """Whether the ranks or the number of pieces of some work are open."""
    return any(work.chosen or work.pieces is None for work in works)


def with_open_work(
    alone: Schedule, works: Sequence[Work], *, seconds: float = 10.0, effort: float | None = None, **options: Any
) -> Placed | Room:
    """Solve a step with work of which something is open. alone: its solved schedule without work. seconds, effort: of all
    searches together. options: of each search. Raises BadInput, Infeasible, NotFound."""
    first, problem = works[0], alone.problem
    if all(work.pieces is not None for work in works):
        return place_work(problem, *works, seconds=seconds, effort=effort, alone=alone, **options)
    if any(work != Work(work.rank, first.time, None) for work in works) or (first.chosen and len(works) > 1):
        raise BadInput("work: how much fits ('most') is for one work alone, whose pieces are alike and at any moment")
    ranks = [rank for work in works for rank in work.ranks(problem)]
    options |= {"together": first.chosen, "alone": alone, "seconds": seconds / SEARCHES}
    return work_room(problem, first.times[0], ranks, effort=None if effort is None else effort / SEARCHES, **options)


def place_work(
    problem: Problem,
    *works: Work,
    seconds: float = 10.0,
    effort: float | None = None,
    alone: Schedule | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Placed:
    """Solve the step with these works, and choose the ranks that are open.

    problem: the step without work.
    works: see `Work`.
    seconds, effort: of all searches together.
    alone: a solved schedule of the step without work, if known.
    stop: asked between two searches.
    options: of each search (see `solve`).

    The step without open work gives a lower bound, and gaps where pieces are put first. Then other choices are tried: all
    that may be shorter if there are few; else pieces move to other ranks one by one, as long as the step gets shorter.
    Raises BadInput, Infeasible, NotFound.
    """
    clock, options = Clock(seconds, effort), {"prefer": None, **options}
    step = with_work(problem, *works)
    open_rows = np.array([work.chosen for work in works for _ in work.times], bool)
    fixed = step.only(np.setdiff1d(np.arange(len(step.passes)), len(problem.passes) + np.flatnonzero(open_rows)))
    search = _Search(problem, works, clock, options, alone, stop)
    if alone is None or len(fixed.passes) > len(problem.passes):
        search.alone = search.solved(fixed, ALONE_SHARE * clock.total if open_rows.any() else clock.left)
    assert search.alone is not None
    if not open_rows.any():
        return Placed(search.alone, _bound(search.alone))
    return search.placed(max(_bound(search.alone), _least_value(problem, works)))


@dataclass
class _Search:
    """The search for ranks. alone: the best schedule without open work. least: homes of pieces → a lower bound of the step
    with them, µs. best: the shortest schedule, whose pieces are at `homes`."""

    problem: Problem
    works: Sequence[Work]
    clock: Clock
    options: dict[str, Any]
    alone: Schedule | None
    stop: Callable[[], bool]
    least: dict[Homes, int] = field(default_factory=dict)
    best: Schedule | None = None
    homes: Homes = ()

    def placed(self, floor: int) -> Placed:
        """Search the choices. floor: a lower bound over every choice, µs."""
        first = [self._in_gaps(), tuple(tuple(homes.tolist()) for homes in homes_of(self.problem, self.works))]
        for homes in dict.fromkeys(first):
            if not self._ends(floor):
                self._look(homes, FIRST_SHARE * self.clock.total)
        while (all_choices := self._choices(self._value)) is None and self._moved(floor):
            pass
        open_choices = [self.homes] if all_choices is None else all_choices
        self.least |= {homes: self._step(homes)[1] for homes in open_choices if homes not in self.least}
        for homes in 2 * sorted(open_choices, key=self.least.__getitem__):
            if not self._ends(floor):
                self._look(homes, self.clock.left / 2)
        if self.best is None:
            raise NotFound("work: no schedule was found for any choice of ranks in this time")
        least = None if all_choices is None else min((self.least[homes] for homes in all_choices), default=self._value)
        return Placed(self.best, max(floor, min(least or 0, self._value)))

    def solved(self, step: Problem, share: float) -> Schedule:
        """A schedule of the step, searched for `share` seconds or effort."""
        hint = None if self.alone is None else _filled(self.alone, step)
        schedule = solve(step, **self.clock.limit(0.0 if self.stop() else share), hint=hint, **self.options)
        self.clock.spend(share)
        return schedule

    @property
    def _value(self) -> int:
        return round(self.best.timeline().value) if self.best is not None else 2**62

    def _ends(self, floor: int) -> bool:
        over = self.clock.left < LOOK_SHARE * self.clock.total or self.stop()
        return self._value <= floor or (self.best is not None and over)

    def _step(self, homes: Homes) -> tuple[Problem, int]:
        """The step of a choice, and its closed-form bound, µs."""
        step = with_work(self.problem, *(replace(work, homes=ranks) for work, ranks in zip(self.works, homes, strict=True)))
        small = len(step.passes) <= QUICK_PASSES
        return step, max(step.work, closed_form(step).value if small else 0)

    def _look(self, homes: Homes, share: float) -> bool:
        """Search a choice if it may be shorter than the best. Returns whether it is."""
        step, least = self._step(homes)
        self.least[homes] = least = max(least, self.least.get(homes, 0))
        if least >= self._value:
            return False
        try:
            schedule = self.solved(step, share)
        except NotFound:
            return False
        self.least[homes] = max(least, _bound(schedule))
        if shorter := round(schedule.timeline().value) < self._value:
            self.best, self.homes = schedule, homes
        return shorter

    def _choices(self, below: int) -> list[Homes] | None:
        """All different choices with which each rank computes for less than `below` µs; None if there are too many."""
        works, choices = self.works, list[Homes]()
        pieces = [
            (work.ranks(self.problem) if work.chosen else (rank,), time if work.stream == "compute" else 0, at > 0 and alike)
            for number, (work, homes) in enumerate(zip(works, homes_of(self.problem, works), strict=True))
            for alike in (_alike(works, number),)
            for at, (rank, time) in enumerate(zip(homes.tolist(), work.times, strict=True))
        ]
        left = np.cumsum([0, *(time for _, time, _ in reversed(pieces))])[::-1].tolist()
        ends, stack = np.cumsum([len(work.times) for work in works])[:-1], [(list[int](), self.problem.busy.tolist())]
        for _ in range(MOST_VISITS):
            if not stack or len(choices) > FEW_CHOICES:
                return choices if len(choices) <= FEW_CHOICES else None
            row, load = stack.pop()
            if len(row) == len(pieces):
                choices.append(tuple(tuple(array.tolist()) for array in np.split(np.array(row), ends)))
                continue
            ranks, time, alike = pieces[len(row)]
            for rank in ranks[::-1]:
                more = [*load[:rank], load[rank] + time, *load[rank + 1 :]]
                fits = not time or (more[rank] < below and left[len(row) + 1] <= sum(below - 1 - used for used in more))
                if fits and not (alike and rank < row[-1]):
                    stack.append(([*row, rank], more))
        return None

    def _moved(self, floor: int) -> bool:
        """Move one piece to another rank, to the least busy ones first. Returns whether the step got shorter."""
        load = self.best.problem.busy  # type: ignore[union-attr]
        tries = [
            (load[rank] + work.times[piece], number, piece, rank)
            for number, work in enumerate(self.works)
            for piece, home in enumerate(self.homes[number])
            for rank in (work.ranks(self.problem) if work.chosen else ())
            if rank != home and (piece + 1 == len(work.times) or self.homes[number][piece + 1] != home)
        ]
        for _, number, piece, rank in sorted(tries):
            row = list(self.homes[number])
            row[piece] = rank
            kept = tuple(sorted(row)) if _alike(self.works, number) else tuple(row)
            homes = (*self.homes[:number], kept, *self.homes[number + 1 :])
            if self._ends(floor):
                return False
            if homes not in self.least and self._look(homes, LOOK_SHARE * self.clock.total):
                return True
        return False

    def _in_gaps(self) -> Homes:
        """A choice that puts open pieces into gaps of the step alone, the longest piece first. Pieces that fit no gap stay
        where `homes_of` has them."""
        assert self.alone is not None
        free = _gaps(self.alone)
        rank = np.repeat(np.arange(self.problem.ranks), [len(row) for row in free])
        left, placed = np.concatenate(free), [homes.copy() for homes in homes_of(self.problem, self.works)]
        pieces = [(-time, i, at) for i, work in enumerate(self.works) if work.chosen for at, time in enumerate(work.times)]
        for time, number, piece in sorted(pieces):
            able = np.flatnonzero((left >= -time) & np.isin(rank, self.works[number].ranks(self.problem)))
            if len(able):
                gap = able[left[able].argmin()]
                left[gap] += time
                placed[number][piece] = rank[gap]
        return tuple(tuple(np.sort(row).tolist() if _alike(self.works, i) else row.tolist()) for i, row in enumerate(placed))


def _bound(schedule: Schedule) -> int:
    assert schedule.certificate is not None
    return schedule.certificate.bound


def _alike(works: Sequence[Work], number: int) -> bool:
    """Whether a work's pieces are interchangeable: open ranks, equally long, and no other work takes or gives results."""
    tied = works[number].takes is not None or any(work.takes == number for work in works)
    return works[number].chosen and not tied and len(set(works[number].times)) == 1


def _least_value(problem: Problem, works: Sequence[Work]) -> int:
    """A lower bound of a step with these works over every choice, µs: a rank runs whole pieces, after its other passes."""
    busy = problem.busy.copy()
    for work in works:
        if not work.chosen and work.stream == "compute":
            busy[work.ranks(problem)[0]] += sum(work.times)
    wanted = [work for work in works if work.chosen and work.stream == "compute"]

    def fit(value: int) -> bool:
        room = {rank: max(0, int(value - busy[rank])) for work in wanted for rank in work.ranks(problem)}
        pieces = (sum(room[rank] // max(1, min(work.times)) for rank in work.ranks(problem)) for work in wanted)
        return sum(room.values()) >= sum(sum(work.times) for work in wanted) and all(
            have >= len(work.times) for have, work in zip(pieces, wanted, strict=True)
        )

    return bisect_left(range(int(busy.max()) + sum(sum(work.times) for work in wanted) + 1), True, key=fit)


def _gaps(schedule: Schedule) -> list[Ints]:
    """For each rank the idle µs before each of its passes, and behind the last one."""
    gaps, timeline, value = [], schedule.timeline(), round(schedule.timeline().makespan)
    for rank in range(schedule.problem.ranks):
        times = [timeline[name] for name in schedule.order[f"compute:{rank}"]]
        free = zip([0, *(end for _, end in times)], [*(start for start, _ in times), value], strict=True)
        gaps.append(np.array([int(start - end) for end, start in free], np.int64))
    return gaps


def _filled(alone: Schedule, step: Problem) -> Schedule | None:
    """A schedule of the step from one with less work: the order of that, with further pieces in turn in the first gaps that
    are long enough. None if a piece depends on other passes or does not compute."""
    order, p, e, known = dict(alone.order), step.passes, step.edges, alone.problem.index
    new = np.array([name not in known for name in step.names])
    tied = (new[e.before] != new[e.after]) | (new[e.before] & (e.carries > 0))
    if tied.any() or not step.computing[new].all():
        return None
    for rank, gaps in enumerate(_gaps(alone)):
        waiting, filled = list(np.flatnonzero(new & (p.rank == rank))), list[str]()
        for gap, name in zip(gaps.tolist(), (*alone.order[f"compute:{rank}"], ""), strict=True):
            while waiting and (gap >= p.duration[waiting[0]] or not name):
                gap -= int(p.duration[waiting[0]])
                filled.append(step.names[waiting.pop(0)])
            filled.append(name)
        order[f"compute:{rank}"] = tuple(filled[:-1])
    return Schedule(step, order, alone.syncs)


# --- How much fits ---


@dataclass(frozen=True, slots=True)
class Room:
    """Equal pieces of work beside a step that does not get longer by them.

    value: µs of the step, with and without the work.
    pieces: how many `schedule` does, on each of the ranks or on all together.
    most: a proven upper bound on the pieces in any order of the step without making it longer. If microbatches differ, it
        holds for orders that run each stage's microbatches by number.
    share: the share of all ranks' time in the step that the pieces take.
    bubble: the share that the step without work leaves idle.
    """

    value: int
    pieces: int
    most: int
    share: float
    bubble: float
    schedule: Schedule


def work_room(
    problem: Problem,
    piece: int,
    ranks: Sequence[int],
    *,
    together: bool = False,
    seconds: float = 10.0,
    effort: float | None = None,
    **options: Any,
) -> Room:
    """How many equal pieces of work fit into a step, at any moment, without making it longer.

    piece: µs of a piece.
    ranks, together: each of these ranks does as many pieces; with `together` the number is that of all, however shared.
    seconds, effort: of each of about five searches: one of the step alone, then one for each number of pieces tried.
    options: of each search (see `place_work`), and its `alone` and `stop`. Raises BadInput, Infeasible, NotFound.
    """
    if not ranks:
        raise BadInput("work: on one rank at least")
    if problem.objective != "makespan":
        raise BadInput(f"work: objective '{problem.objective}': only a step with a makespan has room for work")
    ranks = tuple(dict.fromkeys(ranks))
    with_work(problem, *(Work(rank, piece) for rank in ranks))  # raises BadInput before the search
    search: dict[str, Any] = {"seconds": seconds, "effort": effort, **options}
    base, stop = search.pop("alone", None) or place_work(problem, **search).schedule, options.get("stop", lambda: False)
    value = round(base.timeline().value)
    busy = problem.busy
    of_all = sum if together else min
    most = of_all(int(value - busy[rank]) // piece for rank in ranks)
    if most > MOST_PIECES:
        raise BadInput(f"work: {most} pieces of {piece} µs may fit, and {MOST_PIECES} are possible: take longer ones")
    pieces, above, schedule, gaps = 0, most, base, _gaps(base)
    least = of_all(int((gaps[rank] // piece).sum()) for rank in ranks)
    while pieces < above and not stop():
        count = least if pieces < least <= above else above if above == most else (pieces + above + 1) // 2
        works = [Work(rank, count * piece, count) for rank in ((ranks,) if together else ranks)]
        filled, bound = place_work(problem, *works, **search, alone=base)
        if filled.timeline().value <= value:
            pieces, schedule = count, filled
            continue
        above = count - 1
        if bound > value:
            most = above
    whole, times = value * problem.ranks, 1 if together else len(ranks)
    return Room(value, pieces, most, pieces * piece * times / whole, float(1 - busy.sum() / whole), schedule)
