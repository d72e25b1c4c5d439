"""Answers of the playground, from a state to its schedule, value and bound, kept by state. One longer search at a time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from ..problem import Problem
from ..profile.named_steps import step_for
from ..profile.profile import Profile
from ..schedule import Certificate, Schedule
from ..search.race import better
from ..search.solver import solve
from ..search.state import State as Search
from ..util.errors import BadInput, Infeasible, ZbsolveError
from .state import BEST, SYSTEM_NAMES, State, in_its_placement, profile_of, step_of

MAX_PASSES = 50_000  # of a step: it takes two to three seconds; `zbsolve solve` has no limit
SEARCHED_PASSES, SEARCHED_WINDOWS = 2_000, 8  # most passes (and ranks, for the span) of a search; beyond, greedy answers
EFFORT = 0.1
COMPARE_SECONDS = 6.0  # for all systems together
TOO_LONG = "not looked at: the others took too long; choose it to see it"
BEST_PLACEMENTS = ("single", "loop", "vee")  # in which the comparison also searches


@dataclass(frozen=True)
class Answer:
    """The schedule of a state, with its certificate. capacity: bytes of each rank for activations, or None. over: why the
    schedule does not fit into it; then its certificate is for the step without a limit. "": it fits, and was verified with
    it. options: of `zbsolve solve`, for the same search."""

    state: State
    schedule: Schedule
    capacity: tuple[int, ...] | None
    options: str
    over: str = ""

    @property
    def certificate(self) -> Certificate:
        """Value and bound."""
        assert self.schedule.certificate is not None
        return self.schedule.certificate

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of activations that each rank holds at most."""
        return tuple(self.schedule.timeline().peak_bytes)


@dataclass(frozen=True)
class Row:
    """One system with the same model, ranks and microbatches. why: a line if it has no answer."""

    state: State
    answer: Answer | None
    why: str = ""


def problem_of(state: State, profile: Profile | None) -> Problem:
    """The step of a state. Raises BadInput, Infeasible."""
    step = step_of(state)
    _check_few(len(step.routes[0]) * state.microbatches * (2 if step.fused else 3))
    profile = profile or profile_of(state)
    problem = (step if state.system == BEST else step_for(state.system, profile, step)).problem(profile)
    _check_few(len(problem.passes))
    return problem


def _check_few(passes: int) -> None:
    if passes > MAX_PASSES:
        raise BadInput(f"microbatches: {passes:,} passes are more than this page shows ({MAX_PASSES:,}); solve takes them")


def answer(state: State, profile: Profile | None = None) -> Answer:
    """The verified schedule of a state, with value and bound. A named system that does not fit the memory is also returned,
    with the reason. Raises BadInput, Infeasible, NotFound."""
    state = in_its_placement(state)
    problem = problem_of(state, profile)
    method = _searched_by(problem) if state.system == BEST else state.system
    options = f"--method {method} --effort {EFFORT:g}"
    try:
        return Answer(state, solve(problem, method=method, effort=EFFORT), problem.capacity, options)
    except Infeasible as error:
        if state.system == BEST or problem.capacity is None:
            raise
        free = solve(replace(problem, capacity=None), method=method, effort=EFFORT)
        return Answer(state, free, problem.capacity, options, str(error))


def _searched_by(problem: Problem) -> str:
    """The method that answers within a second: "auto" computes bounds for decreasing memory again and again, and a bound of
    the span considers every rank in the window of every other."""
    looks = problem.ranks if problem.objective == "span" else 1
    return "auto" if len(problem.passes) <= SEARCHED_PASSES and looks <= SEARCHED_WINDOWS else "greedy"


def searched_on(start: Answer, seconds: float, progress: Callable[[Search], None]) -> Answer:
    """The answer, never worse, after a search of `seconds` from `start`. progress: called with each better state."""
    problem = start.schedule.problem
    more = solve(problem, seconds=seconds, hint=start.schedule, progress=progress)
    return replace(start, schedule=better(start.schedule, more), options=f"--seconds {seconds:g}")


def compared(state: State, answered: Callable[[State], Answer]) -> Iterator[tuple[Row, ...]]:
    """Yields all rows so far, after each new one. The state's own row is first; then searches on the usual placements and
    all named systems, the shortest first, those that do not fit or are not defined last. answered: state → its answer."""
    began, rows = time.monotonic(), dict[State, Row]()
    for wanted in _others(state):
        late, placed = time.monotonic() - began > COMPARE_SECONDS, wanted
        try:
            placed = in_its_placement(wanted)
            if placed not in rows:
                rows[placed] = Row(placed, None, TOO_LONG) if late else Row(placed, answered(placed))
        except ZbsolveError as error:
            rows[placed] = Row(placed, None, str(error))
        own, *others = rows.values()
        yield (own, *sorted(others, key=_worth))


def _others(state: State) -> Iterator[State]:
    """The state itself, then all states that it is compared with."""
    yield state
    for placement in (state.placement, *BEST_PLACEMENTS):
        yield replace(state, system=BEST, placement=placement)
    for name in SYSTEM_NAMES:
        yield replace(state, system=name)


def _worth(row: Row) -> tuple[int, int]:
    return (2, 0) if row.answer is None else (bool(row.answer.over), row.answer.certificate.value)


MAX_KEPT = 200  # answers
MORE_SECONDS = 5.0  # of one longer search
AT_ONCE = 2  # answers that are computed at the same time; further ones wait


class Playground:
    """Answers states for several threads. profile: the user's, or None. path: of its file, for command lines."""

    def __init__(self, profile: Profile | None = None, path: str = "") -> None:
        self.profile, self.path = profile, path
        self._kept: OrderedDict[State, tuple[Answer, float]] = OrderedDict()
        self._keeping, self._turns = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)
        self._longer = threading.Lock()
        self._running: Search | None = None
        self._over, self._threads = threading.Event(), list[threading.Thread]()

    def answer(self, state: State) -> tuple[Answer, float]:
        """The answer, and the seconds that its computation took. Raises as the function of this name."""
        state = in_its_placement(state)
        with self._turns:
            with self._keeping:
                if state in self._kept:
                    self._kept.move_to_end(state)
                    return self._kept[state]
            began = time.monotonic()
            made = answer(state, self.profile)
            return self._keep(state, made, time.monotonic() - began)

    def compared(self, state: State) -> Iterator[tuple[Row, ...]]:
        """See the function of this name."""
        return compared(state, lambda other: self.answer(other)[0])

    def search(self, state: State) -> Iterator[Search | Answer]:
        """A longer search from a state's answer. Yields its progress, and at the end the answer, which replaces the state's.
        Raises BadInput while another one runs."""
        start, _ = self.answer(state)
        if start.over:
            raise BadInput("system: this schedule does not fit the memory; a search starts from one that does")
        if not self._longer.acquire(blocking=False):
            raise BadInput("search: another one is running; it ends within seconds")
        states: SimpleQueue[Search | Answer | Exception] = SimpleQueue()
        self._start(partial(self._search, start, states))
        while isinstance(now := states.get(), Search):
            yield now
        if isinstance(now, Exception):
            raise now
        yield now

    def _search(self, start: Answer, states: SimpleQueue[Search | Answer | Exception]) -> None:
        def progress(now: Search) -> None:
            self._running = now
            if self._over.is_set():
                now.clock.stop()
            states.put(now)

        began = time.monotonic()
        try:
            better = searched_on(start, MORE_SECONDS, progress)
            self._keep(start.state, better, time.monotonic() - began)
            states.put(better)
        except Exception as error:
            states.put(error)
        finally:
            self._running = None
            self._longer.release()

    def warm(self, state: State) -> None:
        """Answer and compare a state in a thread, so that kernels and tables are loaded before the first request."""

        def answer_all() -> None:
            for _ in self.compared(state):
                if self._over.is_set():
                    break

        self._start(answer_all)

    def _start(self, target: Callable[[], None]) -> None:
        self._threads = [*filter(threading.Thread.is_alive, self._threads), threading.Thread(target=target)]
        self._threads[-1].start()

    def stop(self) -> None:
        """End all threads, and wait for them: a longer search ends now, others after their current answer. They are not
        daemons, since a daemon that Python stops inside CP-SAT aborts the process. Nor can they import once Python ends."""
        self._over.set()
        if (running := self._running) is not None:
            running.clock.stop()
        for thread in self._threads:
            thread.join()

    def _keep(self, state: State, made: Answer, seconds: float) -> tuple[Answer, float]:
        with self._keeping:
            self._kept[state] = made, seconds
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made, seconds
