"""ZB-V by a step's own times: which chunk a rank runs next is decided by what has arrived, not by a fixed order.

Every rank alternates backwards and forwards, as in ZB-V (arXiv 2401.10241, section 6). Here the warm-up has as many forwards
as there is time for before the first microbatch is back, and a weight gradient runs where it fills a gap or where the memory
asks for it. The idea is that of the scheduler which that paper's public code has for V shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..schedule import Schedule
from ..tables import Ints
from ..util.errors import NotFound
from ..util.kernels import kernel
from .plain_step import B, F, StepTimes, W, check_plain, order_of, schedule_of, times_of


class _Placed(NamedTuple):
    """What is placed so far: end of each F and B, µs, −1 before, shape (2, stages, microbatches); counts, passes of each
    kind and stage, shape (3, stages). One value a rank: now, µs; held, bytes; begun, passes. One row a rank: turns, its
    passes in order as kind · stages + stage; backward, the stages of its B in order."""

    end: Ints
    counts: Ints
    now: Ints
    held: Ints
    begun: Ints
    turns: Ints
    backward: Ints


@order_of("zb-v-times")
def zb_v_by_times(problem: Problem) -> Schedule:
    """ZB-V by the times of the step, within its memory. Raises BadInput where it is no V of F, B and W, and NotFound where
    the memory is too small for it."""
    check_plain(problem, "zb-v-times", "vee")
    step, rows = times_of(problem, "zb-v-times")
    turns = _turns(step, problem.microbatches)
    if len(turns) == 0:
        raise NotFound("zb-v-times: the memory of a rank is full, and nothing there frees any")
    return schedule_of(problem, turns, rows)


@kernel
def _rank(step: StepTimes, stage: int) -> int:
    """The rank of a stage."""
    return int(min(stage, step.duration.shape[1] - 1 - stage))


@kernel
def _arrival(step: StepTimes, at: _Placed, kind: int, stage: int) -> int:
    """When what the stage's next F or B waits for is there, µs; −1 where it is not placed yet, or no pass is left."""
    last, j = step.duration.shape[1] - 1, at.counts[kind, stage]
    if j == at.end.shape[2]:
        return -1
    if kind == F:
        if stage == 0:
            return 0
        end = at.end[F, stage - 1, j]
    else:
        if at.end[F, stage, j] < 0:
            return -1
        end = at.end[F, stage, j] if stage == last else at.end[B, stage + 1, j]
    return -1 if end < 0 else end + step.lag[kind, stage]


@kernel
def _run(step: StepTimes, at: _Placed, kind: int, stage: int) -> None:
    """Place the stage's next pass behind its rank's last one, which must have its input placed."""
    rank, j = _rank(step, stage), at.counts[kind, stage]
    begin = at.now[rank]
    if kind < W:
        begin = max(begin, _arrival(step, at, kind, stage))
    at.now[rank] = begin + step.duration[kind, stage]
    at.held[rank] += step.taken[kind, stage] - step.freed[kind, stage]
    if kind < W:
        at.end[kind, stage, j] = at.now[rank]
    if kind == B:
        other = step.duration.shape[1] - 1 - stage
        at.backward[rank, j + at.counts[B, other]] = stage
    at.counts[kind, stage] += 1
    at.turns[rank, at.begun[rank]] = kind * step.duration.shape[1] + stage
    at.begun[rank] += 1


@kernel
def _fits(step: StepTimes, at: _Placed, kind: int, stage: int) -> bool:
    """Whether the next pass of this kind and stage fits the memory of its rank."""
    rank = _rank(step, stage)
    return bool(at.held[rank] + step.taken[kind, stage] <= step.room[rank])


@kernel
def _fill(step: StepTimes, at: _Placed, rank: int, until: int, need: int) -> None:
    """Weight gradients of the rank, as long as they end before `until`, µs, or as `need` bytes do not fit."""
    other = step.duration.shape[1] - 1 - rank
    while True:
        k = at.counts[W, rank] + at.counts[W, other]
        if k == at.counts[B, rank] + at.counts[B, other]:
            return
        stage = at.backward[rank, k]
        if at.now[rank] + step.duration[W, stage] > until and at.held[rank] + need <= step.room[rank]:
            return
        _run(step, at, W, stage)


@kernel
def _room_for_more(step: StepTimes, at: _Placed, rank: int) -> bool:
    """Whether one more microbatch fits both chunks of every rank up to this one, and there is one."""
    for r in range(rank + 1):
        if at.held[r] + step.taken[F, r] + step.taken[F, step.duration.shape[1] - 1 - r] > step.room[r]:
            return False
    return bool(at.counts[F, rank] < at.end.shape[2])


@kernel
def _warm_up(step: StepTimes, at: _Placed) -> None:
    """Forwards before the first backward: the first microbatch goes down the V and up again, with others down while it is
    away; then later ranks get as many as the ranks before them, down and up in turn."""
    ranks, last = len(step.room), step.duration.shape[1] - 1
    for rank in range(ranks):
        _run(step, at, F, rank)
    for rank in range(ranks - 1, -1, -1):
        # The rank before the turn has nothing to wait for.
        while rank < ranks - 1 and _room_for_more(step, at, rank):
            if at.now[rank] + step.duration[F, rank] > _arrival(step, at, F, last - rank):
                break
            for r in range(rank + 1):
                _run(step, at, F, r)
        _run(step, at, F, last - rank)
    up = False
    for rank in range(1, ranks):
        before = at.counts[F, rank - 1] + at.counts[F, last - rank + 1]
        idle = 0
        while idle < 2 and at.counts[F, rank] + at.counts[F, last - rank] < before:
            idle += 1
            for k in range(ranks - rank):
                stage = last - (ranks - 1 - k) if up else rank + k
                if _arrival(step, at, F, stage) >= 0 and _fits(step, at, F, stage):
                    _run(step, at, F, stage)
                    idle = 0
            up = not up


@kernel
def _half_round(step: StepTimes, at: _Placed, kind: int, chosen: Ints) -> int:
    """One F or one B of every rank that has one: of the chunk that is further along, where its input is placed. chosen: to
    be filled, the stage of each rank. Returns how many passes it placed."""
    ranks, last = len(step.room), step.duration.shape[1] - 1
    for rank in range(ranks):
        further, other = (last - rank, rank) if kind == F else (rank, last - rank)
        chosen[rank] = further if _arrival(step, at, kind, further) >= 0 else other
    placed = 0
    for k in range(last + 1):
        stage = k if kind == F else last - k
        rank = _rank(step, stage)
        arrival = _arrival(step, at, kind, stage)
        if chosen[rank] != stage or arrival < 0:
            continue
        _fill(step, at, rank, arrival, step.taken[kind, stage])
        if _fits(step, at, kind, stage):
            _run(step, at, kind, stage)
            placed += 1
    return placed


@kernel
def _turns(step: StepTimes, m: int) -> Ints:
    """The passes of each rank in order, as kind · stages + stage, shape (ranks, 6 m); none where the memory is too small."""
    stages, ranks = step.duration.shape[1], len(step.room)
    at = _Placed(
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
            return at.turns[:0]
    _warm_up(step, at)
    chosen = np.zeros(ranks, np.int64)
    while at.counts[B].min() < m:
        if _half_round(step, at, B, chosen) + _half_round(step, at, F, chosen) == 0:
            return at.turns[:0]
    for rank in range(ranks):
        _fill(step, at, rank, 1 << 62, 0)
    return at.turns
