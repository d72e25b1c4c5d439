"""The list scheduler: walks time, and whenever a stream is free starts the best pass that may start.

It knows nothing of kinds. A `Policy` gives each lane a priority, a cap on its passes in flight, and a patience; what
nobody waits for (a lane without successors: weight gradients) fills gaps. The idea of filling gaps with W is the zero
bubble paper's (arXiv 2401.10241, section 3.1); the safety test that keeps tight memory from deadlocking is Dijkstra's
banker's algorithm over microbatches.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Floats
from .arrays import Arrays, arrays


class Policy(NamedTuple):
    """How the list scheduler chooses, one value a lane: the ready lane of highest `priority` goes first; at most `cap`
    of a lane's passes are in flight (started, while its partner's pass for the same microbatch is not); a gap is worth
    a filler when it is at least `patience` times as long as the filler."""

    priority: Ints
    cap: Ints
    patience: Floats


def deepest_first(problem: Problem) -> Policy:
    """What is furthest along the graph goes first, no caps, fillers only where they fit their gap."""
    a = arrays(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    lanes = len(first)
    return Policy(np.where(a.partner < 0, -1, a.depth[first]), np.full(lanes, len(a.duration), np.int64), np.ones(lanes))


def list_schedule(problem: Problem, policy: Policy) -> Schedule:
    """The schedule that a policy makes; complete whenever one microbatch fits every rank's capacity."""
    start = run(arrays(problem), policy)
    return from_starts(problem, start)


def from_starts(problem: Problem, start: Ints) -> Schedule:
    """The schedule whose streams run their passes by start time (a pass without length before one with)."""
    end = start + problem.passes.duration
    a = arrays(problem)
    sequences = {}
    for stream, rows in problem.members.items():
        sequences[stream] = rows[np.lexsort((a.depth[rows], end[rows], start[rows]))]
    return Schedule.of(problem, sequences)


def run(a: Arrays, policy: Policy) -> Ints:
    """Start times, µs, shape (passes,); −1 where the scheduler could not place a pass."""
    start: Ints = _run(a, policy.priority, policy.cap, policy.patience)
    return start


@numba.njit(cache=True)
def _safe(a, i, used, held, still, oldest):  # type: ignore[no-untyped-def]
    """May pass i take its memory? Yes where every microbatch up to its own can still finish one after the other."""
    rank, group = a.rank[i], a.group[i]
    free = a.room[rank] - used[rank] - a.taken[i]
    if free < 0:
        return False
    for g in range(oldest[rank], group):
        if still[rank, g] > free:
            return False
        free += held[rank, g]
    return still[rank, group] - a.taken[i] <= free


@numba.njit(cache=True)
def _pick(a, s, now, priority, cap, patience, position, begun, waiting, ready, stream_free, used, held, still, oldest):  # type: ignore[no-untyped-def]
    """The pass to start on stream s, or −1; with the time of the next known arrival."""
    best, filler = -1, -1
    blocked = False
    arrival = np.int64(1) << 60
    for h in range(a.home_first[s], a.home_first[s + 1]):
        lane = a.home_lanes[h]
        at = a.lane_first[lane] + position[lane]
        if at == a.lane_first[lane + 1]:
            continue
        i = a.lane_rows[at]
        if waiting[i] > 0:
            continue
        partner = a.partner[lane]
        if ready[i] > now:
            if partner >= 0:
                arrival = min(arrival, ready[i])
            continue
        occupied = False
        for k in range(a.stream_first[i], a.stream_first[i + 1]):
            occupied = occupied or stream_free[a.stream_rows[k]] > now
        if occupied:
            continue
        if partner < 0 and a.taken[i] == 0:
            if filler < 0 or priority[lane] > priority[a.lane[filler]]:
                filler = i
            continue
        if partner >= 0 and begun[lane] - begun[partner] >= cap[lane]:
            # A cap on what waits for a filler asks for the filler; others wait for what ends the flight.
            blocked = blocked or a.partner[partner] < 0
            continue
        if a.taken[i] > 0 and not _safe(a, i, used, held, still, oldest):
            blocked = True
            continue
        if best < 0 or priority[lane] > priority[a.lane[best]]:
            best = i
    if filler >= 0:
        lane = a.lane[filler]
        if best >= 0:
            return (filler if priority[lane] > priority[a.lane[best]] else best), arrival
        if blocked or arrival - now >= patience[lane] * a.duration[filler]:
            return filler, arrival
    return best, arrival


@numba.njit(cache=True)
def _run(a, priority, cap, patience):  # type: ignore[no-untyped-def]
    count, streams = len(a.duration), len(a.home_first) - 1
    start = np.full(count, -1, np.int64)
    ready = np.zeros(count, np.int64)
    waiting = a.waiting.copy()
    position = np.zeros(len(priority), np.int64)
    begun = np.zeros(len(priority), np.int64)
    stream_free = np.zeros(streams, np.int64)
    used = np.zeros(len(a.room), np.int64)
    held = np.zeros(a.needs.shape, np.int64)
    still = a.needs.copy()
    oldest = np.zeros(len(a.room), np.int64)
    # Events: (time, pass) is a pass's end, (time, passes + stream) a look at a stream; ends come first.
    events = [(np.int64(0), np.int64(count + s)) for s in range(streams)]
    heapq.heapify(events)
    while len(events) > 0:
        now, what = heapq.heappop(events)
        if what < count:
            rank = a.rank[what]
            if a.freed[what] > 0:
                used[rank] -= a.freed[what]
                held[rank, a.group[what]] -= a.freed[what]
                while oldest[rank] < held.shape[1] and still[rank, oldest[rank]] == 0 and held[rank, oldest[rank]] == 0:
                    oldest[rank] += 1
            for k in range(a.stream_first[what], a.stream_first[what + 1]):
                heapq.heappush(events, (now, np.int64(count + a.stream_rows[k])))
            continue
        s = what - count
        if stream_free[s] > now:
            continue
        i, arrival = _pick(
            a, s, now, priority, cap, patience, position, begun, waiting, ready, stream_free, used, held, still, oldest
        )
        if i < 0:
            if arrival < np.int64(1) << 60:
                heapq.heappush(events, (arrival, what))
            continue
        lane, rank, end = a.lane[i], a.rank[i], now + a.duration[i]
        start[i] = now
        position[lane] += 1
        begun[lane] += 1
        if a.taken[i] > 0:
            used[rank] += a.taken[i]
            held[rank, a.group[i]] += a.taken[i]
            still[rank, a.group[i]] -= a.taken[i]
        for k in range(a.stream_first[i], a.stream_first[i + 1]):
            stream_free[a.stream_rows[k]] = end
        heapq.heappush(events, (end, np.int64(i)))
        for e in range(a.out_first[i], a.out_first[i + 1]):
            j = a.out_pass[e]
            ready[j] = max(ready[j], end + a.out_lag[e])
            waiting[j] -= 1
            if waiting[j] == 0:
                for k in range(a.stream_first[j], a.stream_first[j + 1]):
                    heapq.heappush(events, (ready[j], np.int64(count + a.stream_rows[k])))
    return start
