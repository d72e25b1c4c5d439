"""One order of all that ranks do in which each wait goes forward, and what it says of messages and collectives.

What is enqueued on a GPU may hold its rank's host at its next call, or what is enqueued behind it, until it is done. So a
message is like a call that two ranks make at once, and a collective like one of all. No rank waits for ever where all come
to these in one order, in which every pass lies behind what it waits for (`docs/nccl.md`).

The order is by the schedule's time: a pass lies at its end, work that a pass only begins at its begin, a message right
behind the pass that sends it. The parts of a collective have one place, so they begin when the last can (`together`).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..handover import Handover
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..tables import Bools
from .attention import helped_passes
from .handlers import passes_where

Times = NDArray[Any]


def together(schedule: Schedule, begin: Times) -> Times:
    """When passes begin, µs, shape (passes,), where the parts of a collective, and those of a sum of a stage's gradients,
    begin with the last one. No two sums begin at once, so that all ranks have them in one order. begin: when each could."""
    problem, found = schedule.problem, begin.astype(float)
    joins, sums = passes_where(problem, "joins"), passes_where(problem, "ends_with_step")
    for rows, group in (
        (np.flatnonzero(joins), problem.collective[joins]),
        (np.flatnonzero(sums), problem.passes.stage[sums]),
    ):
        last = np.zeros(group.max(initial=-1) + 1)
        np.maximum.at(last, group, found[rows])
        found[rows] = last[group]
    found[sums] += (1 + problem.passes.stage[sums]) / (2 * problem.stages + 2)
    for order in schedule.sequences.values():
        mine = order[joins[order]]
        found[mine] = np.maximum.accumulate(found[mine])
    return found


def received(handover: Handover, begin: Times, goes_on: Bools) -> tuple[Ints, Ints]:
    """Before which place of its taker's order the receive of each message is enqueued, and the message's place in the one
    order, by which those with one place come in turn; shape (messages,) each. begin: see `together`; goes_on: of which
    passes the rank goes on while their work is done, shape (passes,)."""
    turn, rank = turns(handover, begin, goes_on), handover.schedule.problem.passes.rank
    sent, place = turn[handover.before], np.zeros(len(handover.before), np.int64)
    for number, rows in enumerate(handover.orders):
        mine = rank[handover.after] == number
        place[mine] = np.searchsorted(turn[rows], sent[mine], "right")
    return np.minimum(place, handover.place[handover.after]), sent


def turns(handover: Handover, begin: Times, goes_on: Bools) -> Ints:
    """The place of each pass in the one order, shape (passes,); along a rank's order it never falls. Where passes cannot
    meet in one order, as `waits.circle` finds, each is at its own time. begin, goes_on: as `received` takes them."""
    problem, timeline = handover.schedule.problem, handover.schedule.timeline()
    only = problem.passes.that(begun=True) | passes_where(problem, "ends_with_step")
    turn = np.arange(len(begin)) if timeline.turn is None else timeline.turn
    found = np.zeros(len(begin), np.int64)
    found[np.lexsort((turn, begin, np.where(only, begin, timeline.end)))] = np.arange(len(begin))
    common = _common(handover, found, goes_on) if _meets(problem) else None
    if common is not None:
        return common
    for rows in handover.orders:
        found[rows] = np.minimum.accumulate(found[rows][::-1])[::-1]
    return found


def _meets(problem: Problem) -> bool:
    """Do ranks meet otherwise than by messages?"""
    return any(passes_where(problem, field).any() for field in ("joins", "ends_with_step", "helps"))


def _meetings(problem: Problem, helps: Ints, goes_on: Bools) -> Ints:
    """Pass → a number that it has in common with those that ranks run at once, shape (passes,): the parts of a collective,
    those of a sum, a pass and its helper."""
    count, number, sums = len(problem.passes), problem.collective, passes_where(problem, "ends_with_step")
    found = np.where(number >= 0, count + number, np.arange(count))
    found[sums] = 2 * count + problem.passes.stage[sums]
    for helper, helped in helps[~goes_on[helps[:, 0]]].tolist():
        found[helper] = found[helped]
    return np.unique(found, return_inverse=True)[1].ravel()


def _common(handover: Handover, turn: Ints, goes_on: Bools) -> Ints | None:
    """An order in which what meets has one place, as near to `turn` as may be; None where there is none."""
    helps = helped_passes(handover.schedule.problem)
    node = _meetings(handover.schedule.problem, helps, goes_on)
    pairs = np.concatenate([*(np.stack([r[:-1], r[1:]], 1) for r in handover.orders), helps, _ends(handover)])
    before, after = node[pairs].T
    before, after = before[before != after], after[before != after]
    size = int(node.max()) + 1
    waiting, last = np.bincount(after, minlength=size).tolist(), np.zeros(size, np.int64)
    np.maximum.at(last, node, turn)
    key, behind = last.tolist(), [list[int]() for _ in range(size)]
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        behind[a].append(b)
    free = [(key[one], one) for one in range(size) if not waiting[one]]
    heapify(free)
    place, done = np.zeros(size, np.int64), 0
    while free:
        one = heappop(free)[1]
        place[one], done = done, done + 1
        for other in behind[one]:
            waiting[other] -= 1
            if not waiting[other]:
                heappush(free, (key[other], other))
    return place[node] if done == size else None


def _ends(handover: Handover) -> Ints:
    """The rows of the passes at both ends of each message, shape (messages, 2)."""
    return np.stack([handover.before, handover.after], 1)
