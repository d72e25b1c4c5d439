"""The state of a search: the best schedule, the highest bound, and the time that is left."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from ..greedy.lists.list_scheduler import Policy, list_schedule
from ..greedy.side_stream import same_order, with_side_streams, without_orders_beside
from ..ilp.bounds.bound import Bound, rounded_up, value_unit
from ..ilp.bounds.closed_forms import each_closed_form
from ..ilp.bounds.necessary_arcs import MAX_LANES
from ..ilp.ranks.end_losses import NO_INCUMBENT
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.handover import lacking
from ..util.clock import Clock, TimeUp
from ..util.errors import Deadlock, NotFound
from ..util.machine import cores, half_of_cores
from ..verifier import verify

LARGE_PASSES = 20_000  # above so many passes, relaxations cost more than they bring
STARTS = 8  # schedules that are kept as starts for tabu search, good or not
TABU_SOLVER = "tabu search"  # its schedules are no starts for itself: they are close to one that it knew
BLOCK_SOLVER = "building block"  # its schedules are no leads for building blocks


def rooms(problem: Problem) -> tuple[int, ...]:
    """What each rank's peak bytes are divided by to compare ranks: its capacity where they differ (1 for 0), else 1."""
    if problem.capacity is None or len(set(problem.capacity)) == 1:
        return (1,) * problem.ranks
    return tuple(max(1, room) for room in problem.capacity)


def fullness(schedule: Schedule) -> Fraction:
    """The largest peak of a rank: in bytes, or as a share of the rank's capacity where capacities differ."""
    peaks = schedule.timeline().peak_bytes
    return max(Fraction(peak, room) for peak, room in zip(peaks, rooms(schedule.problem), strict=True))


@dataclass(frozen=True, slots=True)
class Contest:
    """What a search knows of others that run beside it.

    threads: how many this search may use; None: all cores.
    rival: returns the best value, µs, of the others, at any time; −∞ ends the search.
    interrupted: called when Ctrl-C ended this search.
    """

    threads: int | None = None
    rival: Callable[[], float] = lambda: math.inf
    interrupted: Callable[[], None] = lambda: None

    @property
    def all_threads(self) -> int:
        """Threads that the search may use."""
        return self.threads or cores()

    @property
    def exact_threads(self) -> int:
        """Threads for CP-SAT while finders run beside it: half of all that the search may use."""
        return half_of_cores() if self.threads is None else max(1, self.threads // 2)


ALONE = Contest()


@dataclass
class State:
    """The best schedule and bound so far, and who found them.

    schedule, value, solver: the best schedule, its value in µs (−1 before there is one), and what found it.
    incumbent: `value` for compiled searches, which read it while they run; shape (1,), INFINITE before there is one.
    enough: a value, µs: the search only asks whether some schedule is as short; None: it looks for the shortest.
    lean, lean_value, lean_solver: the same of the best schedule whose waiting messages fit the memory too (see `handover`);
        of equal values the one with the lowest peak.
    patience: the search ends with this much time left if `schedule` is shorter than `lean`.
    without: names of sources that are left out, to measure what they bring.
    """

    problem: Problem
    clock: Clock
    bound: Bound
    schedule: Schedule | None = None
    value: int = -1
    incumbent: Ints = field(default_factory=NO_INCUMBENT.copy)
    solver: str = ""
    infeasible: bool = False
    enough: int | None = None
    lean: Schedule | None = None
    lean_value: int = -1
    lean_solver: str = ""
    patience: float = 0.0
    contest: Contest = ALONE
    without: frozenset[str] = frozenset()
    progress: Callable[[State], None] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    stoppers: list[Callable[[], None]] = field(default_factory=list)
    exact_threads: int = 0  # on which CP-SAT runs now, the prover's own thread included
    leads: list[Schedule] = field(default_factory=list)  # for block searches to improve; some named ones exceed the memory
    starts: deque[Schedule] = field(default_factory=partial(deque, maxlen=STARTS))  # for tabu search: what others found last
    unit: int = field(init=False)  # µs that divide every value

    def __post_init__(self) -> None:
        self.unit = value_unit(self.problem)
        if self.enough is not None:
            self.incumbent[0] = self.enough + 1  # so that the prover asks for a bound above `enough`

    def offer(self, schedule: Schedule, solver: str) -> None:
        """Keep `schedule` if it is better and valid. First give all ranks one order of the collectives."""
        try:
            if not same_order(schedule):
                schedule = with_side_streams(self.problem, without_orders_beside(schedule))
            value = int(schedule.timeline().value)
        except Deadlock:  # in tight memory collectives of one order may wait in a circle
            return
        if solver != TABU_SOLVER:
            self.starts.append(schedule)
        if self.schedule is not None and value >= self.value:
            self._offer_lean(schedule, value, solver)
            return
        if verify(self.problem, schedule):
            return
        fits = not lacking(schedule).any()
        with self.lock:
            if self.schedule is None or value < self.value:
                self.schedule, self.value, self.solver = schedule, value, solver
                if fits:
                    self.lean, self.lean_value, self.lean_solver = schedule, value, solver
                self.incumbent[0] = min(value, self.incumbent[0])
                if solver != BLOCK_SOLVER:
                    self.leads.append(schedule)
                self._changed()

    def _offer_lean(self, schedule: Schedule, value: int, solver: str) -> None:
        """Keep `schedule` as `lean` if it fits with its messages and is shorter, or as short with a lower peak."""
        lean, least = self.lean, self.lean_value
        if lean is not None and (value > least or (value == least and fullness(schedule) >= fullness(lean))):
            return
        if verify(self.problem, schedule) or lacking(schedule).any():
            return
        with self.lock:
            if self.lean is lean:
                self.lean, self.lean_value, self.lean_solver = schedule, value, solver

    def offer_policy(self, policy: Policy, solver: str) -> None:
        """The schedule that `policy` makes, if any."""
        with suppress(NotFound):
            self.offer(list_schedule(self.problem, policy), solver)

    def raise_bound(self, bound: Bound) -> None:
        """Keep `bound`, rounded up to a multiple of the unit, if it is higher."""
        slower = self.problem.slowdowns
        bound = rounded_up(bound, value_unit(self.problem, bound.kind) if slower else self.unit)
        with self.lock:
            if bound.value > self.bound.value:
                self.bound = bound
                self._changed()

    def raise_closed_forms(self) -> None:
        """Raise the bound by closed forms until the value meets it; for large problems, or many lanes, as time allows."""
        large = len(self.problem.passes) > LARGE_PASSES or len(self.problem.lanes) > MAX_LANES
        with suppress(TimeUp):
            for bound in each_closed_form(self.problem, self.clock if large else None):
                self.raise_bound(bound)
                if self.settled:
                    return

    def _changed(self) -> None:
        if self.progress is not None:
            self.progress(self)

    def beside(self, problem: Problem, seconds: float, search: Callable[[State], Iterator[None]]) -> Iterator[State]:
        """Search another problem, or this one anew, for so many seconds of this clock, and yield its state after each step.
        Its clock stands still between two steps, so that other sources can take turns."""
        clock = self.clock.apart(seconds)
        bound = self.bound if problem is self.problem else Bound(0, "")
        other = State(problem, clock, bound, contest=self.contest, without=self.without)
        if problem is not self.problem:
            other.raise_closed_forms()
        steps, counted = search(other), 0.0
        while not (other.done or self.done):
            ended = next(steps, other) is other
            if clock.counted:
                self.clock.spend(clock.used - counted)
                counted = clock.used
            clock.pause()
            yield other
            clock.go_on()
            if ended:
                return

    @contextmanager
    def searching_exactly(self) -> Iterator[int]:
        """A context in which CP-SAT runs. It gives the number of its threads; further finders wait meanwhile."""
        self.exact_threads = self.contest.exact_threads
        try:
            yield self.exact_threads
        finally:
            self.exact_threads = 0

    @property
    def target(self) -> int:
        """The value at which the search may stop, µs: the bound, or `enough` if that is higher."""
        return self.bound.value if self.enough is None else max(self.bound.value, self.enough)

    @property
    def refuted(self) -> bool:
        """Whether it is proven that no schedule takes `enough` or less."""
        return self.enough is not None and (self.infeasible or self.bound.value > self.enough)

    @property
    def settled(self) -> bool:
        """Whether the value meets the target, or it is proven that none does."""
        return self.refuted or (self.schedule is not None and self.value <= self.target)

    @property
    def done(self) -> bool:
        """Whether the search ends: settled, infeasible, out of time, astray or lost."""
        return self.settled or self.infeasible or self.clock.left <= 0 or self.astray or self.lost

    @property
    def lost(self) -> bool:
        """Whether the bound shows that a rival search is as good, or all searches are to end."""
        rival = self.contest.rival()
        return rival == -math.inf or (self.schedule is not None and self.bound.value >= rival)

    @property
    def astray(self) -> bool:
        """Whether patience is over and the messages of the best schedule do not fit, nor is one as short known that fits."""
        return self.value != self.lean_value and self.clock.left < self.patience
