"""A trace: a measured `Timeline` of each training step of a run, with facts about the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np

from ..problem import Problem
from ..problem.form import ProblemForm
from ..problem.tables import Slowdown
from ..util.errors import BadInput, prefixed
from ..util.files import checked, read_one_of, write_document
from .order import order_as_json, order_from
from .schedule import Schedule
from .timeline import Floats, Timeline

SLACK = ":slack"  # ends the fact `split` of runs that moved passes W into idle time (see `exec.slack`)
REPLAYED = 12  # `replay_error` replays about so many steps
BY_STEP = ("steps", "ready", "losses", "peaks", "host", "sent")  # fields with one entry a step, or ()


class Switch(msgspec.Struct, frozen=True):
    """From step `step` on (0 is the first) the run used another order, with its syncs."""

    step: int
    order: dict[str, tuple[str, ...]]
    syncs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Trace:
    """Measured steps of one schedule. Columns have shape (passes,), in the problem's table order; times are µs.

    problem, schedule, syncs: what ran.
    switches: orders that replaced `schedule` later, in the order of their steps.
    steps: a Timeline for each step; times count from the step's common start.
    ready: for each step, when each pass had all its inputs on its rank; start − ready is launch and queueing.
    losses: the mean loss of each step.
    peaks: for each step, the most activation bytes that each rank held.
    facts: JSON values about the run (backend, ranks, threads, host, torch version, emulation, gradient check).
    host: for each step, µs that the interpreter took before each pass: from the end of the pass before, less the wait for a
        message; (): not measured.
    held: bytes that the pass's rank held after it, counted in one further step; None: not counted.
    sent: for each step, µs at the end of each pass in which a send blocked its rank; (): as the problem says.
    """

    problem: Problem
    schedule: dict[str, tuple[str, ...]]
    steps: tuple[Timeline, ...]
    ready: tuple[np.ndarray[Any, Any], ...]
    losses: tuple[float, ...]
    peaks: tuple[tuple[int, ...], ...]
    facts: dict[str, Any]
    host: tuple[np.ndarray[Any, Any], ...] = ()
    held: np.ndarray[Any, Any] | None = None
    syncs: tuple[tuple[str, str], ...] = ()
    sent: tuple[np.ndarray[Any, Any], ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def median_step(self) -> int:
        """The step whose value (the problem's objective) is the median; of two middle steps the shorter one."""
        ranked = sorted(range(len(self.steps)), key=lambda i: self.steps[i].value)
        return ranked[(len(ranked) - 1) // 2]

    def median(self) -> Timeline:
        """The timeline of the median step, with the bytes that were counted (`held`)."""
        return replace(self.steps[self.median_step], held=self.held)

    def planned(self, step: int = 0) -> Schedule:
        """The schedule that a step used, without a certificate."""
        first = Switch(0, self.schedule, self.syncs)
        ran = next((switch for switch in reversed(self.switches) if switch.step <= step), first)
        return Schedule(self.problem, ran.order, ran.syncs)

    def by_order(self) -> tuple[Trace, ...]:
        """A trace for each order that was used, with its steps."""
        runs = []
        for a, b in pairwise([0, *(switch.step for switch in self.switches), len(self.steps)]):
            ran, columns = self.planned(a), {name: getattr(self, name)[a:b] for name in BY_STEP}
            runs.append(replace(self, schedule=dict(ran.order), syncs=ran.syncs, switches=(), **columns))
        return tuple(runs)

    def of_problem(self, problem: Problem, where: str = "trace") -> Trace:
        """The same run, with a problem that has the same passes on the same ranks but other times. Raises BadInput naming
        the first pass that only one of both problems has, or that is on another rank."""
        own, other = set(self.problem.names), set(problem.names)
        if own != other:
            extra = min(own ^ other)
            raise BadInput(f"{where}: a run of other passes than the schedule's: {extra} is in one of them alone")
        rows = np.array([self.problem.index[name] for name in problem.names])
        moved = np.flatnonzero(self.problem.passes.rank[rows] != problem.passes.rank)
        if len(moved):
            i = int(moved[0])
            ran, planned = self.problem.passes.rank[rows[i]], problem.passes.rank[i]
            raise BadInput(f"{where}: pass {problem.names[i]} ran on rank {ran}, and the schedule has it on {planned}")
        steps = tuple(Timeline(problem, step.start[rows], step.end[rows]) for step in self.steps)
        ready, host, sent = (tuple(array[rows] for array in column) for column in (self.ready, self.host, self.sent))
        held = None if self.held is None else self.held[rows]
        return replace(self, problem=problem, steps=steps, ready=ready, host=host, held=held, sent=sent)

    def alone(self, step: int) -> Floats:
        """µs that each pass took in a step, shape (passes,), without the slowdown by passes beside it."""
        timeline = replace(self.steps[step], problem=self.problem)
        return timeline.alone() if self.slowdowns else np.asarray(timeline.end - timeline.start, np.float64)

    @property
    def slowdowns(self) -> tuple[Slowdown, ...]:
        """The problem's slowdowns; none if the run was emulated, since emulated passes do not slow each other."""
        return () if "emulated" in self.facts else self.problem.slowdowns

    def computed(self) -> Floats:
        """µs that each pass computed in each step: `alone` less the time of its sends, shape (steps, passes)."""
        alone = np.stack([self.alone(step) for step in range(len(self.steps))])
        return np.asarray(np.maximum(0.0, alone - (np.stack(self.sent) if self.sent else self.problem.sending)))

    def replayed(self, step: int, took: Floats | None = None) -> Timeline:
        """The step simulated again: the order that ran, each pass as early as possible, with its measured time (or `took`,
        as `alone` returns it) in whole µs, and messages as in the problem. The measured step is longer than this by launches
        and by slower messages. A pass that was shorter than its sends in the problem sends for all of its time."""
        problem, edges = self.problem, self.problem.edges
        whole = np.rint(np.maximum(self.alone(step) if took is None else took, 0)).astype(np.int64)
        part = np.minimum(1.0, whole / np.maximum(problem.sending, 1))
        sent = np.floor(edges.sent * part[edges.before]).astype(np.int64)
        passes, edges = replace(problem.passes, duration=whole), replace(edges, sent=sent)
        own = replace(problem, passes=passes, edges=edges, slowdowns=self.slowdowns)
        return Schedule(own, self.ran(step), self.planned(step).syncs).timeline()

    def ran(self, step: int) -> dict[str, tuple[str, ...]]:
        """The order in which passes ran in a step: the schedule's, unless W moved into idle time."""
        start, index, order = self.steps[step].start, self.problem.index, dict(self.planned(step).order)
        if not str(self.facts.get("split", "")).endswith(SLACK):
            return order
        return {stream: tuple(sorted(names, key=lambda name: start[index[name]])) for stream, names in order.items()}

    def replay_error(self) -> float:
        """Mean relative difference of (about twelve) replayed to measured steps; above 0: replayed ones are longer."""
        some = range(0, len(self.steps), 1 + len(self.steps) // REPLAYED)
        errors = [self.replayed(i).value / self.steps[i].value - 1 for i in some if self.steps[i].value]
        return float(np.mean(errors)) if errors else 0.0

    def waits(self, step: int) -> Floats:
        """µs that the stream of each pass stood idle before it because inputs were missing; of several streams the least.
        For a stream's first pass it counts from the begin of the step. 0 if it is not known when the inputs were there."""
        timeline, ready = self.steps[step], np.nan_to_num(self.ready[step], nan=-1.0)
        waited = np.full(len(self.problem.passes), np.inf)
        for names in self.ran(step).values():
            rows = [self.problem.index[name] for name in names]
            before = np.concatenate([[0.0], timeline.end[rows[:-1]]]) if rows else np.zeros(0)
            idle = np.maximum(np.minimum(ready[rows], timeline.start[rows]) - before, 0.0)
            waited[rows] = np.minimum(waited[rows], idle)
        return waited

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file, whole or not at all."""
        write_document(path, "trace", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Columns by pass name, and `wait` for readers."""
        names = self.problem.names

        def named(column: np.ndarray[Any, Any]) -> dict[str, Any]:
            return dict(zip(names, column.tolist(), strict=True))

        return {
            "digest": self.problem.digest,
            "facts": self.facts,
            "losses": list(self.losses),
            "peaks": [list(p) for p in self.peaks],
            "order": order_as_json(self.schedule),
            "syncs": [list(pair) for pair in self.syncs],
            "switches": msgspec.to_builtins(self.switches),
            "steps": [step.to_json() for step in self.steps],
            "ready": [named(array) for array in self.ready],
            "wait": [named(np.round(self.waits(i), 3)) for i in range(len(self.steps))],
            "host": [named(array) for array in self.host],
            **({"sent": [named(array) for array in self.sent]} if self.sent else {}),
            "held": None if self.held is None else named(self.held),
            "problem": self.problem.to_json(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file; `-` is standard input. Raises BadInput."""
        return cls.from_json(read_one_of(path, ("trace",))[1], str(path))

    @classmethod
    def from_json(cls, body: Any, where: str = "trace") -> Trace:
        """The trace that `to_json` wrote. Raises BadInput."""
        form = checked(body, TraceForm, where)
        problem = Problem.from_form(form.problem, where)
        ready = tuple(_column(column, problem, f"{where}: field 'ready'") for column in form.ready)
        host = tuple(_finite(column, problem, f"{where}: field 'host'") for column in form.host)
        sent = tuple(_finite(column, problem, f"{where}: field 'sent'") for column in form.sent)
        for name, columns in (("ready", ready), ("host", host), ("sent", sent)):
            if len(columns) != len(form.steps) and (columns or name == "ready"):
                raise BadInput(f"{where}: field '{name}' has {len(columns)} columns for {len(form.steps)} steps")
        if any(a >= b for a, b in pairwise([0, *(switch.step for switch in form.switches), len(form.steps)])):
            raise BadInput(f"{where}: field 'switches' has no steps that go up, from 1 to {len(form.steps) - 1}")
        with prefixed(where):
            order = dict(order_from(problem, form.order))
        for field, orders in (("order", order), *(("switches", switch.order) for switch in form.switches)):
            if {name for names in orders.values() for name in names} != {*problem.names}:
                raise BadInput(f"{where}: field '{field}' does not list exactly the problem's passes")
        return cls(
            problem,
            order,
            tuple(Timeline.from_json(problem, step, f"{where}: step {i}") for i, step in enumerate(form.steps)),
            ready,
            tuple(form.losses),
            tuple(tuple(p) for p in form.peaks),
            form.facts,
            host,
            None if form.held is None else _finite(form.held, problem, f"{where}: field 'held'"),
            tuple(form.syncs),
            sent,
            form.switches,
        )


class TraceForm(msgspec.Struct):
    """A trace in a file. Columns are objects: pass name → number; in `steps` pass name → [start, end]."""

    problem: ProblemForm
    facts: dict[str, Any]
    losses: list[float]
    peaks: list[list[int]]
    order: dict[str, str | list[str]]
    steps: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    ready: list[dict[str, float]]
    host: list[dict[str, float]] = []
    held: dict[str, float] | None = None
    syncs: list[tuple[str, str]] = []
    sent: list[dict[str, float]] = []
    switches: tuple[Switch, ...] = ()


def _column(body: Mapping[str, float], problem: Problem, where: str) -> Floats:
    """A number for every pass, in table order."""
    try:
        return np.array([body[name] for name in problem.names], np.float64)
    except KeyError:
        raise BadInput(f"{where} does not name every pass") from None


def _finite(body: Mapping[str, float], problem: Problem, where: str) -> Floats:
    column = _column(body, problem, where)
    if not np.isfinite(column).all():
        raise BadInput(f"{where}: pass {problem.names[int(np.flatnonzero(~np.isfinite(column))[0])]} has no finite number")
    return column
