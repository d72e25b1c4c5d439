"""How long microbatches are: one factor each, where the sequences that they hold differ in length; and which passes stalled.

A longer microbatch takes longer at every stage, so what others of its stage took in the median, times one factor a
microbatch, is what its passes took. A pipeline waits for the longest, so medians alone give too short a step. A stall is a
pass that took several times what others of its lane did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ..problem import Problem
from ..timeline import Floats
from ..trace import Trace
from ..util.files import Fields
from ..util.statistics import weighted_median

LEFT = 0.5  # of the spread that medians leave: what factors may leave at most, to be said to explain it
CLOSER = 0.01  # of the median step: so much closer its order must come with its own factors


@dataclass(frozen=True)
class Lengths:
    """usual: µs that each pass computes, the median of its lane (all microbatches and steps), shape (passes,). each: how
    much longer a microbatch took in a step, the median over its passes, shape (steps, microbatches). base: µs of a pass of a
    microbatch whose factor is 1, so that base times factor has the least absolute deviations from its lane's times; shape
    (passes,). spread: how far passes lie from their usual time, the median as a share; left: the same with the factors."""

    usual: Floats
    each: Floats
    base: Floats
    spread: float
    left: float

    @property
    def explain(self) -> bool:
        """Whether factors take away half of the spread or more: of passes that vary by themselves they take less."""
        return self.spread > 0 and self.left <= LEFT * self.spread


def lengths_of(trace: Trace) -> Lengths:
    """The factors of all steps of a run."""
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
    """The factors of the median step, where they explain what passes took and bring its order closer to what was measured
    than medians alone do, by a per cent of it; else ()."""
    factors, measured = lengths.each[trace.median_step], trace.steps[trace.median_step].value
    if not lengths.explain or not measured:
        return ()
    tried = with_times(trace.problem, lengths.usual), with_times(trace.problem, lengths.base).scaled(factors, inf)
    ran = trace.planned(trace.median_step)
    misses = [abs(replace(ran, problem=problem).timeline().value / measured - 1) for problem in tried]
    return tuple(round(factor, 6) for factor in factors.tolist()) if misses[0] - misses[1] >= CLOSER else ()


def with_times(problem: Problem, times: Floats) -> Problem:
    """The same step where passes compute so many µs, shape (passes,), rounded to whole ones."""
    p = problem.passes
    own = np.rint(times).astype(np.int64) + problem.sending
    return replace(problem, passes=replace(p, duration=np.where(problem.computing, own, p.duration)))


STALLED, LEAST_SHARE = 3.0, 0.005  # times the median of its lane; and longer than that by this share of the median step
MOST = 20  # stalls that are named


@dataclass(frozen=True, slots=True)
class Stall(Fields):
    """A pass that stalled. step: number of the trace's step; took and usual (its lane's median), µs; measured: the step's
    time; without: what the step would have taken with the usual time in its place, by the longest path."""

    step: int
    name: str
    rank: int
    took: float
    usual: float
    measured: float
    without: float


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
    healed, measured = trace.alone(number), trace.steps[number].value
    healed[row] += usual - took
    saved = trace.replayed(number).value - trace.replayed(number, healed).value
    rank = int(trace.problem.passes.rank[row])
    return Stall(number, trace.problem.names[row], rank, took, usual, measured, measured - saved)
