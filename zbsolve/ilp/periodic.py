"""The steady state alone: one microbatch's passes repeated every period, and the least memory that this needs.

Scope of every proof here: strictly periodic schedules, one microbatch a period, every microbatch alike (modulo
scheduling, Rau 1994; building blocks of arXiv 2405.15362, section 3). Warm-up and cool-down are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from ..errors import BadInput, Infeasible
from ..problem import Problem


@dataclass(frozen=True)
class Period:
    """One microbatch's passes repeated every `period` µs: `offset[name]` is the start of each pass. `memory` bytes on the
    fullest rank. `proven`: no strictly periodic schedule of this period needs less."""

    period: int
    offset: dict[str, int]
    memory: int
    proven: bool


def least_memory(problem: Problem, period: int | None = None, seconds: float = 10.0, seed: int = 0) -> Period:
    """The least memory at which the problem's placement repeats every `period` µs (default: the work of the busiest
    rank for one microbatch, so that nothing but the ramps is bubble). The problem's capacity plays no part.

    Raises Infeasible where no schedule repeats in this period, BadInput where a pass occupies several streams.
    """
    one = problem.head(1)
    work = np.bincount(one.passes.rank, one.passes.duration, one.ranks)
    time = int(work.max()) if period is None else period
    if any(len(streams) > 1 for streams in one.passes.stream_sets):
        raise BadInput("periodic: passes that occupy several streams are not modelled")
    if time < int(work.max()):
        raise Infeasible(f"period {time} µs: rank {int(work.argmax())} has {int(work.max())} µs of work a microbatch")
    model = cp_model.CpModel()
    horizon = int(one.passes.duration.sum() + one.edges.lag.sum()) + len(one.passes) * time
    offset, slot = _offsets(model, one, time, horizon)
    _streams(model, one, slot, time)
    memory = _memory(model, one, offset, slot, time, horizon)
    model.minimize(memory)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to Python
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise Infeasible(f"period {time} µs: no schedule repeats so often")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise Infeasible(f"period {time} µs: none found in {seconds} s")
    start = {name: solver.value(v) for name, v in zip(one.names, offset, strict=True)}
    return Period(time, start, int(solver.value(memory)), status == cp_model.OPTIMAL)


def _offsets(
    model: cp_model.CpModel, one: Problem, period: int, horizon: int
) -> tuple[list[cp_model.IntVar], list[cp_model.IntVar]]:
    """The start of each pass, and its place within the period: offset = slot + whole periods."""
    offset = [model.new_int_var(0, horizon, "") for _ in one.names]
    slot = []
    for start in offset:
        within = model.new_int_var(0, period - 1, "")
        turns = model.new_int_var(0, horizon // period + 1, "")
        model.add(start == within + period * turns)
        slot.append(within)
    edges, duration = one.edges, one.passes.duration.tolist()
    for i, j, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
        model.add(offset[j] >= offset[i] + duration[i] + lag)
    sources = np.setdiff1d(np.arange(len(offset)), edges.after)
    if len(sources) == 1:  # nothing changes when the whole block moves
        model.add(offset[int(sources[0])] == 0)
    return offset, slot


def _streams(model: cp_model.CpModel, one: Problem, slot: list[cp_model.IntVar], period: int) -> None:
    """A stream runs one pass at a time around the circle: two turns of it side by side may not overlap."""
    duration = one.passes.duration.tolist()
    for rows in one.members.values():
        turns = [
            model.new_fixed_size_interval_var(slot[i] + turn * period, duration[i], "")
            for i in rows.tolist()
            for turn in (0, 1)
        ]
        model.add_no_overlap(turns)


def _memory(
    model: cp_model.CpModel,
    one: Problem,
    offset: list[cp_model.IntVar],
    slot: list[cp_model.IntVar],
    period: int,
    horizon: int,
) -> cp_model.IntVar:
    """Bytes on the fullest rank: an edge held for q periods and a rest counts q times always, once more for the rest."""
    edges, duration = one.edges, one.passes.duration.tolist()
    most = int(edges.bytes.sum()) * (horizon // period + 2)
    memory = model.new_int_var(0, most, "memory")
    for rank in range(one.ranks):
        rows = np.flatnonzero((edges.bytes > 0) & (one.passes.rank[edges.before] == rank))
        always = []
        intervals, demands = [], []
        for i, j, size in zip(*(c[rows].tolist() for c in (edges.before, edges.after, edges.bytes)), strict=True):
            turns, rest = model.new_int_var(0, horizon // period + 1, ""), model.new_int_var(0, period - 1, "")
            model.add(turns * period + rest == offset[j] + duration[j] - offset[i])
            always.append(size * turns)
            for turn in (0, 1):
                end = model.new_int_var(0, 3 * period, "")
                intervals.append(model.new_interval_var(slot[i] + turn * period, rest, end, ""))
                demands.append(size)
        room = model.new_int_var(0, most, "")
        model.add(room + cp_model.LinearExpr.sum(always) == memory)
        model.add_cumulative(intervals, demands, room)
    return memory
