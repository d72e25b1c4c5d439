"""ZB-H1 with a gap: fewer microbatches in flight before the last forwards, for steps with only 1F1B's memory.

ZB-H1 (arXiv 2401.10241) has p − r microbatches in flight on rank r until the end. If deferred weight gradients hold little
memory, rank 0 then has too little work after its last forward. In this schedule waves of forwards and backwards cross
without waiting near the end, and rank 0 leaves out k forwards there. It thus has k microbatches fewer in flight before its
last forward, and uses their memory to defer weight gradients to the cool-down. See docs/notes/tight-memory.md.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.errors import NotFound
from ..util.kernels import inner_kernel, kernel
from .one_direction import zb_h1
from .plain_step import B, F, StepTimes, W, check_plain, order_of, schedule_of, times_of

TARGETS = 9  # makespans for which the placement of weight gradients is tried
ENOUGH = 3  # times the ranks: this number of microbatches is enough to choose the gap
NEVER = 1 << 60  # µs: the value if there is no schedule


@order_of("zb-gap")
def zb_gap(problem: Problem) -> Schedule:
    """ZB-H1 with a gap, for the step's times and memory (1F1B's memory, if the step has no limit): the shortest of several
    gaps, and of ZB-H1 if that fits. Raises BadInput unless the step has F, B and W and one stage a rank, and NotFound if the
    memory is too small."""
    check_plain(problem, "zb-gap", "single")
    step, rows = times_of(problem, "zb-gap")
    p = problem.ranks
    if problem.capacity is None:  # the peak of 1F1B on rank 0: p − 1 forwards and one whole microbatch
        step = step._replace(room=(p - 1) * step.taken[F] + step.taken.sum(axis=0))
    turns = p * _shortest(step, problem.microbatches) + np.arange(p)[:, None]
    schedule, plain = schedule_of(problem, turns, rows), zb_h1(problem)
    fits = np.less_equal(plain.timeline().peak_bytes, step.room).all()
    return plain if fits and plain.timeline().value < schedule.timeline().value else schedule


def _shortest(step: StepTimes, m: int) -> Ints:
    """The passes of each rank in order, as kinds, shape (ranks, 3 m), of the shortest schedule. Gaps are widened from 0 as
    long as the schedule gets shorter. For many microbatches the gap is chosen with fewer."""
    few = min(m, ENOUGH * step.duration.shape[1])
    chosen, least = (0, 0), _best_of(step, _counts(step, few, 0, 0))[0]
    for k in range(1, step.duration.shape[1]):
        tries = [(_best_of(step, _counts(step, few, k, before))[0], before) for before in (2 * k - 1, 2 * k)]
        value, before = min(tries)
        if k > 1 and value >= least:
            break
        if value < least:
            chosen, least = (k, before), value
    value, turns = _best_of(step, _counts(step, m, *chosen))
    if value == NEVER:
        raise NotFound("zb-gap: the memory of a rank is full, and nothing there frees any")
    return turns


def _best_of(step: StepTimes, counts: Ints) -> tuple[int, Ints]:
    """(value in µs, or `NEVER` if the memory is too small; turns) of the shortest schedule with these counts."""
    late = _latest(step, counts)
    value, best = _placed(step, counts, late, 0)
    least = -int(late.min())
    for target in np.linspace(least, max(least, min(value, NEVER - 1)), TARGETS).astype(np.int64).tolist():
        new, turns = _placed(step, counts, late, target)
        if new < value:
            value, best = new, turns
    return int(value), best


def _counts(step: StepTimes, m: int, k: int, before: int) -> Ints:
    """The number of forwards of a rank before each of its backwards, shape (ranks, m), with a gap of k.

    Usually rank r has run p − r forwards more than backwards. From the backward of microbatch m − p − `before` on, forwards
    and backwards move by one rank a turn, and rank 0 starts a forward each turn, except in the k turns after that of `last`.
    A backward is then p − 1 − r turns after its forward, and forwards after the gap are k turns later. In the warm-up a rank
    runs additional forwards, as many as arrive before its first backward and fit.
    """
    p = step.duration.shape[1]
    j, last = np.arange(m), m - p + k - 1
    counts = j + np.minimum(p - np.arange(p), _fits(step))[:, None]
    gap = np.minimum(counts, np.maximum(last + 1, counts - k))
    counts = np.where((k > 0) & (j >= m - p - before) & (j <= last), gap, counts)
    warm = np.minimum(p, j + _warm_up(step)[:, None])
    return np.minimum(m, np.maximum(j + 1, np.maximum(counts, warm)))


def _fits(step: StepTimes) -> Ints:
    """The number of microbatches that fit into each rank's memory, at least one."""
    return np.maximum(1, step.room // np.maximum(1, step.taken[F]))


def _warm_up(step: StepTimes) -> Ints:
    """The number of forwards that each rank can run before its first backward, within its memory."""
    duration, lag = step.duration, step.lag
    begin = np.cumsum(duration[F]) - duration[F] + np.cumsum(lag[F])
    up = (duration[B][1:] + lag[B][:-1])[::-1]
    back = begin[-1] + duration[F, -1] + np.concatenate([[0], np.cumsum(up)])[::-1]
    forwards: Ints = (back - begin) // np.maximum(1, np.maximum.accumulate(duration[F]))
    return np.clip(forwards, 1, _fits(step))


@kernel
def _latest(step: StepTimes, counts: Ints) -> Ints:
    """The latest starts of forwards and backwards if the step ends at time 0, µs, shape (2, ranks, m). Each rank runs them
    in its order and has time for the weight gradients of the backwards after them."""
    p, m = counts.shape
    late = np.zeros((2, p, m), np.int64)
    forwards, backwards = np.full(p, m), np.full(p, m)  # passes before these numbers are not placed yet
    until, work = np.zeros(p, np.int64), np.zeros(p, np.int64)
    placed = -1
    while placed != (forwards + backwards).sum():
        placed = (forwards + backwards).sum()
        for r in range(p):
            while forwards[r] + backwards[r] > 0:
                i, j = backwards[r] - 1, forwards[r] - 1
                kind = F if i < 0 or counts[r, i] <= j else B
                if kind == F:
                    if r < p - 1 and forwards[r + 1] > j:
                        break
                    follows = late[F, r + 1, j] - step.lag[F, r + 1] if r < p - 1 else late[B, r, j] - step.lag[B, r]
                else:
                    if r > 0 and backwards[r - 1] > i:
                        break
                    follows = late[B, r - 1, i] - step.lag[B, r - 1] if r > 0 else -step.duration[W, 0]
                    work[r] += step.duration[W, r]
                work[r] += step.duration[kind, r]
                until[r] = min(min(until[r], follows) - step.duration[kind, r], -work[r])
                late[kind, r, j if kind == F else i] = until[r]
                if kind == F:
                    forwards[r] = j
                else:
                    backwards[r] = i
    return late


@inner_kernel
def _arrival(step: StepTimes, end: Ints, r: int, kind: int, j: int) -> int:
    """When the input of a rank's F or B of microbatch j arrives, µs; −1 if the pass that makes it is not placed yet."""
    p = end.shape[1]
    if kind == F:
        if r == 0:
            return 0
        at, lag = end[F, r - 1, j], step.lag[F, r]
    elif r == p - 1:
        at, lag = end[F, r, j], step.lag[B, r]
    else:
        at, lag = end[B, r + 1, j], step.lag[B, r]
    return -1 if at < 0 else at + lag


@kernel
def _placed(step: StepTimes, counts: Ints, late: Ints, target: int) -> tuple[int, Ints]:
    """(value in µs, or `NEVER` if the memory is too small; each rank's passes in order, as kinds, shape (ranks, 3 m)).

    Forwards and backwards run in the order of `counts`. A rank that waits for its next pass runs a weight gradient if that
    ends before the input arrives, or in time for a step of `target` µs. A rank without memory for a forward runs as many
    weight gradients as needed.
    """
    p, m = counts.shape
    end, now, held = np.full((2, p, m), -1), np.zeros(p, np.int64), np.zeros(p, np.int64)
    done, turns = np.zeros((3, p), np.int64), np.zeros((p, 3 * m), np.int64)
    placed = -1
    while placed != done.sum():
        placed = done.sum()
        for r in range(p):
            while done[W, r] < m:
                begin, kind, i = now[r], W, done[B, r]
                if i < m:
                    kind = F if done[F, r] < counts[r, i] else B
                    arrival = _arrival(step, end, r, kind, done[kind, r])
                    if arrival < 0:
                        break
                    full = held[r] + step.taken[kind, r] > step.room[r]
                    behind = now[r] + step.duration[W, r]
                    in_time = behind <= max(arrival, late[kind, r, done[kind, r]] + target)
                    begin = max(begin, arrival)
                    if done[W, r] < i and (full or (arrival > now[r] and in_time)):
                        begin, kind = now[r], W
                    elif full:
                        return NEVER, turns
                turns[r, done[:, r].sum()] = kind
                now[r] = begin + step.duration[kind, r]
                held[r] += step.taken[kind, r] - step.freed[kind, r]
                if kind < W:
                    end[kind, r, done[kind, r]] = now[r]
                done[kind, r] += 1
    return (now.max() if placed == 3 * p * m else NEVER), turns
