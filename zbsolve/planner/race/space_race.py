"""`SpaceRace`: what a plan is made of while it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...search.task import Task
from ...search.task_runner import TaskRunner
from ...util.clock import Clock, TimeShare
from ..bounds.space_bounds import SpaceBounds, raising
from ..candidate import Candidate, Unsolved
from ..cluster import Cluster
from ..costs.layer_costs import Model
from ..layout import Layout, rows_of
from .estimates import Promise, estimated_steps

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

    def _ended(self, one: Unsolved, found: Candidate | None) -> None:
        row, lost = self.row(one.layout), found is not None and found.bound >= self.value
        step = POOR * self.bounds.step[row] if found is None else found.bound if lost else found.value
        if found is not None:
            self.keep(found)
        if self.searches[row] == 1:
            self.promise.ended(row, step)
            if step >= POOR * self.bounds.step[row] and not one.step.fused:
                self.poor[row] = step
