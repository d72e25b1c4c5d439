"""Stalls of a run: passes that took several times what others of their lane did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..timeline import Timeline
from ..trace import Trace
from .lengths import lengths_of

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
    steps; where microbatches differ in length, a longer one may take longer."""
    problem, lengths = trace.problem, lengths_of(trace)
    times = trace.computed()
    usual = np.tile(lengths.usual, (len(times), 1))
    if lengths.explain:
        usual *= np.where(problem.in_microbatch, lengths.each[:, problem.passes.microbatch * problem.in_microbatch], 1.0)
    least = LEAST_SHARE * trace.steps[trace.median_step].value
    where = np.argwhere((times > STALLED * usual) & (times > usual + least))
    longest = sorted(where.tolist(), key=lambda at: usual[at[0], at[1]] - times[at[0], at[1]])[:MOST]
    return tuple(_stall(trace, step, row, float(times[step, row]), float(usual[step, row])) for step, row in longest)


def _stall(trace: Trace, number: int, row: int, took: float, usual: float) -> Stall:
    step = trace.steps[number]
    end = step.end.copy()
    end[row] += usual - took
    healed = replace(trace, steps=(Timeline(trace.problem, step.start, end),))
    saved = trace.replayed(number).value - healed.replayed(0).value
    rank = int(trace.problem.passes.rank[row])
    return Stall(number, trace.problem.names[row], rank, took, usual, step.value, step.value - saved)
