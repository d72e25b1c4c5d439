"""Stalls of a run: passes that took several times what others of their lane did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..timeline import Timeline
from ..trace import Trace

STALLED, LEAST_SHARE = 3.0, 0.005  # times the median of its lane; and longer than that by this share of the median step
MOST = 20  # stalls that are named


@dataclass(frozen=True, slots=True)
class Stall:
    """A pass that stalled. step: number of the trace's step; took and usual (its lane's median), µs; measured: the step's
    time; without: what the step would have taken with the usual time in its place, by the longest path."""

    step: int
    name: str
    rank: int
    took: float
    usual: float
    measured: float
    without: float

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def stalls_of(trace: Trace) -> tuple[Stall, ...]:
    """The longest stalls of a run, at most 20, longest first. A lane is all passes of one kind, stage and rank, of all
    steps."""
    problem, usual = trace.problem, np.zeros(len(trace.problem.passes))
    times = np.stack([step.end - step.start for step in trace.steps]).astype(np.float64)
    for rows in problem.lanes:
        usual[rows] = np.median(times[:, rows])
    least = LEAST_SHARE * trace.steps[trace.median_step].value
    where = np.argwhere((times > STALLED * usual) & (times > usual + least))
    longest = sorted(where.tolist(), key=lambda at: usual[at[1]] - times[at[0], at[1]])[:MOST]
    return tuple(_stall(trace, step, row, float(usual[row])) for step, row in longest)


def _stall(trace: Trace, number: int, row: int, usual: float) -> Stall:
    step = trace.steps[number]
    end = step.end.copy()
    end[row] = step.start[row] + usual
    healed = replace(trace, steps=(Timeline(trace.problem, step.start, end),))
    saved = trace.replayed(number).value - healed.replayed(0).value
    took = float(step.end[row] - step.start[row])
    rank = int(trace.problem.passes.rank[row])
    return Stall(number, trace.problem.names[row], rank, took, usual, step.value, step.value - saved)
