"""What a search knows: the best schedule, the highest bound, the time that is left."""

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
from ..handover import lacking
from ..ilp.bounds.bound import Bound, rounded_up, value_unit
from ..ilp.bounds.closed_forms import each_closed_form
from ..ilp.bounds.necessary_arcs import MAX_LANES
from ..ilp.ranks.end_losses import NO_INCUMBENT
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.clock import Clock, TimeUp
from ..util.errors import Deadlock, NotFound
from ..util.machine import cores, half_of_cores
from ..verifier import verify

LARGE_PASSES = 20_000  # passes: beyond, relaxations take longer than they give
STARTS = 8  # for moves to start from, good or not, that are kept until they are looked at
TABU_SOLVER = "tabu search"  # what it finds is near to what was known
BLOCK_SOLVER = "building block"  # the solver whose schedules blocks do not start from again


def rooms(problem: Problem) -> tuple[int, ...]:
    """What the peak of each rank is divided by: its capacity where capacities differ, in bytes; else 1, so that bytes count.
    A rank without room counts in bytes too: nothing fits it."""
    if problem.capacity is None or len(set(problem.capacity)) == 1:
        return (1,) * problem.ranks
    return tuple(max(1, room) for room in problem.capacity)


def fullness(schedule: Schedule) -> Fraction:
    """The largest peak of a rank: in bytes, or as a share of the rank's capacity where capacities differ."""
    peaks = schedule.timeline().peak_bytes
    return max(Fraction(peak, room) for peak, room in zip(peaks, rooms(schedule.problem), strict=True))


@dataclass(frozen=True, slots=True)
class Contest:
    """What one of many searches knows of the others.

    threads: how many it may use; None: all cores.
    rival: the value, µs, that others have reached, read at any time; −∞ ends the search.
    interrupted: called where Ctrl-C ended it.
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
        """Threads for CP-SAT while finders search beside it: half of the cores, or half of the threads that the search was
        given."""
        return half_of_cores() if self.threads is None else max(1, self.threads // 2)


ALONE = Contest()


@dataclass
class State:
    """The best schedule and bound so far, and who found them.

    value: of the schedule, µs; −1 before the first one.
    incumbent: the same for compiled searches, which read it while they run: one number, INFINITE before.
    enough: a value, µs: the search only asks whether any schedule is as short; None: it looks for the shortest.
    lean: the best schedule whose messages that wait fit its memory, too (see `handover`): of the least value, then of the
        least peak. `lean_value` and `lean_solver` are its own.
    patience: with less than this on the clock, the search ends where the messages of its shortest schedule do not fit.
    without: sources that get no time, to see what they bring.
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
    exact_threads: int = 0  # that CP-SAT runs on now, the prover's own among them
    leads: list[Schedule] = field(default_factory=list)  # for blocks to improve: named ones even where memory is exceeded
    starts: deque[Schedule] = field(default_factory=partial(deque, maxlen=STARTS))  # for moves: the last that others found
    unit: int = field(init=False)  # µs that divide every value

    def __post_init__(self) -> None:
        self.unit = value_unit(self.problem)
        if self.enough is not None:
            self.incumbent[0] = self.enough + 1  # so that the prover asks for a bound above `enough`

    def offer(self, schedule: Schedule, solver: str) -> None:
        """Keep `schedule` where it is better and holds, with one order of collectives on all ranks."""
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
        """Keep a schedule of the best value where its peak is smaller, or of any where it is the first that fits. The search
        goes on from the one that came first."""
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
        """Keep `bound`, as a multiple of the unit, where it is higher."""
        bound = rounded_up(bound, self.unit)
        with self.lock:
            if bound.value > self.bound.value:
                self.bound = bound
                self._changed()

    def raise_closed_forms(self) -> None:
        """Keep the best bound in closed form, or the first that the value reaches; of a large problem, or one of many lanes,
        the best of as many as there is time for."""
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
        """What `search`, step by step, finds of another problem in so many seconds of this clock: its state after each step.
        Its own clock rests between two steps, so others may have turns."""
        clock = self.clock.apart(seconds)
        other = State(problem, clock, Bound(0, ""), contest=self.contest, without=self.without)
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
        """While CP-SAT runs: its threads, for which further finders make room."""
        self.exact_threads = self.contest.exact_threads
        try:
            yield self.exact_threads
        finally:
            self.exact_threads = 0

    @property
    def target(self) -> int:
        """The value at which nothing is left to gain, µs: the bound, or what is enough."""
        return self.bound.value if self.enough is None else max(self.bound.value, self.enough)

    @property
    def refuted(self) -> bool:
        """What would be enough is proven impossible."""
        return self.enough is not None and (self.infeasible or self.bound.value > self.enough)

    @property
    def settled(self) -> bool:
        """The value is at its target, or that is proven impossible."""
        return self.refuted or (self.schedule is not None and self.value <= self.target)

    @property
    def done(self) -> bool:
        """Nothing more to gain: settled, none exists, or no time is left, or it is astray, or others won."""
        return self.settled or self.infeasible or self.clock.left <= 0 or self.astray or self.lost

    @property
    def lost(self) -> bool:
        """It is proven that nothing here is shorter than what others have; or all are to end."""
        rival = self.contest.rival()
        return rival == -math.inf or (self.schedule is not None and self.bound.value >= rival)

    @property
    def astray(self) -> bool:
        """The best schedule lets more messages wait than fit, none as short is known that does not, and patience is over."""
        return self.value != self.lean_value and self.clock.left < self.patience
