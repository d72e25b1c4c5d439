"""A trace: what really ran. One measured `Timeline` a training step, with facts about the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadInput
from .files import field, read_document, write_document
from .problem import Problem
from .schedule import Schedule
from .timeline import Floats, Timeline


@dataclass(frozen=True, eq=False)
class Trace:
    """Measured steps of one schedule. Columns have shape (passes,), in the problem's table order.

    `steps`: a Timeline a step, µs since the step's common start. `ready`: per step, when each pass had all its inputs
    on its rank, µs (start − ready is launch and queueing; for waiting see `waits`). `losses`: a step's mean loss. `peaks`:
    per step, the most activation bytes each rank held. `facts`: JSON values about the run (backend, ranks, threads,
    host, torch version, emulation, gradient check). `host`: per step, µs that the interpreter itself took before each
    pass: from the end of the one before, less waiting for its message; () where nobody measured it. `held`: bytes that
    the pass's rank held after it, in one more step; None where nobody counted. `syncs`: the schedule's.
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

    @property
    def median_step(self) -> int:
        """The step whose value (the problem's objective) is the median, the lower of two: a real one, no mixture."""
        ranked = sorted(range(len(self.steps)), key=lambda i: self.steps[i].value)
        return ranked[(len(ranked) - 1) // 2]

    def median(self) -> Timeline:
        """The timeline of the median step."""
        return self.steps[self.median_step]

    def planned(self) -> Schedule:
        """The schedule that ran, without its certificate."""
        return Schedule(self.problem, self.schedule, self.syncs)

    def waits(self, step: int) -> Floats:
        """µs that each pass's stream stood idle before it because its inputs were not there: the shortest over its
        streams; for a stream's first pass, since the step began; 0 where nobody knows when its inputs were there."""
        timeline, ready = self.steps[step], np.nan_to_num(self.ready[step], nan=-1.0)
        waited = np.full(len(self.problem.passes), np.inf)
        for names in self.schedule.values():
            rows = [self.problem.index[name] for name in names]
            before = np.concatenate([[0.0], timeline.end[rows[:-1]]]) if rows else np.zeros(0)
            idle = np.maximum(np.minimum(ready[rows], timeline.start[rows]) - before, 0.0)
            waited[rows] = np.minimum(waited[rows], idle)
        return waited

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file, whole or not at all."""
        write_document(path, "trace", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Fields by pass name, and the derived `wait` for readers."""
        names = self.problem.names

        def named(column: np.ndarray[Any, Any]) -> dict[str, Any]:
            return dict(zip(names, column.tolist(), strict=True))

        return {
            "digest": self.problem.digest,
            "facts": self.facts,
            "losses": list(self.losses),
            "peaks": [list(p) for p in self.peaks],
            "order": {stream: list(passes) for stream, passes in self.schedule.items()},
            "syncs": [list(pair) for pair in self.syncs],
            "steps": [step.to_json() for step in self.steps],
            "ready": [named(one) for one in self.ready],
            "wait": [named(np.round(self.waits(i), 3)) for i in range(len(self.steps))],
            "host": [named(one) for one in self.host],
            "held": None if self.held is None else named(self.held),
            "problem": self.problem.to_json(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file; `-` is standard input. Raises BadInput."""
        return cls.from_json(read_document(path, "trace"), str(path))

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = "trace") -> Trace:
        """The trace that `to_json` wrote. Raises BadInput."""
        content = dict(body)
        problem = Problem.from_json(field(content, "problem", dict, where), where)
        steps = field(content, "steps", list, where)
        if not steps:
            raise BadInput(f"{where}: field 'steps' is empty")
        ready = tuple(_column(one, problem, f"{where}: field 'ready'") for one in field(content, "ready", list, where))
        host = tuple(
            _finite(one, problem, f"{where}: field 'host'") for one in field({"host": [], **content}, "host", list, where)
        )
        for name, columns in (("ready", ready), ("host", host)):
            if len(columns) != len(steps) and (columns or name == "ready"):
                raise BadInput(f"{where}: field '{name}' has {len(columns)} columns for {len(steps)} steps")
        held = content.get("held")
        losses, peaks = field(content, "losses", list, where), field(content, "peaks", list, where)
        if not all(isinstance(x, int | float) for x in losses):
            raise BadInput(f"{where}: field 'losses' must list numbers")
        if not all(isinstance(p, list) and all(type(x) is int for x in p) for p in peaks):
            raise BadInput(f"{where}: field 'peaks' must list whole bytes, rank by rank")
        order, syncs = field(content, "order", dict, where), field({"syncs": [], **content}, "syncs", list, where)
        listed = [name for names in order.values() for name in (names if isinstance(names, list) else (None,))]
        if not all(isinstance(name, str) for name in listed) or {*listed} != {*problem.names}:
            raise BadInput(f"{where}: field 'order' does not list exactly the problem's passes")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in syncs):
            raise BadInput(f"{where}: field 'syncs' must hold pairs of pass names")
        return cls(
            problem,
            {stream: tuple(names) for stream, names in order.items()},
            tuple(Timeline.from_json(problem, step, f"{where}: step {i}") for i, step in enumerate(steps)),
            ready,
            tuple(float(x) for x in losses),
            tuple(tuple(p) for p in peaks),
            field(content, "facts", dict, where),
            host,
            None if held is None else _finite(held, problem, f"{where}: field 'held'"),
            tuple((str(a), str(b)) for a, b in syncs),
        )


def _column(body: Any, problem: Problem, where: str) -> Floats:
    """A number for every pass, in table order."""
    try:
        return np.array([float(body[name]) for name in problem.names])
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"{where} does not name every pass") from None


def _finite(body: Any, problem: Problem, where: str) -> Floats:
    column = _column(body, problem, where)
    if not np.isfinite(column).all():
        raise BadInput(f"{where}: pass {problem.names[int(np.flatnonzero(~np.isfinite(column))[0])]} has no finite number")
    return column
