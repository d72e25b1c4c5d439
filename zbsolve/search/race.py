"""A race between choices for one step (placement, partition, …): search time goes to those that can still win."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..greedy.lists.list_scheduler import schedule_by_start
from ..greedy.side_stream import with_side_streams, without_side_streams
from ..ilp.bounds.closed_forms import closed_form
from ..problem import Ints, Problem
from ..profile.step import Step
from ..schedule import Certificate, Schedule
from ..schedule.timeline import Floats, Precedence, longest_path
from ..systems.table import is_named
from ..util.clock import limit_of
from ..util.errors import Deadlock, interruption
from ..util.workers import WorkersLost
from ..verifier import verify
from .certify import QUICK_PASSES, check_bound
from .task import Answer, Task
from .task_runner import ROUND, TaskRunner


def hint_on(problem: Problem, hint: Schedule) -> Schedule | None:
    """`hint` if it has the same passes; else the best valid schedule of `problem` that its times give. None if stages are on
    other ranks, or no such schedule is valid.

    Passes that both problems have start as in the hint. Another pass that takes memory starts right before the first one
    that waits for it; any other pass starts as soon as its inputs are there.
    """
    if hint.problem.stage_ranks != problem.stage_ranks:
        return None
    if hint.problem.passes.named_as(problem.passes):
        return hint
    begin = _begins(problem, hint)
    if begin is None:
        return None
    start = _starts(problem, begin)
    plain = schedule_by_start(without_side_streams(problem), start[problem.computing])
    with suppress(Deadlock):  # where memory is tight, copies may wait for each other
        schedule = with_side_streams(problem, plain)
        return None if verify(problem, schedule) else schedule
    return None


def _starts(problem: Problem, begin: Floats) -> Ints:
    """The earliest starts that the edges allow, none before `begin`, µs, shape (passes,)."""
    edges, duration = problem.edges, problem.passes.duration
    # The source waits for nothing, so arcs from it close no cycle.
    source = int(np.setdiff1d(np.arange(len(begin)), edges.after)[0])
    later = np.setdiff1d(np.arange(len(begin)), [source])
    arcs = Precedence(
        np.concatenate([edges.before, np.full(len(later), source)]),
        np.concatenate([edges.after, later]),
        np.concatenate([edges.lag, begin.astype(np.int64)[later] - duration[source]]),
    )
    return longest_path(problem, arcs)[0]


def _begins(problem: Problem, hint: Schedule) -> Floats | None:
    """When each pass begins by the hint, µs, shape (passes,); None if the two have no pass in common."""
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
    """A step in the race. name: its placement and what else was chosen for it. partition: all names of partitions with these
    layers. failed: why it has no schedule. least: the closed-form bound, µs, that ruled it out; 0: none did. place: its
    placement, and choices that no move changes. moved: the `Way` by which it was made from another run, or ""."""

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
        """The certificate of its schedule."""
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate

    @property
    def value(self) -> int:
        """The value of its schedule, µs."""
        return self.certificate.value

    @property
    def bound(self) -> int:
        """The highest proven bound, µs."""
        return self.certificate.bound

    def beats(self, other: Run) -> bool:
        """Whether it has a schedule, and that is shorter than the other's."""
        return self.schedule is not None and self.value < other.value


@dataclass
class Job:
    """A search of a run. amount: wall seconds, or effort. hint: the schedule to start from; None: the run's own. options:
    further ones of `search.solve`."""

    run: Run
    amount: float
    hint: Schedule | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Race:
    """The runs, the time left (wall seconds, or effort), and the runner that solves them. hint: the user's schedule. halted:
    asks whether the race is to end. named: whether runs differ in partition. choosing: whether they differ in passes.
    compared: whether every place is searched, even if a bound rules it out. interrupted: by Ctrl-C."""

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
        """Whether no further search should begin."""
        return self.interrupted or self.halted()

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """A context that Ctrl-C, or the loss of workers, leaves without an error once there is a schedule."""
        try:
            yield
        except (KeyboardInterrupt, SystemError, WorkersLost) as error:
            if self.best() is None or not (isinstance(error, WorkersLost) or interruption(error)):
                raise
            self.interrupted = True

    def settle(self) -> None:
        """Take the time that building and bounds used off the time left."""
        if not self.runner.counted:
            self.left = max(0.0, min(self.left, self.ends - time.monotonic()))

    @property
    def order(self) -> str:
        """The name of the system whose order every run has, or ""."""
        method: str = self.options.get("method", "auto")
        return method if is_named(method) else ""

    def look(self, effort: float) -> dict[str, Any]:
        """Options of a quick search: greedy, or the named order that every run has."""
        return {"method": self.order or "greedy", "effort": effort}

    def label(self, run: Run) -> str:
        """The name of a run, with its partition if runs differ in that."""
        return f"{run.name} {run.partition}" if self.named else run.name

    def solve_each(self, jobs: Iterable[Job], count: int = 1, size: int = ROUND) -> Iterator[Run]:
        """Solve the runs of these jobs; a run keeps its schedule if nothing better comes. Yields each run when it is done.
        count: the number of jobs: with several workers each job gets more wall time. size: jobs drawn at once if effort is
        the limit. If runs differ in their passes, those that a bound rules out are skipped."""
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
        """Whether a closed-form bound shows that `run` has nothing as short as the best. The bound goes into `run.least`."""
        best = self.best()
        if best is None or run.problem is None or len(run.problem.passes) > QUICK_PASSES:
            return False
        bound = max(run.problem.work, closed_form(run.problem).value)
        run.least = bound if bound > best.value else 0
        return run.least > 0

    def ranked(self) -> list[Run]:
        """The runs that have a schedule, the shortest first. Equals stay in order, so that the simplest is first."""
        return sorted((run for run in self.runs if run.schedule is not None), key=lambda run: run.value)

    def best(self) -> Run | None:
        """The first of `ranked`, or None."""
        return min((run for run in self.runs if run.schedule is not None), key=lambda run: run.value, default=None)

    def leanest(self) -> Run | None:
        """Of the runs with the least value the one with the lowest peak of bytes; of equals the first."""
        ranked = self.ranked()
        alike = [run for run in ranked if run.value == ranked[0].value]
        return min(alike, key=lambda run: max(run.schedule.timeline().peak_bytes), default=None)  # type: ignore[union-attr]


def better(schedule: Schedule, other: Schedule) -> Schedule:
    """The shorter of two schedules of one problem, with the higher of their bounds. Of equal values the first."""
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
