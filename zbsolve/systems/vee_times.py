"""ZB-V by a step's own times: the next chunk of a rank depends on the inputs that are placed by then, not on a fixed order.

Every rank alternates backwards and forwards, as in ZB-V (arXiv 2401.10241, section 6). Here the warm-up has as many forwards
as there is time for before the first microbatch is back. A weight gradient runs if it fills a gap, or if the memory is full.
The idea is that of the scheduler for V shapes in the public code of that paper.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.errors import NotFound
from ..util.kernels import kernel, subkernel
from .plain_step import B, F, StepTimes, W, check_plain, order_of, schedule_of, times_of


class _Placed(NamedTuple):
    """The passes placed so far. end: of each F and B, µs, or −1, shape (2, stages, microbatches). counts: of passes, shape
    (3, stages). For each rank: now, µs, the end of its last pass; held, bytes; begun, number of passes; turns, its passes in
    order as kind · stages + stage; backward, the stages of its B in order."""

    end: Ints
    counts: Ints
    now: Ints
    held: Ints
    begun: Ints
    turns: Ints
    backward: Ints


@order_of("zb-v-times")
def zb_v_by_times(problem: Problem) -> Schedule:
    """ZB-V by the times of the step, within its memory. Raises BadInput if it is not a V of F, B and W, and NotFound if
    the memory is too small for it."""
    check_plain(problem, "zb-v-times", "vee")
    step, rows = times_of(problem, "zb-v-times")
    turns = _turns(step, problem.microbatches)
    if len(turns) == 0:
        raise NotFound("zb-v-times: the memory of a rank is full, and nothing there frees any")
    return schedule_of(problem, turns, rows)


@subkernel
def _rank(step: StepTimes, stage: int) -> int:
    """The rank of a stage."""
    return int(min(stage, step.duration.shape[1] - 1 - stage))


@subkernel
def _arrival(step: StepTimes, state: _Placed, kind: int, stage: int) -> int:
    """When the input of the stage's next F or B arrives, µs; −1 if its pass is not placed yet, or no F or B is left."""
    last, j = step.duration.shape[1] - 1, state.counts[kind, stage]
    if j == state.end.shape[2]:
        return -1
    if kind == F:
        if stage == 0:
            return 0
        end = state.end[F, stage - 1, j]
    else:
        if state.end[F, stage, j] < 0:
            return -1
        end = state.end[F, stage, j] if stage == last else state.end[B, stage + 1, j]
    return -1 if end < 0 else end + step.lag[kind, stage]


@subkernel
def _run(step: StepTimes, state: _Placed, kind: int, stage: int) -> None:
    """Place the stage's next pass after the last one of its rank. Its input must be placed already."""
    rank, j = _rank(step, stage), state.counts[kind, stage]
    begin = state.now[rank]
    if kind < W:
        begin = max(begin, _arrival(step, state, kind, stage))
    state.now[rank] = begin + step.duration[kind, stage]
    state.held[rank] += step.taken[kind, stage] - step.freed[kind, stage]
    if kind < W:
        state.end[kind, stage, j] = state.now[rank]
    if kind == B:
        other = step.duration.shape[1] - 1 - stage
        state.backward[rank, j + state.counts[B, other]] = stage
    state.counts[kind, stage] += 1
    state.turns[rank, state.begun[rank]] = kind * step.duration.shape[1] + stage
    state.begun[rank] += 1


@subkernel
def _fits(step: StepTimes, state: _Placed, kind: int, stage: int) -> bool:
    """Whether the next pass of this kind and stage fits the memory of its rank."""
    rank = _rank(step, stage)
    return bool(state.held[rank] + step.taken[kind, stage] <= step.room[rank])


@subkernel
def _fill(step: StepTimes, state: _Placed, rank: int, until: int, need: int) -> None:
    """Place weight gradients of the rank as long as they end by `until`, µs, or `need` more bytes do not fit."""
    other = step.duration.shape[1] - 1 - rank
    while True:
        k = state.counts[W, rank] + state.counts[W, other]
        if k == state.counts[B, rank] + state.counts[B, other]:
            return
        stage = state.backward[rank, k]
        if state.now[rank] + step.duration[W, stage] > until and state.held[rank] + need <= step.room[rank]:
            return
        _run(step, state, W, stage)


@subkernel
def _room_for_more(step: StepTimes, state: _Placed, rank: int) -> bool:
    """Whether the rank has a microbatch left, and one more fits in both chunks of every rank up to this one."""
    for r in range(rank + 1):
        if state.held[r] + step.taken[F, r] + step.taken[F, step.duration.shape[1] - 1 - r] > step.room[r]:
            return False
    return bool(state.counts[F, rank] < state.end.shape[2])


@subkernel
def _warm_up(step: StepTimes, state: _Placed) -> None:
    """Place the forwards before the first backward. The first microbatch goes down the V and up again; until it is back at a
    rank, others go down. Then each rank gets as many forwards as the rank before it, down and up in turn."""
    ranks, last = len(step.room), step.duration.shape[1] - 1
    for rank in range(ranks):
        _run(step, state, F, rank)
    for rank in range(ranks - 1, -1, -1):
        # On the last rank, where the V turns, there is nothing to wait for.
        while rank < ranks - 1 and _room_for_more(step, state, rank):
            if state.now[rank] + step.duration[F, rank] > _arrival(step, state, F, last - rank):
                break
            for r in range(rank + 1):
                _run(step, state, F, r)
        _run(step, state, F, last - rank)
    up = False
    for rank in range(1, ranks):
        before = state.counts[F, rank - 1] + state.counts[F, last - rank + 1]
        idle = 0
        while idle < 2 and state.counts[F, rank] + state.counts[F, last - rank] < before:
            idle += 1
            for k in range(ranks - rank):
                stage = last - (ranks - 1 - k) if up else rank + k
                if _arrival(step, state, F, stage) >= 0 and _fits(step, state, F, stage):
                    _run(step, state, F, stage)
                    idle = 0
            up = not up


@subkernel
def _half_round(step: StepTimes, state: _Placed, kind: int, chosen: Ints) -> int:
    """Place one F or one B on every rank that can run one: of its chunk that is further along if its input is placed, else
    of the other. chosen: filled with the stage of each rank. Returns the number of placed passes."""
    ranks, last = len(step.room), step.duration.shape[1] - 1
    for rank in range(ranks):
        further, other = (last - rank, rank) if kind == F else (rank, last - rank)
        chosen[rank] = further if _arrival(step, state, kind, further) >= 0 else other
    placed = 0
    for k in range(last + 1):
        stage = k if kind == F else last - k
        rank = _rank(step, stage)
        arrival = _arrival(step, state, kind, stage)
        if chosen[rank] != stage or arrival < 0:
            continue
        _fill(step, state, rank, arrival, step.taken[kind, stage])
        if _fits(step, state, kind, stage):
            _run(step, state, kind, stage)
            placed += 1
    return placed


@kernel
def _turns(step: StepTimes, m: int) -> Ints:
    """The passes of each rank in order, as kind · stages + stage, shape (ranks, 6 m); none if the memory is too small."""
    stages, ranks = step.duration.shape[1], len(step.room)
    state = _Placed(
        np.full((2, stages, m), -1, np.int64),
        np.zeros((3, stages), np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros((ranks, 6 * m), np.int64),
        np.zeros((ranks, 2 * m), np.int64),
    )
    for rank in range(ranks):
        if step.taken[F, rank] + step.taken[F, stages - 1 - rank] > step.room[rank]:
            return state.turns[:0]
    _warm_up(step, state)
    chosen = np.zeros(ranks, np.int64)
    while state.counts[B].min() < m:
        if _half_round(step, state, B, chosen) + _half_round(step, state, F, chosen) == 0:
            return state.turns[:0]
    for rank in range(ranks):
        _fill(step, state, rank, 1 << 62, 0)
    return state.turns
