"""A trace: what really ran. One measured `Timeline` a training step, with facts about the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadInput
from .files import field, read_document, write_document
from .problem import Problem
from .timeline import Timeline


@dataclass(frozen=True, eq=False)
class Trace:
    """Measured steps of one schedule.

    `steps`: a Timeline a step, µs since the step's common start. `ready`: per step, when each pass had all its inputs
    on its rank, µs, shape (passes,) in table order (start − ready is launch and queueing; ready − the end of the pass
    before it on its stream is waiting). `losses`: a step's mean loss. `peaks`: per step, the most activation bytes each
    rank held. `facts`: JSON values about the run (backend, ranks, threads, host, torch version, emulation, gradient
    check).
    """

    problem: Problem
    schedule: dict[str, tuple[str, ...]]
    steps: tuple[Timeline, ...]
    ready: tuple[np.ndarray[Any, Any], ...]
    losses: tuple[float, ...]
    peaks: tuple[tuple[int, ...], ...]
    facts: dict[str, Any]

    @property
    def median_step(self) -> int:
        """The step whose value (the problem's objective) is the median, the lower of two: a real one, no mixture."""
        ranked = sorted(range(len(self.steps)), key=lambda i: self.steps[i].value)
        return ranked[(len(ranked) - 1) // 2]

    def median(self) -> Timeline:
        """The timeline of the median step."""
        return self.steps[self.median_step]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file, whole or not at all."""
        write_document(
            path,
            "trace",
            {
                "digest": self.problem.digest,
                "facts": self.facts,
                "losses": list(self.losses),
                "peaks": [list(p) for p in self.peaks],
                "order": {stream: list(names) for stream, names in self.schedule.items()},
                "steps": [step.to_json() for step in self.steps],
                "ready": [dict(zip(self.problem.names, r.tolist(), strict=True)) for r in self.ready],
                "problem": self.problem.to_json(),
            },
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file. Raises BadInput."""
        body, where = read_document(path, "trace"), str(path)
        problem = Problem.from_json(field(body, "problem", dict, where), where)
        steps = field(body, "steps", list, where)
        if not steps:
            raise BadInput(f"{where}: field 'steps' is empty")
        ready = field(body, "ready", list, where)
        try:
            columns = tuple(np.array([float(one[name]) for name in problem.names]) for one in ready)
        except (KeyError, TypeError, ValueError):
            raise BadInput(f"{where}: field 'ready' does not name every pass") from None
        losses, peaks = field(body, "losses", list, where), field(body, "peaks", list, where)
        if not all(isinstance(x, int | float) for x in losses):
            raise BadInput(f"{where}: field 'losses' must list numbers")
        if not all(isinstance(p, list) and all(type(x) is int for x in p) for p in peaks):
            raise BadInput(f"{where}: field 'peaks' must list whole bytes, rank by rank")
        return cls(
            problem,
            {stream: tuple(names) for stream, names in field(body, "order", dict, where).items()},
            tuple(Timeline.from_json(problem, step, f"{where}: step {i}") for i, step in enumerate(steps)),
            columns,
            tuple(float(x) for x in losses),
            tuple(tuple(p) for p in peaks),
            field(body, "facts", dict, where),
        )
