"""Which layout of a plan is searched next, and for how long: asynchronous successive halving (1810.05934).

A greedy schedule says little about how good a layout can be, so each layout gets a search, the most promising first. One in
`REDUCTION` of the searched ones is searched again, `REDUCTION` times as long, and one in `REDUCTION` of these once more, and
so on, as soon as there are enough. So searches of each length take about the same time in total. `SpaceRace` is the state.
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
from .estimates import Floats, Promise, estimated_steps, pass_counts
from .layout import Layout, rows_of
from .profiled_model import Model

FIRST_ROWS = 300  # layouts whose bounds are raised before the first search
ROUND = 8  # searches that are chosen together where effort is the limit
POOR = 1.5  # a step at least this many times its bound is poor: its layout is searched with fused backwards too

Progress = Callable[[str], None]


@dataclass
class SpaceRace:
    """The state of a plan's search. Rows number the layouts of the space. searches: row → how many searches it had; poor:
    row → µs, for layouts with a poor step or none whose fused backwards were not searched; priced: rows whose known orders
    were tried."""

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
        """Start with a candidate of a part of this space, where there is one, and raise the lowest bounds."""
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
        """µs that a search has to beat; −∞ where time is over and a candidate exists."""
        return -np.inf if self.candidates and self.clock.left <= 0 else self.value

    @property
    def over(self) -> bool:
        """Whether `stop` returned True and a candidate exists."""
        return bool(self.candidates) and self.stop()

    def keep(self, new: Candidate) -> None:
        """Add a candidate; of two with the same layout only the better one is kept."""
        for at, each_candidate in enumerate(self.candidates):
            if each_candidate.layout == new.layout:
                self.candidates[at] = min(each_candidate, new, key=lambda candidate: candidate.value)
                break
        else:
            self.candidates.append(new)
        self.told()

    def told(self) -> None:
        """Call `progress` with the best step and its gap."""
        gap = 1 - self.bounds.least / self.value
        self.progress(f"{len(self.candidates)} layouts solved: step {self.value / 1e3:,.1f} ms, gap {max(gap, 0.0):.2%}")

    def row(self, layout: Layout) -> int:
        """The row of this layout in the space."""
        if layout not in self._rows:
            self._rows[layout] = int(rows_of(self.bounds.layout, layout)[0])
        return self._rows[layout]

    def raise_bounds(self, count: int | None = None) -> None:
        """Raise the bounds of layouts that no bound excludes yet, within half of the real time left. count: only of this
        many, the lowest."""
        half = TimeShare(self.clock, self.clock.used + self.clock.left / 2)
        for higher in raising(self.bounds, self.memory, self.value, count):
            self.bounds = higher
            if half.over and not self.clock.counted:
                break
        self.promise = replace(self.promise, estimate=estimated_steps(self.bounds, self.memory))

    def solve(self, tasks: Iterator[Task]) -> None:
        """Run searches and keep what they find. A search whose bound reaches the best step ends early."""
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


InOrder = Callable[..., Candidate | None]  # the candidate of a layout in the best of some known orders
FIRST_LOOKS = 6  # layouts that are searched before all bounds are raised
# Effort of a layout's first search: per pass, about what the start of every search takes; and the least in total.
EFFORT_PER_PASS, LEAST_EFFORT = 3e-5, 0.1
PRICED_PER_PASS = 1e-5  # effort per pass of an order whose time is computed without a search
NAMED_SHARE = 0.1  # share of the time for named orders
REDUCTION = 4
LARGE = 150_000  # passes of a step that is not priced in named orders
AFFORDABLE = 0.25  # share of the time left: layouts whose first search takes more come last
LAST = 1e3  # factor on their estimates


def search_at_start(race: SpaceRace, start: Sequence[Candidate]) -> None:
    """Try candidates of other plans whose layouts are in this space: keep each with its order, and search its layout too."""
    tasks = []
    for candidate in start[:FIRST_LOOKS]:
        for row in rows_of(race.bounds.layout, candidate.layout).tolist():
            if race.bounds.pipeline[row] != NEVER and row not in race.searches:
                if (again := retimed(candidate, race.model, race.cluster, race.memory)) is not None:
                    race.keep(again)
                tasks.append(_first_of(race, row, fused=False))
    race.solve(task for task in tasks if task is not None)


def search_space(race: SpaceRace) -> None:
    """Search until no time is left or every layout is excluded. After the first searches, bounds of the layouts still in the
    race are raised. However little time there is, it goes on until some layout has a schedule, where one can have one."""
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
    """Compute steps in an engine's own orders, the most promising layout first: of all layouts that no bound excludes, or as
    many as time allows, but at least until one has a step."""
    while (race.clock.left > 0 and not race.over) or not race.candidates:
        if len(race.priced) == FIRST_LOOKS:
            race.raise_bounds()
        if (row := _most_promising(race, race.promise.estimate, race.priced)) is None:
            return
        _price(race, row, in_its_order)


def price_first(race: SpaceRace, in_order: InOrder) -> None:
    """Compute a step in a known order, of the most promising layout that has one."""
    promise = _of_known_orders(race)
    while not race.candidates and (row := _most_promising(race, promise.step, race.priced)) is not None:
        _price(race, row, in_order)


def price_named(race: SpaceRace) -> None:
    """Compute steps in named orders of the most promising layouts, in `NAMED_SHARE` of the time, but of `FIRST_LOOKS` while
    any time is left. So a plan is not worse than these known orders, however little its searches find."""
    share, promise = race.clock.part(NAMED_SHARE), _of_known_orders(race)
    while (len(race.priced) < FIRST_LOOKS or not share.over) and race.clock.left > 0 and not race.over:
        if (row := _most_promising(race, promise.step, race.priced)) is None:
            return
        promise.ended(row, _price(race, row, in_a_named_order) or POOR * promise.estimate[row])


def _of_known_orders(race: SpaceRace) -> Promise:
    """The estimates of layouts that known orders fit; others are infinite. What is not plain needs orders
    of its own, so these layouts, and those with large steps, are left to searches."""
    layout = race.bounds.layout
    return Promise.of(layout, np.where(layout.is_plain & (pass_counts(race.bounds) <= LARGE), race.promise.estimate, np.inf))


def _most_promising(race: SpaceRace, steps: Floats, done: Collection[int]) -> int | None:
    """The row with the least of these steps among layouts whose bound is below the best step, except `done`; None: none."""
    steps = np.where(race.bounds.step < race.value, steps, np.inf)
    steps[list(done)] = np.inf
    row = int(steps.argmin())
    return None if np.isinf(steps[row]) else row


def _price(race: SpaceRace, row: int, in_order: InOrder) -> float | None:
    """Keep a layout's candidate in the best of known orders, and return its step, µs; None where no such order is legal."""
    layout = race.bounds.layout.row(row)
    race.priced.add(row)
    race.clock.spend(PRICED_PER_PASS * 2 * layout.count * layout.stages)
    candidate = in_order(race.model, layout, race.cluster, race.memory)
    if candidate is None:
        return None
    race.keep(candidate)
    return candidate.value


def _tasks(race: SpaceRace) -> Iterator[Task]:
    """The next searches: a longer one of a layout among the best that had as many; else the first one of the most promising
    layout; else any longer one that is left."""
    while race.clock.left > 0:
        task = _longer_search(race, REDUCTION) or _first_search(race) or _longer_search(race, 1)
        if task is None:
            return
        yield task


def _longer_search(race: SpaceRace, reduction: int) -> Task | None:
    """A longer search of a layout among the best 1 / `reduction` of those that had as many searches; layouts with the most
    searches come first. None where there is none, or no time for it."""
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
    """The first search of the most promising layout whose bound is below the best step, or of a poor layout's fused
    backwards; layouts whose search takes too much of the time left come last. None where there is none."""
    last = np.where(EFFORT_PER_PASS * pass_counts(race.bounds) > AFFORDABLE * race.clock.left, LAST, 1.0)
    while True:
        steps = race.promise.step * last
        row = _most_promising(race, steps, race.searches)
        open_ones = [row for row in race.poor if race.bounds.step[row] < race.value]
        poor = min(open_ones, key=lambda row: race.poor[row], default=None)
        fused = poor is not None and (row is None or race.poor[poor] < steps[row])
        row = poor if fused else row
        if row is None:
            return None
        race.poor.pop(row, None)  # where `row` is `poor`
        if (task := _first_of(race, row, fused)) is not None:
            return task


def _first_of(race: SpaceRace, row: int, fused: bool) -> Task | None:
    """The first search of this layout: with split backwards where that step can be built, else, or where `fused` asks for
    it, with fused ones, which may need less memory. None where no such step can be built."""
    race.searches.setdefault(row, 1)
    for step in unsolved(race.model, race.bounds.layout.row(row), race.cluster, race.memory):
        if step.step.fused or not fused:
            race.promise.begun(row)
            return _task(race, step, _first_effort(step), {"seed": race.seed})
    return None


def _first_effort(pending: Unsolved) -> float:
    return max(LEAST_EFFORT, EFFORT_PER_PASS * len(pending.problem.passes))


def _task(race: SpaceRace, pending: Unsolved, effort: float, options: Mapping[str, Any]) -> Task:
    """A search with this effort, or with what is left of it; the clock counts it at once."""
    if race.clock.counted and race.clock.left > 0:
        effort = min(effort, race.clock.left)
    race.clock.spend(effort)
    return pending.task({"effort": effort, **options})
