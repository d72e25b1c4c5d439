"""Which layout of a plan is searched next, and for how long: asynchronous successive halving (1810.05934).

Greedy schedules say little of a layout, so every layout that is looked at gets a search, the most promising first. One in
`REDUCTION` of these is searched again `REDUCTION` times longer, and one in as many of those once more, whenever there are
enough to choose from. So searches of each length take about as much time together, however much time there is.
`SpaceRace` is what a plan is made of while it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from ..search.task import Task
from ..search.task_runner import TaskRunner
from ..util.clock import Clock, TimeShare
from .bounds.layout_rules import NEVER
from .bounds.space_bounds import SpaceBounds, raising
from .candidate import Candidate, Unsolved, in_a_named_order, in_its_order, retimed, unsolved
from .cluster import Cluster
from .costs.layer_costs import Model
from .estimates import Floats, Promise, estimated_steps, large_steps
from .layout import Layout, rows_of

FIRST_ROWS = 300  # layouts whose bounds are raised before the first search
ROUND = 8  # searches that are drawn at once where effort is the limit
POOR = 1.5  # times its bound: a step whose layout is searched with fused backwards, too

Progress = Callable[[str], None]


@dataclass
class SpaceRace:
    """What a plan is made of while it grows. searches: row of a layout → how many searches it had; poor: row → µs, of those
    with a poor step or none, whose fused backwards were not searched; priced: rows whose known orders were looked at."""

    model: Model
    cluster: Cluster
    memory: int
    clock: Clock
    runner: TaskRunner
    seed: int
    bounds: SpaceBounds
    progress: Progress
    stop: Callable[[], bool]
    candidates: list[Candidate] = field(default_factory=list)
    searches: dict[int, int] = field(default_factory=dict)
    poor: dict[int, float] = field(default_factory=dict)
    priced: set[int] = field(default_factory=set)
    promise: Promise = field(init=False)
    _rows: dict[Layout, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.promise = Promise.of(self.bounds.layout, estimated_steps(self.bounds, self.memory))

    def begin(self, first: Candidate | None) -> None:
        """Go on from a candidate of a part of this space, where there is one, with the lowest bounds raised."""
        if first is not None:
            self.candidates.append(first)
            self.priced.add(self.row(first.layout))
        self.raise_bounds(FIRST_ROWS)

    @property
    def value(self) -> float:
        """µs of the best step so far."""
        return min((candidate.value for candidate in self.candidates), default=np.inf)

    @property
    def rival(self) -> float:
        """What searches have to beat, µs; −∞ where the time is over and there is a plan."""
        return -np.inf if self.candidates and self.clock.left <= 0 else self.value

    @property
    def over(self) -> bool:
        """Somebody ended it, and there is a plan."""
        return bool(self.candidates) and self.stop()

    def keep(self, new: Candidate) -> None:
        """Note a candidate: in the place of one of its layout where it is better."""
        for at, each_candidate in enumerate(self.candidates):
            if each_candidate.layout == new.layout:
                self.candidates[at] = min(each_candidate, new, key=lambda candidate: candidate.value)
                break
        else:
            self.candidates.append(new)
        self.told()

    def told(self) -> None:
        """Tell value and gap."""
        gap = 1 - self.bounds.least / self.value
        self.progress(f"{len(self.candidates)} layouts solved: step {self.value / 1e3:,.1f} ms, gap {max(gap, 0.0):.2%}")

    def row(self, layout: Layout) -> int:
        """The row of this layout."""
        if layout not in self._rows:
            self._rows[layout] = int(rows_of(self.bounds.layout, layout)[0])
        return self._rows[layout]

    def raise_bounds(self, count: int | None = None) -> None:
        """Higher bounds wherever they leave a layout in the race (count: of so many, the lowest), in half of the real time
        that is left: the rest is for searches."""
        half = TimeShare(self.clock, self.clock.used + self.clock.left / 2)
        for higher in raising(self.bounds, self.memory, self.value, count):
            self.bounds = higher
            if half.over and not self.clock.counted:
                break
        self.promise = replace(self.promise, estimate=estimated_steps(self.bounds, self.memory))

    def solve(self, tasks: Iterator[Task]) -> None:
        """Keep what searches find. A search that cannot get below the best step ends early: then its bound tells more."""
        for answer in self.runner.answers(tasks, ROUND):
            unsolved: Unsolved = answer.task.of
            self._ended(unsolved, None if answer.schedule is None else unsolved.solved(answer.schedule))

    def _ended(self, pending: Unsolved, candidate: Candidate | None) -> None:
        row, lost = self.row(pending.layout), candidate is not None and candidate.bound >= self.value
        step = POOR * self.bounds.step[row] if candidate is None else candidate.bound if lost else candidate.value
        if candidate is not None:
            self.keep(candidate)
        if self.searches[row] == 1:
            self.promise.ended(row, step)
            if step >= POOR * self.bounds.step[row] and not pending.step.fused:
                self.poor[row] = step


InOrder = Callable[..., Candidate | None]  # a layout in the best of some known orders
FIRST_LOOKS = 6  # layouts that are searched before all bounds are raised
# Effort of a layout's first search: so much a pass, about as long as what every search begins with takes, and at least.
EFFORT_PER_PASS, LEAST_EFFORT = 3e-5, 0.1
PRICED_PER_PASS = 1e-5  # effort of an order that is only priced
NAMED_SHARE = 0.1  # of the time, for named orders
REDUCTION = 4
LAST = 1e3  # times as long: behind all others


def search_at_start(race: SpaceRace, start: Sequence[Candidate]) -> None:
    """Candidates of other plans whose layouts are in this race too: as they are ordered there, or searched afresh."""
    tasks = []
    for candidate in start[:FIRST_LOOKS]:
        for row in rows_of(race.bounds.layout, candidate.layout).tolist():
            if race.bounds.pipeline[row] != NEVER and row not in race.searches:
                if (again := retimed(candidate, race.model, race.cluster, race.memory)) is not None:
                    race.keep(again)
                tasks.append(_first_of(race, row, fused=False))
    race.solve(task for task in tasks if task is not None)


def search_space(race: SpaceRace) -> None:
    """Searches until no time is left, or no bound leaves anything to search. After the first ones, bounds are raised
    wherever they leave a layout in the race. However little time there is, some layout gets a schedule where one does."""
    race.solve(islice(_tasks(race), FIRST_LOOKS))
    if race.stop():
        return
    if race.clock.left > 0:
        race.raise_bounds()
    price_named(race)
    race.solve(_tasks(race))
    while not race.candidates and (task := _first_search(race)) is not None:
        race.solve(iter([task]))


def price_space(race: SpaceRace) -> None:
    """Steps of an engine's own orders, the most promising layout first: all that no bound excludes, or as many as there is
    time for, and one in any case."""
    while (race.clock.left > 0 and not race.over) or not race.candidates:
        if len(race.priced) == FIRST_LOOKS:
            race.raise_bounds()
        if (row := _most_promising(race, race.promise.estimate, race.priced)) is None:
            return
        _price(race, row, in_its_order)


def price_first(race: SpaceRace, in_order: InOrder) -> None:
    """A step in a known order, of the most promising layout that has one."""
    promise = _of_known_orders(race)
    while not race.candidates and (row := _most_promising(race, promise.step, race.priced)) is not None:
        _price(race, row, in_order)


def price_named(race: SpaceRace) -> None:
    """Steps in named orders of the most promising layouts that have them, in a share of the time but a few while there is
    any: so no plan is worse than what everybody knows, however little its searches find."""
    share, promise = race.clock.part(NAMED_SHARE), _of_known_orders(race)
    while (len(race.priced) < FIRST_LOOKS or not share.over) and race.clock.left > 0 and not race.over:
        if (row := _most_promising(race, promise.step, race.priced)) is None:
            return
        promise.ended(row, _price(race, row, in_a_named_order) or POOR * promise.estimate[row])


def _of_known_orders(race: SpaceRace) -> Promise:
    """The layouts that have them. Where a sharded vocabulary, slices or offload ask for orders of their own, or a step is
    large, these are left to searches."""
    layout = race.bounds.layout
    return Promise.of(layout, np.where(layout.is_plain & ~large_steps(layout), race.promise.estimate, np.inf))


def _most_promising(race: SpaceRace, steps: Floats, done: Collection[int]) -> int | None:
    """The layout with the least of these steps whose bound is below the best one, but for those done; None: none is left."""
    steps = np.where(race.bounds.step < race.value, steps, np.inf)
    steps[list(done)] = np.inf
    row = int(steps.argmin())
    return None if np.isinf(steps[row]) else row


def _price(race: SpaceRace, row: int, in_order: InOrder) -> float | None:
    """µs of a layout's step in known orders, which is kept; None where none holds."""
    layout = race.bounds.layout.row(row)
    race.priced.add(row)
    race.clock.spend(PRICED_PER_PASS * 2 * layout.count * layout.stages)
    candidate = in_order(race.model, layout, race.cluster, race.memory)
    if candidate is None:
        return None
    race.keep(candidate)
    return candidate.value


def _tasks(race: SpaceRace) -> Iterator[Task]:
    """One search after the other: a longer one of a layout among the best of those that had as long ones, else the first one
    of the most promising layout, else a longer one that is left."""
    while race.clock.left > 0:
        task = _longer_search(race, REDUCTION) or _first_search(race) or _longer_search(race, 1)
        if task is None:
            return
        yield task


def _longer_search(race: SpaceRace, reduction: int) -> Task | None:
    """A longer search of one of the best layouts, as many as one in `reduction` of those searched as long; the longest ones
    first. None where there is none, or no time for it."""
    searched = (choice for choice in race.candidates if race.row(choice.layout) in race.searches)  # others were only priced
    able = sorted((choice for choice in searched if choice.bound < race.value), key=lambda row: row.value + row.bound)
    times = [race.searches[race.row(candidate.layout)] for candidate in able]
    for most in sorted(set(times), reverse=True):
        best = [candidate for candidate, count in zip(able, times, strict=True) if count >= most]
        for candidate in best[: sum(count >= most for count in race.searches.values()) // reduction]:
            row, effort = race.row(candidate.layout), _first_effort(candidate.unsolved) * REDUCTION**most
            if race.searches[row] == most and effort <= race.clock.left:
                race.searches[row] += 1
                return _task(race, candidate.unsolved, effort, {"seed": race.seed + most, "hint": candidate.schedule})
    return None


def _first_search(race: SpaceRace) -> Task | None:
    """The first search of the most promising layout whose bound is below the best step, those of large steps behind all
    others. None where there is none."""
    last = np.where(large_steps(race.bounds.layout), LAST, 1.0)
    while True:
        steps = race.promise.step * last
        row = _most_promising(race, steps, race.searches)
        open_ones = [row for row in race.poor if race.bounds.step[row] < race.value]
        poor = min(open_ones, key=lambda row: race.poor[row], default=None)
        fused = poor is not None and (row is None or race.poor[poor] < steps[row])
        if fused:
            assert poor is not None
            row = poor
            del race.poor[row]
        if row is None:
            return None
        if (task := _first_of(race, row, fused)) is not None:
            return task


def _first_of(race: SpaceRace, row: int, fused: bool) -> Task | None:
    """The first search of this layout with backwards in two where that step can be built, else or where `fused` says so with
    fused ones, which may need less memory; None where none can be built."""
    race.searches.setdefault(row, 1)
    for step in unsolved(race.model, race.bounds.layout.row(row), race.cluster, race.memory):
        if step.step.fused or not fused:
            race.promise.begun(row)
            return _task(race, step, _first_effort(step), {"seed": race.seed})
    return None


def _first_effort(pending: Unsolved) -> float:
    return max(LEAST_EFFORT, EFFORT_PER_PASS * len(pending.problem.passes))


def _task(race: SpaceRace, pending: Unsolved, effort: float, options: Mapping[str, Any]) -> Task:
    """A search with so much effort, or with what is left, which the clock counts."""
    if race.clock.counted and race.clock.left > 0:
        effort = min(effort, race.clock.left)
    race.clock.spend(effort)
    return pending.task({"effort": effort, **options})
