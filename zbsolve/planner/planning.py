"""`plan`: the best layout of a model on a cluster that was found, and a bound for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ..search.task import Task
from ..search.task_runner import TaskRunner
from ..util.clock import Clock
from ..util.errors import NotFound, WrongBound, interruption
from ..util.text import parse_bytes
from ..workers.workers import Workers, WorkersLost
from .bound_kernels import NEVER
from .candidate import MIN_REPEATED, Candidate, retimed, unsolved
from .cluster import Cluster
from .cluster_presets import cluster_of
from .estimates import estimated_steps
from .layer_costs import Model
from .layout import VEE, rows_of
from .plan_file import Plan
from .solved_space import SAME_US
from .space import layouts
from .space_bounds import SpaceBounds, cheap_bounds, raised

FIRST_LOOKS = 6  # layouts that get a schedule before all bounds are raised
FIRST_ROWS = 300  # layouts whose bounds are raised before there is an incumbent
ROUND = 16  # searches that are drawn at once where effort is the limit
QUICK_EFFORT = 0.1  # of a first schedule
QUICK_SHARE = 0.5  # of the time goes to first schedules at most
# Layouts near the best one have these in common with it; so many are searched then, for this share of the time left.
NEAR, KEEPING = ("dp", "tp", "pp", "size"), ("recompute", "vocabulary", "slices", "offload")
NEAR_SEARCHES, NEAR_SHARE = 4, 0.4
# Then the best candidates are searched, time after time: how many, and which share of the time left they get together.
SEARCHES = ((6, 0.3), (3, 0.3), (1, 0.4))

Progress = Callable[[str], None]


@dataclass
class _Race:
    """What a plan is made of while it grows. best comes first."""

    model: Model
    cluster: Cluster
    memory: int
    clock: Clock
    runner: TaskRunner
    seed: int
    bounds: SpaceBounds
    candidates: list[Candidate]
    looked_at: set[int]
    progress: Progress
    stop: Callable[[], bool]

    @property
    def value(self) -> float:
        """µs of the best step so far."""
        return min((one.value for one in self.candidates), default=np.inf)

    @property
    def rival(self) -> float:
        """What searches have to beat, µs; −∞ where the time is over and there is a plan."""
        return -np.inf if self.candidates and self.clock.left <= 0 else self.value

    @property
    def over(self) -> bool:
        """Somebody ended it, and there is a plan."""
        return bool(self.candidates) and self.stop()

    def keep(self, found: Candidate) -> None:
        """Note a candidate: in the place of one of its layout where it is better."""
        for at, one in enumerate(self.candidates):
            if one.layout == found.layout:
                self.candidates[at] = min(one, found, key=lambda candidate: candidate.value)
                break
        else:
            self.candidates.append(found)
        self.told()

    def told(self) -> None:
        """Tell value and gap."""
        gap = 1 - self.bounds.least / self.value
        self.progress(f"{len(self.candidates)} layouts solved: step {self.value / 1e3:,.1f} ms, gap {max(gap, 0.0):.2%}")


def plan(
    model: Model,
    devices: int,
    batch: int,
    cluster: Cluster | str | os.PathLike[str],
    *,
    memory: str | int | None = None,
    seconds: float = 60.0,
    effort: float | None = None,
    seed: int = 0,
    progress: Progress = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    start: Sequence[Candidate] = (),
    workers: Workers | None = None,
) -> Plan:
    """How to split a step of `batch` sequences over `devices` devices, with a bound over the whole space.

    Every legal layout is enumerated. Dominance, the least memory and bounds for every partition and schedule prune; the
    others are solved on their balanced partition, the most promising first, and the best candidates longer. cluster: also a
    preset's name or a file. memory: of a device ("80GiB"); None: the cluster's. effort: in place of seconds, for the same
    answer on every machine. progress: called with a line. After KeyboardInterrupt, or when `stop` says True, the plan is
    what was found until then. start: candidates of other plans, the best first, whose orders are tried here. workers: who
    solves layouts (`zbsolve.solvers_on`); None: this process. Raises BadInput; Infeasible where nothing fits; NotFound;
    WorkersLost.
    """
    cluster = cluster_of(cluster)
    limit = memory_of(cluster, memory)
    clock = Clock(seconds, effort)
    table = layouts(model, devices, batch, cluster)
    bounds = raised(cheap_bounds(model, table, cluster, limit), limit, np.inf, FIRST_ROWS)
    runner = TaskRunner(workers, clock.counted)
    race = _Race(model, cluster, limit, clock, runner, seed, bounds, [], set(), progress, stop)
    runner.rival, runner.stop, runner.left = lambda: race.rival, lambda: race.over, lambda: clock.left
    _run(race, start)
    found = tuple(sorted(race.candidates, key=lambda one: one.value))
    if race.bounds.least > found[0].value + SAME_US:
        raise WrongBound(
            f"plan: the bound over the space, {race.bounds.least:.3f} µs, is above the step of {found[0].layout.title}, "
            f"{found[0].value:.3f} µs; this is a defect in zbsolve: please report it"
        )
    return Plan(model, cluster, devices, batch, limit, race.bounds, found)


def memory_of(cluster: Cluster, said: str | int | None) -> int:
    """Bytes of a device: what is said, or the cluster's. Raises BadInput."""
    return cluster.memory if said is None else parse_bytes(said)


def _run(race: _Race, start: Sequence[Candidate]) -> None:
    """The race, until its time is over or somebody ends it."""
    try:
        _others(race, start[:FIRST_LOOKS])
        _first_schedules(race)
        if not race.candidates:
            raise NotFound("plan: no schedule of any layout was found in this time, and it is not proven that there is none")
        _solve(race, _near_searches(race))
        _longer_searches(race)
    except (KeyboardInterrupt, SystemError) as error:
        pressed = interruption(error)
        if pressed is None:
            raise
        if not race.candidates:
            raise pressed from None
    except WorkersLost:  # their line was told
        if not race.candidates:
            raise


def _others(race: _Race, start: Sequence[Candidate]) -> None:
    """Candidates of other plans whose layouts are in this race too: as they are ordered there, or solved afresh."""
    rows = []
    for one in start:
        for row in rows_of(race.bounds.layout, one.layout).tolist():
            if race.bounds.pipeline[row] != NEVER and row not in race.looked_at:
                race.looked_at.add(row)
                rows.append(row)
                if (mine := retimed(one, race.model, race.cluster, race.memory)) is not None:
                    race.keep(mine)
    _solve(race, (task for row in rows for task in _first(race, row)))


def _solve(race: _Race, tasks: Iterator[Task]) -> None:
    """First schedules."""
    for answer in race.runner.answers(tasks, ROUND):
        if answer.schedule is not None:
            race.keep(answer.task.of.solved(answer.schedule))


def _first_schedules(race: _Race) -> None:
    """A schedule of each layout whose bound leaves it in the race, the most promising first, for a share of the time. After
    the first ones, bounds are raised wherever they leave a layout in the race."""
    enough = race.clock.left * (1 - QUICK_SHARE)
    for most in (FIRST_LOOKS, len(race.bounds.rule)):
        _solve(race, _looks(race, most, enough))
        if race.stop():
            return
        race.bounds = raised(race.bounds, race.memory, race.value)


def _in_race(race: _Race) -> list[int]:
    """Layouts without a schedule whose bound is below the best step, the most promising first."""
    step = race.bounds.step
    rows = np.argsort(estimated_steps(race.bounds, race.memory), kind="stable").tolist()
    return [row for row in rows if step[row] < race.value and row not in race.looked_at]


def _looks(race: _Race, most: int, enough: float) -> Iterator[Task]:
    """First schedules of so many layouts, until no more than `enough` is left on the clock."""
    rows = _in_race(race)
    layout = race.bounds.layout
    plain = [row for row in rows if not layout.vocabulary[row] and not layout.offload[row]][:most]
    for row in dict.fromkeys([*plain, *rows[:most]] if most == FIRST_LOOKS else rows):
        if race.candidates and race.clock.left <= enough:
            return
        if race.bounds.step[row] < race.value:
            race.looked_at.add(row)
            yield from _first(race, row)


def _first(race: _Race, row: int) -> Iterator[Task]:
    """The layout with named or greedy schedules."""
    race.clock.spend(QUICK_EFFORT)
    options = {"method": "greedy", "effort": QUICK_EFFORT, "seed": race.seed}
    for one in unsolved(race.model, race.bounds.layout.row(row), race.cluster, race.memory):
        yield one.task(options)


def _near(race: _Race) -> list[int]:
    """Other layouts on the best one's ranks that may be shorter: one of each way to keep less, a V where it can be one, the
    least bound first."""
    best = min(race.candidates, key=lambda one: one.value).layout
    itself = rows_of(race.bounds.layout, best)
    layout, step = race.bounds.layout, race.bounds.step
    same = np.all([getattr(layout, name) == getattr(best, name) for name in NEAR], axis=0)
    rows = [row for row in np.flatnonzero(same & (step < race.value)).tolist() if row not in itself]
    first: dict[tuple[int, ...], int] = {}
    for row in sorted(rows, key=lambda row: (layout.placement[row] != VEE, step[row])):
        first.setdefault(tuple(int(getattr(layout, name)[row]) for name in KEEPING), row)
    return sorted(first.values(), key=lambda row: step[row])[:NEAR_SEARCHES]


def _near_searches(race: _Race) -> Iterator[Task]:
    """A search of each layout near the best one, with backwards in two. First schedules say little of them: those of slices
    in little memory take twice what a short search finds."""
    rows = _near(race)
    amount = NEAR_SHARE * race.clock.left / max(len(rows), 1)
    for row in rows:
        if (limit := _spent(race, amount)) is None:
            return
        for one in unsolved(race.model, race.bounds.layout.row(row), race.cluster, race.memory):
            if not one.step.fused:
                yield one.task({**limit, "seed": race.seed})


def _longer_searches(race: _Race) -> None:
    """More time for candidates whose own bound leaves them in the race: first those that are good and may become best, then
    those that are."""
    total = race.clock.left
    for turn, (keep, share) in enumerate(SEARCHES):
        race.candidates.sort(key=lambda one: one.value if turn else one.value + one.bound)
        able = [one for one in race.candidates if one.bound < race.value][:keep]
        if race.clock.left <= 0 or not able:
            return
        turns = ceil(len(able) / race.runner.count)  # so many one after the other
        for answer in race.runner.answers(_searches(race, able, share * total / turns), ROUND):
            if answer.schedule is not None:
                race.keep(replace(answer.task.of, schedule=answer.schedule))


def _searches(race: _Race, able: list[Candidate], amount: float) -> Iterator[Task]:
    """A longer search for each of these, from its schedule."""
    for one in able:
        if (limit := _spent(race, amount)) is None:
            return
        options = {**limit, "seed": race.seed, "hint": one.schedule}
        yield Task(one, one.schedule.problem, options, one.behind, many=MIN_REPEATED)


def _spent(race: _Race, amount: float) -> dict[str, float] | None:
    """The limit of a search that takes so much of the clock, or what is left of it; None where nothing is."""
    amount = min(amount, race.clock.left)
    if amount <= 0:
        return None
    race.clock.spend(amount)
    return {"effort" if race.clock.counted else "seconds": amount}
