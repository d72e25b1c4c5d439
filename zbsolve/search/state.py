"""What a search knows: the best schedule, the highest bound, the time that is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..greedy.list_scheduler import Policy, list_schedule
from ..ilp.bounds.bound import Bound
from ..ilp.ranks.refutation import NO_INCUMBENT
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.errors import NotFound
from ..verifier import verify

BLOCK_SOLVER = "building block"  # the solver whose schedules blocks do not start from again


@dataclass
class State:
    """The best schedule and bound so far, and who found them. `value` in µs, −1 before the first schedule; `incumbent` is
    the same for compiled searches, which read it while they run: one number, INFINITE before."""

    problem: Problem
    clock: Clock
    bound: Bound
    schedule: Schedule | None = None
    value: int = -1
    incumbent: Ints = field(default_factory=NO_INCUMBENT.copy)
    solver: str = ""
    infeasible: bool = False
    progress: Callable[[State], None] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    stoppers: list[Callable[[], None]] = field(default_factory=list)
    leads: list[Schedule] = field(default_factory=list)  # for blocks to improve: named ones even where memory is exceeded

    def offer(self, schedule: Schedule, solver: str) -> None:
        """Keep `schedule` where it is better and holds."""
        value = int(schedule.timeline().value)
        if (self.schedule is not None and value >= self.value) or verify(self.problem, schedule):
            return
        with self.lock:
            if self.schedule is None or value < self.value:
                self.schedule, self.value, self.solver = schedule, value, solver
                self.incumbent[0] = value
                if solver != BLOCK_SOLVER:
                    self.leads.append(schedule)
                self._changed()

    def offer_policy(self, policy: Policy, solver: str) -> None:
        """The schedule that `policy` makes, if any."""
        with suppress(NotFound):
            self.offer(list_schedule(self.problem, policy), solver)

    def raise_bound(self, bound: Bound) -> None:
        """Keep `bound` where it is higher."""
        with self.lock:
            if bound.value > self.bound.value:
                self.bound = bound
                self._changed()

    def _changed(self) -> None:
        if self.progress is not None:
            self.progress(self)

    @property
    def optimal(self) -> bool:
        """The value equals the bound."""
        return self.schedule is not None and self.value <= self.bound.value

    @property
    def done(self) -> bool:
        """Nothing more to gain: optimal, none exists, or no time is left."""
        return self.optimal or self.infeasible or self.clock.left <= 0
