"""The list scheduler: walks time, and whenever a stream is free starts the best pass that may start.

It knows nothing of kinds. A `Policy` gives each lane a priority, a cap on its passes in flight, and a patience; what
nobody waits for (a lane without successors: weight gradients) fills gaps. The idea of filling gaps with W is the zero
bubble paper's (arXiv 2401.10241, section 3.1); the safety test that keeps tight memory from deadlocking is Dijkstra's
banker's algorithm over microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..errors import NotFound
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Floats
from .arrays import Arrays, arrays, last_microbatch

NEVER = np.int64(1) << 60


class Policy(NamedTuple):
    """How the list scheduler chooses, one value a lane: the ready lane of highest `priority` goes first; at most `cap`
    of a lane's passes are in flight (started, while its partner's pass for the same microbatch is not); a gap is worth
    a filler when it is at least `patience` times as long as the filler, or when without one the stream would have been
    idle for more than `slack` µs since its first pass (arXiv 2401.10241, section 3.1: a W may be left for later while the
    bubble stays under the largest one of any stage)."""

    priority: Ints
    cap: Ints
    patience: Floats
    slack: Ints


def deepest_first(problem: Problem) -> Policy:
    """What is furthest along the graph goes first, no caps, fillers only where they fit their gap."""
    a = arrays(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    lanes = len(first)
    return Policy(
        np.where(a.partner < 0, -1, a.depth[first]),
        np.full(lanes, len(a.duration), np.int64),
        np.ones(lanes),
        np.full(lanes, NEVER),
    )


def list_schedule(problem: Problem, policy: Policy) -> Schedule:
    """The schedule that a policy makes. There is one wherever a rank has room for all that one microbatch takes there, also
    what it takes after it freed something. With less, raises NotFound."""
    start, place = run(arrays(problem), policy)
    if (start < 0).any():
        first = problem.names[int(np.argmax(start < 0))]
        raise NotFound(f"list scheduling finds no room for pass {first}")
    return Schedule.of(problem, {stream: rows[np.argsort(place[rows])] for stream, rows in problem.members.items()})


def from_starts(problem: Problem, start: Ints) -> Schedule:
    """The schedule whose streams run their passes by start time. Of passes that start at one time those without length go
    first, along the graph, one microbatch after the other: what one holds is free before the next one takes."""
    a = arrays(problem)
    keys = (a.level, a.depth, last_microbatch(problem), start + problem.passes.duration, start)
    sequences = {}
    for stream, rows in problem.members.items():
        sequences[stream] = rows[np.lexsort(tuple(key[rows] for key in keys))]
    return Schedule.of(problem, sequences)


def run(a: Arrays, policy: Policy) -> tuple[Ints, Ints]:
    """Start times, µs, −1 where the scheduler could not place a pass; and each pass's place among the starts, which tells
    passes without length apart; shape (passes,) each."""
    start, place = _run(a, *policy)
    return start, place


@numba.njit(cache=True, nogil=True)
def _safe(a, i, used, held, still, oldest):  # type: ignore[no-untyped-def]
    """May pass i take its memory? Yes where every group up to its own can still finish one after the other."""
    rank, group = a.rank[i], a.group[i]
    free = a.room[rank] - used[rank] - a.taken[i]
    if free < 0:
        return False
    for g in range(oldest[rank], group):
        if still[rank, g] > free:
            return False
        free += held[rank, g]
    return still[rank, group] - a.taken[i] <= free


@numba.njit(cache=True, nogil=True)
def _pick(  # type: ignore[no-untyped-def]
    a, s, now, idle, priority, cap, patience, slack, position, begun, waiting, ready, stream_free, used, held, still, oldest
):
    """The pass to start on stream s, or −1; with the time of the next known arrival of anything."""
    best, filler = -1, -1
    blocked = False
    arrival = again = NEVER
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
            again = min(again, ready[i])
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
            return (filler if priority[lane] > priority[a.lane[best]] else best), again
        gap = arrival - now
        if blocked or gap >= patience[lane] * a.duration[filler] or idle + gap > slack[lane]:
            return filler, again
    return best, again


@numba.njit(cache=True, nogil=True)
def _push(heap, size, key):  # type: ignore[no-untyped-def]
    """Add `key` to the binary heap in heap[:size]; the heap (larger where it was full)."""
    if size == len(heap):
        wider = np.empty(2 * size, np.int64)
        wider[:size] = heap
        heap = wider
    at = size
    while at > 0 and heap[(at - 1) // 2] > key:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = key
    return heap


@numba.njit(cache=True, nogil=True)
def _pop(heap, size):  # type: ignore[no-untyped-def]
    """Take the least key out of the binary heap in heap[:size]."""
    least, last = heap[0], heap[size - 1]
    at, child = 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = last
    return least


@numba.njit(cache=True, nogil=True)
def _run(a, priority, cap, patience, slack):  # type: ignore[no-untyped-def]
    count, streams = len(a.duration), len(a.home_first) - 1
    start = np.full(count, -1, np.int64)
    place = np.full(count, -1, np.int64)
    begins = 0
    ready = np.zeros(count, np.int64)
    waiting = a.waiting.copy()
    position = np.zeros(len(priority), np.int64)
    begun = np.zeros(len(priority), np.int64)
    stream_free = np.zeros(streams, np.int64)
    wake = np.zeros(streams, np.int64)
    began = np.zeros(streams, np.int64)
    busy = np.zeros(streams, np.int64)
    used = np.zeros(len(a.room), np.int64)
    held = a.gains.copy()  # what a group gives back when it has ended, beyond what it has yet to take
    still = a.needs.copy()
    oldest = np.zeros(len(a.room), np.int64)
    # Events are time · ids + id: a pass's end (id < passes) comes before looks at streams at the same time.
    ids = np.int64(count + streams)
    heap = np.empty(4 * streams + 64, np.int64)
    size = 0
    for s in range(streams):
        heap = _push(heap, size, np.int64(count + s))
        size += 1
    while size > 0:
        key = _pop(heap, size)
        size -= 1
        now, what = key // ids, key % ids
        if what < count:
            rank = a.rank[what]
            if a.freed[what] > 0:
                used[rank] -= a.freed[what]
                held[rank, a.group[what]] -= a.freed[what]
                while oldest[rank] < held.shape[1] and still[rank, oldest[rank]] == 0 and held[rank, oldest[rank]] == 0:
                    oldest[rank] += 1
            # What it freed may be what any stream of the rank waits for.
            for k in range(a.rank_first[rank], a.rank_first[rank + 1]):
                s = a.rank_streams[k]
                if wake[s] != now and stream_free[s] <= now:
                    wake[s] = now
                    heap = _push(heap, size, now * ids + count + s)
                    size += 1
            continue
        s = what - count
        if wake[s] != now or stream_free[s] > now:
            continue
        idle = now - began[s] - busy[s] if busy[s] > 0 else np.int64(0)
        i, again = _pick(
            a,
            s,
            now,
            idle,
            priority,
            cap,
            patience,
            slack,
            position,
            begun,
            waiting,
            ready,
            stream_free,
            used,
            held,
            still,
            oldest,
        )
        wake[s] = NEVER
        if i < 0:
            if again < NEVER:
                wake[s] = again
                heap = _push(heap, size, again * ids + what)
                size += 1
            continue
        lane, rank, end = a.lane[i], a.rank[i], now + a.duration[i]
        start[i] = now
        place[i] = begins
        begins += 1
        position[lane] += 1
        begun[lane] += 1
        if a.taken[i] > 0:
            used[rank] += a.taken[i]
            held[rank, a.group[i]] += a.taken[i]
            still[rank, a.group[i]] -= a.taken[i]
        for k in range(a.stream_first[i], a.stream_first[i + 1]):
            t = a.stream_rows[k]
            stream_free[t] = end
            if busy[t] == 0:
                began[t] = now
            busy[t] += a.duration[i]
        heap = _push(heap, size, end * ids + i)
        size += 1
        for e in range(a.out_first[i], a.out_first[i + 1]):
            j = a.out_pass[e]
            ready[j] = max(ready[j], end + a.out_lag[e])
            waiting[j] -= 1
            if waiting[j] == 0:
                for k in range(a.stream_first[j], a.stream_first[j + 1]):
                    t = a.stream_rows[k]
                    if ready[j] < wake[t] and stream_free[t] <= ready[j]:
                        wake[t] = ready[j]
                        heap = _push(heap, size, ready[j] * ids + count + t)
                        size += 1
    return start, place
