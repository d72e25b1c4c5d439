"""The CP-SAT model of one round that repeats: modulo scheduling around a circle (Rau, 1994)."""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from ...problem import Ints
from ...util.errors import BadInput, Infeasible
from ...util.machine import cores
from ..bounds.necessary_arcs import necessary_arcs_of
from ..cp_solver import make_solver
from .rounds import RoundArcs, Rounds


def arcs_of_rounds(rounds: Rounds) -> RoundArcs:
    """The necessary arcs between rounds: edges, lanes, waits for the problem's memory."""
    a = necessary_arcs_of(rounds.problem)
    before = np.repeat(np.arange(len(rounds.problem.passes)), np.diff(a.out_first))
    return rounds.into(before, a.out_pass, a.out_lag)


class PeriodicModel:
    """One round around a circle of `period` µs, lanes in order; `model` is open for more constraints.

    Raises BadInput where a pass occupies several streams or the period is no time, Infeasible where a rank's work is longer.
    """

    def __init__(self, rounds: Rounds, period: int) -> None:
        p, rows = rounds.problem.passes, rounds.rows
        if any(len(streams) > 1 for streams in p.stream_sets):
            raise BadInput("periodic: passes that occupy several streams are not modelled")
        if period < 1:
            raise BadInput(f"period {period} µs: strictly periodic schedules repeat after at least 1 µs")
        self.work = np.bincount(p.rank[rows], np.where(rounds.problem.computing[rows], p.duration[rows], 0))
        if period < int(self.work.max()):
            rank = int(self.work.argmax())
            raise Infeasible(f"period {period} µs: rank {rank} has {int(self.work[rank])} µs of work a microbatch")
        self.rounds, self.period, self.model = rounds, period, cp_model.CpModel()
        self.duration = p.duration[rows].tolist()
        self.horizon = int(p.duration[rows].sum() + rounds.edges.lag.sum()) + len(rows) * period
        far = int(rounds.edges.distance.max(initial=0))
        self.max_turns = self.horizon // period + 2 + far
        self.max_bytes = int(rounds.problem.edges.bytes.sum()) * (self.max_turns + 2)
        self.offset, self.slot = self._offsets()
        self._streams()

    def solve(self, seconds: float, seed: int) -> tuple[int, cp_model.CpSolver]:
        """CP-SAT's status, and its solver."""
        solver = make_solver(seconds, max(2, cores()), seed=seed)
        return int(solver.solve(self.model)), solver

    def starts(self, solver: cp_model.CpSolver) -> list[int]:
        """The start of each pass of the round, µs."""
        return [solver.value(v) for v in self.offset]

    def _offsets(self) -> tuple[list[cp_model.IntVar], list[cp_model.IntVar]]:
        """The start of each pass, and its place within the period: offset = slot + whole periods."""
        model, arcs = self.model, arcs_of_rounds(self.rounds)
        offset = [model.new_int_var(0, self.horizon, "") for _ in self.duration]
        slot = []
        for start in offset:
            within = model.new_int_var(0, self.period - 1, "")
            model.add(start == within + self.period * model.new_int_var(0, self.max_turns, ""))
            slot.append(within)
        for i, j, lag, distance in zip(*(column.tolist() for column in arcs), strict=True):
            model.add(offset[j] + self.period * distance >= offset[i] + self.duration[i] + lag)
        # All others follow, in its own round, the only pass that waits for none of it.
        sources = np.setdiff1d(np.arange(len(offset)), arcs.after[arcs.distance == 0])
        if len(sources) == 1:  # nothing changes when the whole block moves
            model.add(offset[int(sources[0])] == 0)
        return offset, slot

    def _streams(self) -> None:
        """A stream runs one pass at a time around the circle: no two passes overlap on two turns of it, side by side."""
        streams = self.rounds.problem.passes.streams[self.rounds.rows]
        for stream in np.unique(streams).tolist():
            turns = [
                self.model.new_fixed_size_interval_var(self.slot[i] + turn * self.period, self.duration[i], "")
                for i in np.flatnonzero(streams == stream).tolist()
                for turn in (0, 1)
            ]
            self.model.add_no_overlap(turns)

    def held(self) -> list[cp_model.LinearExprT]:
        """The most bytes on each rank. An edge that is held for q periods and a rest counts q times always, and once more
        while the rest lasts."""
        e, rounds, model, period = self.rounds.problem.edges, self.rounds, self.model, self.period
        result: list[cp_model.LinearExprT] = []
        mine = np.flatnonzero((e.bytes > 0) & (rounds.round[e.after] == rounds.last))
        rank: Ints = rounds.problem.passes.rank[e.before]
        for number in range(rounds.problem.ranks):
            rows = mine[rank[mine] == number]
            arcs = rounds.into(e.before[rows], e.after[rows], e.lag[rows])
            always, intervals, demands = [], [], []
            for i, j, _, distance, size in zip(*(c.tolist() for c in (*arcs, e.bytes[rows])), strict=True):
                turns, rest = model.new_int_var(0, self.max_turns, ""), model.new_int_var(0, period - 1, "")
                model.add(turns * period + rest == self.offset[j] + self.duration[j] + period * distance - self.offset[i])
                always.append(size * turns)
                for turn in (0, 1):
                    end = model.new_int_var(0, 3 * period, "")
                    intervals.append(model.new_interval_var(self.slot[i] + turn * period, rest, end, ""))
                    demands.append(size)
            room = model.new_int_var(0, self.max_bytes, "")
            model.add_cumulative(intervals, demands, room)
            result.append(room + cp_model.LinearExpr.sum(always))
        return result
