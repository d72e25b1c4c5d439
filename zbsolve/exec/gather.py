"""What each rank saw → one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import Trace
from .lower import walk
from .walk import Record


@dataclass(frozen=True)
class Report:
    """One rank's steps: per step when it began and, per pass in program order, ready, start and end, ns on rank 0's
    clock; per step the sum and number of its losses; the most bytes held after a pass, and at any moment."""

    rank: int
    began: list[int]
    ready: list[list[int]]
    start: list[list[int]]
    end: list[list[int]]
    losses: list[float]
    peak: int
    transient: int

    @classmethod
    def of(cls, rank: int, records: Sequence[Record], peak: int, transient: int, offset: int) -> Report:
        """`offset`: ns that this rank's clock is ahead of rank 0's."""
        return cls(
            rank,
            [r.began - offset for r in records],
            [[t - offset for t in r.ready] for r in records],
            [[t - offset for t in r.start] for r in records],
            [[t - offset for t in r.end] for r in records],
            [float(torch.stack(r.losses).double().mean()) if r.losses else 0.0 for r in records],
            peak,
            transient,
        )


def trace_of(schedule: Schedule, reports: Sequence[Report], facts: dict[str, Any]) -> Trace:
    """The trace of all ranks; a step's time 0 is when its first rank began. `reports[r]` is rank r's."""
    problem = schedule.problem
    rows = [[problem.index[name] for name in walk(schedule, report.rank)] for report in reports]
    steps, ready = [], []
    for i in range(len(reports[0].began)):
        zero = min(report.began[i] for report in reports)
        columns = {}
        for what in ("ready", "start", "end"):
            column = np.zeros(len(problem.passes))
            for mine, report in zip(rows, reports, strict=True):
                column[mine] = (np.array(getattr(report, what)[i]) - zero) / 1000
            columns[what] = column
        steps.append(Timeline(problem, columns["start"], columns["end"]))
        ready.append(columns["ready"])
    peaks = tuple(report.peak for report in reports)
    return Trace(
        problem,
        dict(schedule.order),
        tuple(steps),
        tuple(ready),
        tuple(sum(report.losses[i] for report in reports) for i in range(len(steps))),
        (peaks,) * len(steps),
        {**facts, "transient_peaks": [report.transient for report in reports]},
    )
