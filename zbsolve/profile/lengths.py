"""How long the microbatches of a run are: a factor for each, where their sequences differ in length; and which passes
stalled.

A longer microbatch takes longer on every stage. So its passes take the median time of their stage times the
microbatch's factor. A pipeline waits for the longest one, so medians alone would predict too short a step. A stall is a
pass that took several times as long as others of its lane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ..problem import Problem
from ..schedule.timeline import Floats
from ..schedule.trace import Trace
from ..util.columns import weighted_median
from ..util.files import Fields

LEFT = 0.5  # of the spread around medians: factors explain it if they leave at most this
CLOSER = 0.01  # of the median step: factors must improve the prediction of its time by at least this


@dataclass(frozen=True)
class Lengths:
    """usual: µs that each pass computes, the median of its lane (all microbatches and steps), shape (passes,). each: the
    factor of a microbatch in a step, the median over its passes, shape (steps, microbatches). base: µs of a pass of a
    microbatch with factor 1, such that base times factor has the least absolute deviations from its lane's times; shape
    (passes,). spread: how far passes are from their usual time, the median as a share; left: the same with factors."""

    usual: Floats
    each: Floats
    base: Floats
    spread: float
    left: float

    @property
    def explain(self) -> bool:
        """Do factors remove at least half of the spread? If passes vary independently, they remove less."""
        return self.spread > 0 and self.left <= LEFT * self.spread


def lengths_of(trace: Trace) -> Lengths:
    """The factors of microbatches in all steps of a run."""
    problem = trace.problem
    times = trace.computed()
    usual = np.zeros(len(problem.passes))
    for rows in problem.lanes:
        usual[rows] = np.median(times[:, rows])
    rows = np.flatnonzero(problem.in_microbatch & problem.computing & (usual > 0))
    of, ratio = problem.passes.microbatch[rows], times[:, rows] / usual[rows]
    each = np.ones((len(times), problem.microbatches))
    for i in np.unique(of).tolist():
        each[:, i] = np.median(ratio[:, of == i], axis=1)
    each = np.where(each > 0, each, 1.0)
    base = usual.copy()
    for lane in problem.lanes:
        if problem.in_microbatch[lane[0]]:
            factor = each[:, problem.passes.microbatch[lane]]
            base[lane] = weighted_median(times[:, lane] / factor, factor)
    spread, left = (float(np.median(np.abs(array - 1))) for array in (ratio, ratio / each[:, of]))
    return Lengths(usual, each, base, spread, left)


def factors_of(trace: Trace, lengths: Lengths) -> tuple[float, ...]:
    """The factors of the median step, if they explain the times of passes, and predict the measured step better than medians
    alone, by 1 % of it; else ()."""
    factors, measured = lengths.each[trace.median_step], trace.steps[trace.median_step].value
    if not lengths.explain or not measured:
        return ()
    tried = with_times(trace.problem, lengths.usual), with_times(trace.problem, lengths.base).scaled(factors, inf)
    ran = trace.planned(trace.median_step)
    misses = [abs(replace(ran, problem=problem).timeline().value / measured - 1) for problem in tried]
    return tuple(round(factor, 6) for factor in factors.tolist()) if misses[0] - misses[1] >= CLOSER else ()


def with_times(problem: Problem, times: Floats) -> Problem:
    """The same step with these µs of computing, shape (passes,), rounded."""
    p = problem.passes
    own = np.rint(times).astype(np.int64) + problem.sending
    return replace(problem, passes=replace(p, duration=np.where(problem.computing, own, p.duration)))


STALLED, LEAST_SHARE = 3.0, 0.005  # times the median of its lane; and longer by at least this share of the median step
MOST = 20  # stalls that are reported


@dataclass(frozen=True, slots=True)
class Stall(Fields):
    """A pass that stalled. step: number of the trace's step; took, usual: its time and its lane's median, µs; measured: the
    step's time; without: the step's time by the longest path if the pass had taken its usual time."""

    step: int
    name: str
    rank: int
    took: float
    usual: float
    measured: float
    without: float


def stalls_of(trace: Trace) -> tuple[Stall, ...]:
    """The longest stalls of a run, at most 20, longest first. A lane has all passes of one kind, stage and rank, of all
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
    healed, measured = trace.alone(number), trace.steps[number].value
    healed[row] += usual - took
    saved = trace.replayed(number).value - trace.replayed(number, healed).value
    rank = int(trace.problem.passes.rank[row])
    return Stall(number, trace.problem.names[row], rank, took, usual, measured, measured - saved)
