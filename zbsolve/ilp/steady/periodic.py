"""The steady state: the least memory for a period, and the least period within a memory.

CP-SAT's proofs here hold for strictly periodic schedules, where every round is equal (modulo scheduling, Rau 1994; building
blocks of arXiv 2405.15362, section 3). Warm-up and cool-down are left out. A schedule of one period can be stretched to any
longer one (durations are whole, so starts are multiplied and rounded down), so below an infeasible period none is feasible.

The model counts how many rounds later than a pass the next of another one starts on their stream (periodic event scheduling:
Serafini and Ukovich, 1989). What is held where a pass starts is a linear sum of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, combinations
from math import ceil

import numpy as np
from ortools.sat.python import cp_model

from ...greedy.arrays.microbatch import microbatch_graph
from ...greedy.arrays.problem_arrays import arrays_of
from ...greedy.blocks.building_block import serial_block, shorter_blocks
from ...greedy.blocks.period_search import anneal_block
from ...greedy.decoding import repeated_targets
from ...greedy.lists.list_scheduler import list_schedule, schedule_by_start
from ...greedy.lists.policy_annealing import starting_policies
from ...problem import Ints, Problem
from ...schedule import Schedule
from ...systems.one_direction import in_flight
from ...systems.table import presets_of
from ...util.clock import Clock
from ...util.errors import BadInput, Infeasible, NotFound, ZbsolveError
from ...util.machine import cores
from ...verifier import verify
from ..bounds.energy import least_lifespans
from ..bounds.necessary_arcs import necessary_arcs_of
from ..cp import FOUND, make_solver
from .rounds import RoundArcs, Rounds, largest_mean, period, rounds_of, steady_peaks


def arcs_of_rounds(rounds: Rounds) -> RoundArcs:
    """The necessary arcs between rounds: edges, lanes, waits for the problem's memory."""
    a = necessary_arcs_of(rounds.problem)
    before = np.repeat(np.arange(len(rounds.problem.passes)), np.diff(a.out_first))
    return rounds.into(before, a.out_pass, a.out_lag)


class PeriodicModel:
    """CP-SAT's model of a schedule that repeats one round every `period` µs, lanes in order. Open for constraints.

    Raises BadInput where a pass occupies several streams or the period is below 1 µs, Infeasible where a rank has more work.
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
        self.streams, self.next = p.streams[rows], dict[tuple[int, int], cp_model.LinearExpr]()
        self.offset = self._offsets()
        self._orders()

    def solve(self, seconds: float, seed: int) -> tuple[int, cp_model.CpSolver]:
        """CP-SAT's status, and its solver."""
        solver = make_solver(seconds, max(2, cores()), seed=seed)
        return int(solver.solve(self.model)), solver

    def starts(self, solver: cp_model.CpSolver) -> list[int]:
        """The start of each pass of the round, µs."""
        return [solver.value(v) for v in self.offset]

    def _offsets(self) -> list[cp_model.IntVar]:
        """The start of each pass."""
        model, arcs = self.model, arcs_of_rounds(self.rounds)
        offset = [model.new_int_var(0, self.horizon, "") for _ in self.duration]
        for i, j, lag, distance in zip(*(column.tolist() for column in arcs), strict=True):
            model.add(offset[j] + self.period * distance >= offset[i] + self.duration[i] + lag)
        # If only one pass waits for none of its round, all others of the round follow it.
        sources = np.setdiff1d(np.arange(len(offset)), arcs.after[arcs.distance == 0])
        if len(sources) == 1:  # moving the whole block changes nothing
            model.add(offset[int(sources[0])] == 0)
        return offset

    def _orders(self) -> None:
        """A stream runs one pass at a time: the next j behind i starts after i ends, and ends before i comes again."""
        for stream in np.unique(self.streams):
            for i, j in combinations(np.flatnonzero(self.streams == stream).tolist(), 2):
                self.next[i, j] = turns = self._turns(i, j, self.duration[i], self.period - self.duration[j])
                self.next[j, i] = 1 - turns

    def _turns(self, i: int, j: int, least: int, most: int) -> cp_model.IntVar:
        """The rounds by which j comes later than i, if it starts at least `least` and at most `most` µs behind the start."""
        turns = self.model.new_int_var(-self.max_turns, self.max_turns, "")
        self.model.add_linear_constraint(self.offset[j] + self.period * turns - self.offset[i], least, most)
        return turns

    def _last(self, i: int, behind: int, at: int) -> cp_model.LinearExpr:
        """The last round whose pass i starts at least `behind` µs (0 or its duration) before `at` of round 0 starts."""
        if (at, i) in self.next and min(self.duration[i], self.duration[at]) > 0:  # no pass of the stream runs then
            return self.next[at, i] - 1
        return self._turns(at, i, 1 - self.period - behind, -behind)

    def held(self) -> list[cp_model.LinearExprT]:
        """The most bytes on each rank: variables, no less than what is held where a pass takes bytes."""
        e, rounds, result = self.rounds.problem.edges, self.rounds, list[cp_model.LinearExprT]()
        holding = np.flatnonzero((e.bytes > 0) & (rounds.round[e.after] == rounds.last))
        rank: Ints = rounds.problem.passes.rank[e.before]
        for number in range(rounds.problem.ranks):
            rows, room = holding[rank[holding] == number], self.model.new_int_var(0, self.max_bytes, "")
            before, after, size, distance = (c.tolist() for c in rounds.into(e.before[rows], e.after[rows], e.bytes[rows]))
            for at in set(before):
                used = [
                    self._last(i, 0, at) - self._last(j, self.duration[j], at) for i, j in zip(before, after, strict=True)
                ]
                self.model.add(cp_model.LinearExpr.weighted_sum(used, size) + int(np.dot(size, distance)) <= room)
            result.append(room)
        return result


ANNEALING_ROUNDS = 1000  # of annealing a block of one period
MAX_POLICIES = 40  # how many policies the list scheduler makes schedules of


@dataclass(frozen=True)
class SteadyState:
    """The best steady state found.

    schedule: valid for the problem; its order, repeated, takes `time` µs for a round of `microbatches`. bound: on the mean
    time of a round in any schedule, µs, for the reason `proof`. strict: a lower bound, µs, on the period of strictly
    periodic schedules, which run one round a period. work: µs of the busiest rank in a round.
    """

    schedule: Schedule
    microbatches: int
    time: Fraction
    bound: Fraction
    proof: str
    strict: int
    work: int


def least_period(problem: Problem, seconds: float = 10.0, seed: int = 0, known: Sequence[Schedule] = ()) -> SteadyState:
    """The least mean time of a round if training goes on for ever within the problem's memory.

    known: schedules to start from, if valid, beside the named ones.

    Raises Infeasible where no strictly periodic schedule fits the memory, NotFound where none was found in time, BadInput
    (see `rounds_of`, and where a pass occupies several streams).
    """
    rounds = rounds_of(problem)
    bound, proof = lower_bound(rounds)
    clock = Clock(seconds)
    best: tuple[Fraction, Schedule] | None = None
    named = (Schedule(problem, other.order, other.syncs) for other in known)
    for schedule in chain(named, _quick_schedules(problem), _from_blocks(problem, seed)):
        if not verify(problem, schedule):
            best = _better(best, schedule)
    strict = ceil(bound)  # nothing below is possible
    top = int(problem.passes.duration[rounds.rows].sum() + rounds.edges.lag.sum())  # one pass after the other
    share = 0.5
    low = tried = max(1, strict)  # the bound itself first, since it is mostly reached
    shortest = None if best is None else best[0]  # period found, with slowdowns as if there were none
    while (shortest is None or shortest > low) and clock.left > 0:
        status, periodic = _periodic_within(rounds, tried, max(0.1, min(clock.left, seconds / 4)), seed)
        if periodic is not None:
            best = _better(best, periodic)
            shortest = Fraction(tried) if best is None else min(Fraction(tried), best[0])
        elif status == cp_model.INFEASIBLE:
            low = strict = tried + 1
        else:
            low, share = tried + 1, 0.75  # unknown: not tried again, and nothing is proven
        if strict > top:
            raise Infeasible("period: the memory fits no schedule that repeats, however seldom")
        tried = top if shortest is None else low + int(share * (ceil(shortest) - 1 - low))
    if best is None:
        raise NotFound(f"period: no steady state was found in {seconds} s, and it is not proven that there is none")
    return SteadyState(best[1], rounds.microbatches, best[0], bound, proof, strict, rounds.work)


def _quick_schedules(problem: Problem) -> Iterator[Schedule]:
    """Schedules that are quickly made and often repeat: named ones, 1F1B with fewer microbatches in flight, a serial one,
    and those of the list scheduler's likeliest policies."""
    yield from (schedule for _, schedule in presets_of(problem))
    for most in range(problem.ranks - 1, 0, -1):
        with suppress(BadInput):
            yield in_flight(problem, most)
    yield _serial_schedule(problem)
    for policy in starting_policies(problem)[:MAX_POLICIES]:
        with suppress(NotFound):
            yield list_schedule(problem, policy)


def _from_blocks(problem: Problem, seed: int) -> Iterator[Schedule]:
    """Ever shorter blocks, repeated; none where microbatches differ or updates end rounds of several."""
    g = microbatch_graph(problem)
    if g is None:
        return
    near = partial(anneal_block, g, rounds=ANNEALING_ROUNDS, seed=seed)
    for block in shorter_blocks(g, serial_block(g), near, lambda: True):
        start = np.zeros(len(problem.passes), np.int64)
        start[g.passes] = repeated_targets(g, block.offset, block.period)
        yield schedule_by_start(problem, start)


def _serial_schedule(problem: Problem) -> Schedule:
    """One microbatch after the other, with updates at the ends of rounds: it needs the least memory."""
    rounds, a = rounds_of(problem), arrays_of(problem)
    p = problem.passes
    last = np.where(problem.updating, rounds.microbatches, p.microbatch % rounds.microbatches)
    turn = np.lexsort((a.level, a.depth, last, rounds.round))
    place = np.argsort(turn)
    return Schedule.of(problem, {stream: rows[np.argsort(place[rows])] for stream, rows in problem.members.items()})


def _better(best: tuple[Fraction, Schedule] | None, schedule: Schedule) -> tuple[Fraction, Schedule] | None:
    """The better of the best (mean time of a round, schedule) and another schedule that repeats within the memory."""
    room = schedule.problem.capacity
    try:
        value = period(schedule).time
        if room is not None and np.greater(steady_peaks(schedule), room).any():
            return best  # repeated for ever it holds more than in its few rounds
    except ZbsolveError:  # no order that repeats
        return best
    return (value, schedule) if best is None or value < best[0] else best


def lower_bound(rounds: Rounds) -> tuple[Fraction, str]:
    """The least mean time of a round, µs, of any schedule whose lanes run in order; and why.

    It comes from a stream's work, from passes that wait for each other over rounds (also for memory), or from the energy of
    memory: bytes times the least time they are held.
    """
    problem, rows = rounds.problem, rounds.rows
    p = problem.passes
    forms = [(Fraction(0), "nothing")]
    for stream, members in problem.members.items():
        work = int(p.duration[members[np.isin(members, rows)]].sum())
        forms.append((Fraction(work), f"{stream}: its passes of a round"))
    ring = largest_mean(rounds, arcs_of_rounds(rounds))
    if ring.cycle:
        shown = ring.cycle if len(ring.cycle) <= 6 else (*ring.cycle[:3], "…", *ring.cycle[-2:])
        forms.append((ring.time, f"passes that wait for each other, also for memory: {' → '.join(shown)}"))
    if problem.capacity is not None:
        e = problem.edges
        held = np.flatnonzero((e.bytes > 0) & (rounds.round[e.after] == rounds.last))
        spans = least_lifespans(problem, held) if len(held) else held
        for rank, room in enumerate(problem.capacity):
            filled = int((e.bytes[held] * spans)[p.rank[e.after[held]] == rank].sum())
            if filled and room:
                forms.append((Fraction(filled, room), f"rank {rank}: bytes times the time they are held"))
    return max(forms, key=lambda form: form[0])


def _periodic_within(rounds: Rounds, time: int, seconds: float, seed: int) -> tuple[int, Schedule | None]:
    """CP-SAT's status, and a schedule that repeats every `time` µs within the problem's memory."""
    model = PeriodicModel(rounds, time)
    if rounds.problem.capacity is not None:
        for held, room in zip(model.held(), rounds.problem.capacity, strict=True):
            model.model.add(held <= room)
    status, solver = model.solve(seconds, seed)
    if status not in FOUND:
        return status, None
    start = np.array(model.starts(solver), np.int64)[rounds.place] + time * rounds.round
    schedule = schedule_by_start(rounds.problem, start)
    return status, None if verify(rounds.problem, schedule) else schedule
