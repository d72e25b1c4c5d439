"""A race between problems of the same work: time goes to those that can still win."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..greedy.lists.list_scheduler import schedule_by_start
from ..greedy.lists.serial_orders import serial_schedule
from ..greedy.side_stream import with_side_streams, without_side_streams
from ..greedy.syncs import pools_with_syncs
from ..ilp.bounds.closed_forms import closed_form
from ..problem import Ints, Problem
from ..schedule import Certificate, Schedule
from ..step import Step
from ..systems.table import is_named
from ..timeline import Floats, Precedence, longest_path
from ..util.clock import limit_of
from ..util.errors import Deadlock, interruption
from ..verifier import verify
from ..workers.workers import WorkersLost
from .certify import QUICK_PASSES, check_bound
from .task import Answer, Task
from .task_runner import ROUND, TaskRunner


def hint_on(problem: Problem, hint: Schedule) -> Schedule | None:
    """`hint` where it has the same passes; else the best schedule that its times make of `problem`. None where it is about
    other ranks or none of them holds.

    Passes that both have start when they do in the hint. A further pass that takes memory comes right before the first one
    that waits for it, any other one as soon as its inputs are there.
    """
    if hint.problem.stage_ranks != problem.stage_ranks:
        return None
    if hint.problem.passes.named_as(problem.passes):
        return hint
    begin = _begins(problem, hint)
    if begin is None:
        return None
    start, computing = _starts(problem, begin), np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    plain = schedule_by_start(without_side_streams(problem), start[computing])
    holding = (schedule for schedule in _tries(problem, plain, start) if not verify(problem, schedule))
    return min(holding, key=lambda schedule: schedule.timeline().value, default=None)


def _tries(problem: Problem, plain: Schedule, start: Ints) -> Iterator[Schedule]:
    """Side streams put in behind the order of the others, and orders made pass by pass, where memory is tight."""
    with suppress(Deadlock):  # in tight memory copies may wait in a circle
        schedule = with_side_streams(problem, plain)
        schedule.timeline()
        yield schedule
    with suppress(Deadlock):
        serial = serial_schedule(problem, start, 0.0) if pools_with_syncs(problem) else None
        if serial is not None:
            serial.timeline()
            yield serial


def _starts(problem: Problem, begin: Floats) -> Ints:
    """Starts that all edges allow, µs, none before `begin`."""
    edges, duration = problem.edges, problem.passes.duration
    # The source waits for nothing, so no arc from it is in a circle.
    source = int(np.setdiff1d(np.arange(len(begin)), edges.after)[0])
    later = np.setdiff1d(np.arange(len(begin)), [source])
    arcs = Precedence(
        np.concatenate([edges.before, np.full(len(later), source)]),
        np.concatenate([edges.after, later]),
        np.concatenate([edges.lag, begin.astype(np.int64)[later] - duration[source]]),
    )
    return longest_path(problem, arcs)[0]


def _begins(problem: Problem, hint: Schedule) -> Floats | None:
    """When each pass begins, µs, shape (passes,); None where none of the hint's passes is among them."""
    passes, edges, known = problem.passes, problem.edges, hint.problem.index
    rows = np.array([known.get(name, -1) for name in problem.names])
    begin = np.where(rows < 0, np.nan, np.asarray(hint.timeline().start, np.float64)[rows])
    if (rows < 0).all():
        return None
    late = problem.taken > 0
    for _ in range(int((rows < 0).sum())):
        missing = np.isnan(begin)
        if not missing.any():
            break
        soonest, latest = np.full(len(passes), -np.inf), np.full(len(passes), np.inf)
        np.fmax.at(soonest, edges.after, (begin + passes.duration)[edges.before] + edges.lag)
        np.fmin.at(latest, edges.before, begin[edges.after] - edges.lag)
        value = np.where(late, latest - passes.duration, soonest)
        filled = missing & np.isfinite(value)
        if not filled.any():
            value, filled = np.where(np.isfinite(soonest), soonest, 0.0), missing
        begin[filled] = value[filled]
    return np.maximum(begin, 0.0)


@dataclass(eq=False)
class Run:
    """A step in the race. name: its placement and what else was chosen for it; place: the placement (and gathers) alone;
    `partition` has every name that gives these layers; moved: what was changed one by one to come here, or ""; least: what a
    bound in closed form says that it takes, µs, where that is why it was not searched, else 0."""

    step: Step
    name: str
    partition: str = ""
    layers: tuple[int, ...] = ()
    problem: Problem | None = None
    schedule: Schedule | None = None
    seconds: float = 0.0
    failed: str = ""
    least: int = 0
    place: str = ""
    moved: str = ""

    @property
    def certificate(self) -> Certificate:
        """The schedule's."""
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate

    @property
    def value(self) -> int:
        """The schedule's, µs."""
        return self.certificate.value

    @property
    def bound(self) -> int:
        """The highest proven, µs."""
        return self.certificate.bound

    def beats(self, other: Run) -> bool:
        """It has a schedule, and a shorter one."""
        return self.schedule is not None and self.value < other.value


@dataclass
class Job:
    """What is to be spent on a run: wall seconds, or effort; from `hint`, else from its own schedule, with further options
    of `search.solve`."""

    run: Run
    amount: float
    hint: Schedule | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Race:
    """All that are in it, what is left to spend (wall seconds, or effort), and who solves them. `halted`: whether somebody
    ended it; `named`: whether partitions differ; `choosing`: whether passes do; `compared`: whether every place is looked
    at, also one that a bound rules out."""

    runs: list[Run]
    left: float
    runner: TaskRunner
    options: dict[str, Any]
    hint: Schedule | None
    halted: Callable[[], bool]
    named: bool = False
    choosing: bool = False
    compared: bool = False
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.left
        self.named = self.named or len({run.name for run in self.runs}) < len(self.runs)
        self.runner.rival = lambda: math.inf if (best := self.best()) is None else best.value
        self.runner.stop = lambda: self.stop() and self.best() is not None

    def stop(self) -> bool:
        """Whether nothing further is to begin."""
        return self.interrupted or self.halted()

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Where there is a schedule, what runs inside ends early when somebody ends it or workers are lost."""
        try:
            yield
        except (KeyboardInterrupt, SystemError, WorkersLost) as error:
            if self.best() is None or not (isinstance(error, WorkersLost) or interruption(error)):
                raise
            self.interrupted = True

    def settle(self) -> None:
        """Time that went to building and to bounds is no longer left."""
        if not self.runner.counted:
            self.left = max(0.0, min(self.left, self.ends - time.monotonic()))

    @property
    def order(self) -> str:
        """The name whose order every run has, or ""."""
        method: str = self.options.get("method", "auto")
        return method if is_named(method) else ""

    def look(self, effort: float) -> dict[str, Any]:
        """Options of a quick look: a greedy one, or the order that every run has."""
        return {"method": self.order or "greedy", "effort": effort}

    def label(self, run: Run) -> str:
        """What a run is called where runs are told apart."""
        return f"{run.name} {run.partition}" if self.named else run.name

    def solve_each(self, jobs: Iterable[Job], count: int = 1, size: int = ROUND) -> Iterator[Run]:
        """Each run as it was solved; what it had is kept where nothing better comes. count: how many jobs there are: where
        fewer workers would be idle each gets the time of several; size: jobs drawn at once where effort is the limit. Where
        choices differ in their passes, nothing is spent on what a bound rules out."""
        at_once = min(count, self.runner.count)
        tasks = (task for job in jobs if (task := self._task(job, at_once)) is not None)
        for answer in self.runner.answers(tasks, size):
            self._keep(answer, at_once)
            yield answer.task.of.run

    def _task(self, job: Job, at_once: int) -> Task | None:
        run = job.run
        assert run.problem is not None
        looked = not self.choosing or run.schedule is not None or (self.compared and run.name == run.place)
        if not looked and self.ruled_out(run):
            return None
        counted = self.runner.counted
        self.left = max(0.0, self.left - job.amount)
        amount = job.amount if counted else min(job.amount * at_once, self.ends - time.monotonic())
        options = {**self.options, **limit_of(amount, counted), **job.options}
        known = self.hint  # the user's earlier schedule, for the placement that it was made for
        known = known if known is not None and known.problem.stage_ranks == run.problem.stage_ranks else None
        hint = None if self.order else job.hint or run.schedule or known
        if hint is not None:  # of other splits too: a stage that trains nothing there has no backward
            options["hint"] = hint_on(run.problem, hint) if self.choosing or hint is job.hint else hint
        return Task(job, run.problem, options, 0.0, self.label(run))

    def _keep(self, answer: Answer, at_once: int) -> None:
        job: Job = answer.task.of
        run, schedule = job.run, answer.schedule
        if schedule is not None:
            run.schedule = schedule if run.schedule is None else better(run.schedule, schedule)
        elif run.schedule is None:
            run.failed = str(answer.error)
        if not self.runner.counted:
            self.left = max(0.0, self.left + job.amount - answer.seconds / at_once)
            run.seconds += answer.seconds

    def ruled_out(self, run: Run) -> bool:
        """Whether nothing in `run` is as short as the best so far, by a bound in closed form, which `run` then keeps."""
        best = self.best()
        if best is None or run.problem is None or len(run.problem.passes) > QUICK_PASSES:
            return False
        bound = max(run.problem.work, closed_form(run.problem).value)
        run.least = bound if bound > best.value else 0
        return run.least > 0

    def ranked(self) -> list[Run]:
        """The runs that have a schedule, the shortest first; of equals the first, which is the simplest."""
        return sorted((run for run in self.runs if run.schedule is not None), key=lambda run: run.value)

    def best(self) -> Run | None:
        """The first of these."""
        return min((run for run in self.runs if run.schedule is not None), key=lambda run: run.value, default=None)

    def leanest(self) -> Run | None:
        """Of the runs with the least value the one whose schedule has the least peak, bytes; of equals the first."""
        ranked = self.ranked()
        alike = [run for run in ranked if run.value == ranked[0].value]
        return min(alike, key=lambda run: max(run.schedule.timeline().peak_bytes), default=None)  # type: ignore[union-attr]


def better(schedule: Schedule, other: Schedule) -> Schedule:
    """The shorter of two schedules of one problem (the first of equals), with the higher of both proven bounds."""
    a, b = schedule.certificate, other.certificate
    assert a is not None
    assert b is not None
    chosen, certificate, proof = (schedule, a, b) if a.value <= b.value else (other, b, a)
    if proof.bound <= certificate.bound:
        return chosen
    check_bound(chosen, proof.bound, proof.proof)
    return chosen.certified(
        replace(certificate, bound=proof.bound, relaxation=proof.relaxation, ranks=proof.ranks, proof=proof.proof)
    )
