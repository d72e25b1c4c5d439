"""`solve`: an incumbent and a bound from the first moment, then better ones until they meet or time is up.

A finder (list scheduling, annealed policies, building blocks, large-neighbourhood search) and a prover (bounds of one
rank after the other, CP-SAT on the whole) work beside each other, each on a core; with `effort` one after the other,
so that the outcome depends on nothing but the problem and the seed. What leaves here was verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import numpy as np

from .clock import Clock
from .errors import BadInput, Infeasible, NotFound, WrongBound, ZbsolveError
from .graphs import pipeline
from .greedy.anneal import improve_policies, starting_policies
from .greedy.blocks import blocks
from .greedy.list_scheduler import Policy, deepest_first, list_schedule
from .greedy.presets import PRESETS, preset
from .ilp.bounds import WHOLE, Bound, closed_form, improve
from .problem import OBJECTIVES, Problem
from .schedule import Certificate, Schedule
from .verifier import verify

METHODS = ("auto", "greedy", "cp", "milp")
SMALL = 400  # passes: CP-SAT on the whole problem proves or improves within seconds up to about here
PROVING = 0.35  # of the effort is left for the prover
COMPILING = 3.0  # seconds: the kernels were not cached yet, which is not the search's time
BLOCK = "building block"
LARGE = 20_000  # passes: beyond, neighbourhoods and relaxations take longer than they give


@dataclass
class State:
    """The best schedule and bound so far, and who found them. `value` in µs, −1 before the first schedule."""

    problem: Problem
    clock: Clock
    bound: Bound
    schedule: Schedule | None = None
    value: int = -1
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
                if solver != BLOCK:
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
        """Nothing more to gain: optimal, or no time is left."""
        return self.optimal or self.clock.left <= 0


def solve(
    problem: Problem,
    *,
    seconds: float = 10.0,
    effort: float | None = None,
    seed: int = 0,
    method: str = "auto",
    solver: str = "cbc",
    hint: Schedule | None = None,
    progress: Callable[[State], None] | None = None,
) -> Schedule:
    """A schedule for `problem` with a certificate: value, proven lower bound, gap.

    method: "auto", "greedy" (list scheduling alone), "cp", "milp" (with `solver`, see ilp.milp), or the name of a preset.
    effort: in place of seconds, for the same answer on every machine. hint: a schedule to start from; one made for other
    times counts by its order. progress: called with the State whenever value or bound got better. Returns early when the
    value equals the bound, and the incumbent on KeyboardInterrupt. Raises Infeasible with the reason, NotFound, BadInput.
    """
    if method not in METHODS and method not in PRESETS:
        raise BadInput(f"method '{method}': one of {', '.join((*METHODS, *PRESETS))}")
    if method == "milp":
        from .ilp.milp import check_solver

        check_solver(solver)
    clock = Clock(seconds, effort)
    state = State(problem, clock, _work(problem), progress=progress)
    try:
        if hint is not None:
            state.offer(_retimed(problem, hint), "hint")
        _search(state, method, seed, solver)
    except KeyboardInterrupt:
        clock.stop()
        if state.schedule is None:
            raise
    if state.schedule is None:
        raise _nothing(state, method)
    return state.schedule.certified(_certificate(state, seed))


def _certificate(state: State, seed: int) -> Certificate:
    bound = state.bound
    if state.schedule is not None and bound.value > state.value:
        check_bound(state.schedule, bound.value, bound.proof)
        bound = _work(state.problem)
    return Certificate(
        state.problem.objective,
        state.value,
        bound.value,
        bound.kind,
        bound.ranks,
        bound.proof,
        state.solver,
        0.0 if state.clock.counted else round(state.clock.used, 3),
        seed,
        state.problem.digest,
    )


def check_bound(schedule: Schedule, bound: int, proof: str) -> None:
    """Raise WrongBound where `bound`, for schedules whose lanes run in table order, is above the value of one that does.

    A hint's lanes may run otherwise; where microbatches differ such a schedule can fairly be shorter than the bound.
    """
    value = int(schedule.timeline().value)
    if bound <= value:
        return
    problem = schedule.problem
    place = {name: i for names in schedule.order.values() for i, name in enumerate(names)}
    at = np.array([place[name] for name in problem.names])
    if all((np.diff(at[rows]) > 0).all() for rows in problem.lanes):
        raise WrongBound(
            f"problem {problem.digest}: the bound of {bound} µs ({proof}) is above a verified schedule's {value} µs; "
            "this is a defect in zbsolve: please report it with the problem"
        )


def _work(problem: Problem) -> Bound:
    return Bound(problem.work, "the work of the busiest rank", "work", ())


def _retimed(problem: Problem, hint: Schedule) -> Schedule:
    """The hint's order on this problem. Raises BadInput where it has other passes."""
    if sorted(hint.problem.names) != sorted(problem.names):
        raise BadInput("hint: its schedule has other passes than the problem")
    return Schedule(problem, hint.order, hint.syncs)


def _search(state: State, method: str, seed: int, solver: str) -> None:
    problem, clock = state.problem, state.clock
    large = len(problem.passes) > LARGE
    if not large:
        state.raise_bound(closed_form(problem))
    if method not in METHODS:
        state.offer(preset(method, problem), method)
        state.raise_bound(closed_form(problem))
        return
    starts: list[Policy] = []
    quick = _quick(state, starts, policies=not large or method != "auto")
    beside = method == "auto" and not clock.counted
    for _ in quick:
        if state.optimal:
            return
        if large and beside:  # the first schedule is there: the prover need not wait for the rest
            break
    if beside:
        before = clock.used
        compiled()
        clock.extend(clock.used - before if clock.used - before > COMPILING else 0.0)
        _side_by_side(state, seed, chain(quick, _find(state, seed, starts)))
        return
    if large:
        state.raise_bound(closed_form(problem))
    if method == "milp":
        _milp(state, solver, seed)
    elif method == "cp":
        _cp(state, seed, clock.left)
    elif method == "auto":
        # One after the other: the prover has the last part of the effort to itself.
        keep = PROVING * clock.left
        for _ in _find(state, seed, starts):
            if state.done or clock.left < keep:
                break
        if not state.done:
            _prove(state, seed)


@cache
def compiled() -> None:
    """Search a tiny problem, so that every kernel is compiled (once a machine, then cached on disk) or loaded."""
    tiny = pipeline([3, 4, 3], [4, 4, 5], [2, 2, 1], placement=(0, 1, 0), microbatches=4, held_until_W=1, capacity=[6, 2])
    for objective in OBJECTIVES:
        problem = Problem(tiny.passes, tiny.edges, tiny.capacity, objective)
        state = State(problem, Clock(1.0, 0.02), Bound(0, ""))
        starts = starting_policies(problem)
        state.offer_policy(starts[0], "greedy")
        for _ in _find(state, 0, starts):
            pass
        for _ in improve(problem, Bound(0, ""), None, Clock(1.0), 0.1):
            pass


def _quick(state: State, starts: list[Policy], policies: bool) -> Iterator[None]:
    """A schedule at once; then, where asked for, the best of the starting policies (kept in `starts`); and named ones."""
    state.offer_policy(deepest_first(state.problem), "greedy")
    yield
    if policies:
        yield from _policies(state, starts)
    yield from _named(state)


def _policies(state: State, starts: list[Policy]) -> Iterator[None]:
    problem, clock = state.problem, state.clock
    starts += starting_policies(problem, clock, 0.1 * clock.left)
    for policy in starts[:2]:
        clock.spend(len(problem.passes) * 1e-6)
        state.offer_policy(policy, "greedy")
        yield


def _named(state: State) -> Iterator[None]:
    for name in PRESETS:
        if state.done:
            return
        try:
            named = preset(name, state.problem)
        except BadInput:
            continue
        room = state.problem.capacity
        if room is None or all(np.less_equal(named.timeline().peak_bytes, room)):
            state.offer(named, name)
        if state.schedule is not named:
            state.leads.append(named)
        yield


def _side_by_side(state: State, seed: int, steps: Iterator[None]) -> None:
    """Finder and prover, a thread each (their kernels and CP-SAT release the interpreter), until either is done."""

    def find() -> None:
        for _ in steps:
            if state.done:
                return

    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        return run

    # No daemons: at exit Python waits for them, and they end soon, since the clock is stopped.
    workers = [threading.Thread(target=guarded(w)) for w in (find, lambda: _prove(state, seed))]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers) and not state.done and not failed:
            workers[0].join(0.02)
            if not workers[0].is_alive():
                workers[1].join(0.02)
    finally:
        state.clock.stop()
        for stop in state.stoppers:
            stop()
        for worker in workers:
            worker.join(1.0)
        state.progress = None  # a worker in the middle of a kernel may end later
    if failed:
        raise failed[0]


def _find(state: State, seed: int, starts: list[Policy]) -> Iterator[None]:
    """Better schedules: annealed policies and building blocks in turn, then neighbourhoods of the best."""
    problem, clock = state.problem, state.clock
    total = clock.left
    annealed = _annealed(state, seed, total, starts)
    # Trying policies takes long on a large problem: blocks need not wait for them.
    sources = [_blocks(state, seed, total), annealed if starts else chain(_policies(state, starts), annealed)]
    while sources and not state.done:
        for source in list(sources):
            try:
                next(source)
            except StopIteration:
                sources.remove(source)
            yield
    if len(problem.passes) <= LARGE and state.schedule is not None:
        from .ilp.lns import neighbourhoods

        for schedule in neighbourhoods(state.schedule, clock, seed, lambda: state.bound.value):
            if schedule is not None:
                state.offer(schedule, "lns")
            yield


def _annealed(state: State, seed: int, total: float, starts: list[Policy]) -> Iterator[None]:
    for policy in improve_policies(state.problem, starts, state.clock, seed, 0.7 * total):
        if policy is not None:
            state.offer_policy(policy, "annealed policy")
        yield


def _blocks(state: State, seed: int, total: float) -> Iterator[None]:
    for schedule in blocks(state.problem, state.clock, 0.7 * total, seed, state.bound.value, lambda: state.leads):
        state.offer(schedule, BLOCK)
        yield


def _prove(state: State, seed: int) -> None:
    """Higher bounds: relaxations first, then CP-SAT on the whole where that is small."""
    problem, clock = state.problem, state.clock
    small = len(problem.passes) <= SMALL
    state.raise_bound(closed_form(problem))
    for bound in improve(problem, state.bound, state.value, clock, clock.left * (0.4 if small else 1.0)):
        state.raise_bound(bound)
        if state.done:
            return
    if small or state.schedule is None:
        _cp(state, seed, clock.left)


def _cp(state: State, seed: int, seconds: float) -> None:
    from .ilp.cp import solve_cp

    counted = state.clock.counted
    result = solve_cp(
        state.problem,
        state.schedule,
        state.bound.value,
        seconds,
        seed=seed,
        effort=seconds if counted else None,
        started=state.stoppers.append,
    )
    state.clock.spend(seconds)
    if result.schedule is not None:
        state.offer(result.schedule, "cp-sat")
    state.infeasible = result.infeasible and state.schedule is None
    if state.infeasible:
        return
    state.raise_bound(Bound(result.bound, "cp-sat: the whole problem", WHOLE))


def _milp(state: State, solver: str, seed: int) -> None:
    from .ilp.milp import solve_milp

    result = solve_milp(state.problem, state.schedule, state.bound.value, state.clock.left, solver=solver, seed=seed)
    if result.schedule is not None:
        state.offer(result.schedule, f"milp {solver}")
    state.raise_bound(Bound(result.bound, f"milp {solver}: the whole problem", WHOLE))


def _nothing(state: State, method: str) -> ZbsolveError:
    """Why there is no schedule: proven, or only not found."""
    if method in PRESETS:
        return Infeasible(f"{method} does not fit this problem's memory")
    problem = state.problem
    if problem.capacity is not None:
        most = np.zeros(problem.ranks, np.int64)
        np.maximum.at(most, problem.passes.rank, problem.taken)
        for rank in np.flatnonzero(most > problem.capacity):
            text = f"capacity: rank {rank} needs {most[rank]} bytes for one pass, but has {problem.capacity[rank]}"
            return Infeasible(f"{text}: no schedule exists")
    if state.infeasible:
        return Infeasible("capacity: cp-sat proved that no order fits the memory of all ranks: no schedule exists")
    return NotFound("no schedule was found in this time, and it is not proven that there is none")
