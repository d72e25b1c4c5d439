"""The list scheduler: whenever a stream is free, it starts the best pass that can start.

This is the parallel schedule-generation scheme of project scheduling (Kolisch, 1996). A `Policy` gives each lane a priority,
a cap on its passes in flight, and a patience. *Fillers*, passes without successors that take no memory (mostly weight
gradients), fill gaps as in the zero-bubble paper (arXiv 2401.10241, section 3.1). The `ledger` avoids deadlocks in tight
memory.

`one_after_another` makes an order that fits even in very little memory: one pass after the other. If memory is short in
several pools at once (the host and the devices), any rule for the next pass may run into a dead end. Then it backtracks
within the microbatch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ...schedule.timeline import Floats
from ...util.errors import NotFound
from ...util.kernels import inner_kernel, kernel, subkernel
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import NEVER, ProblemArrays, arrays_of, last_microbatch, usual_ahead
from ..syncs import Moments, moments_of, synced
from .ledger import Ledger, free, may_take, new_ledger, take

STRETCHED = 3  # with slowdowns: how often scheduling is repeated with the durations of the schedule before


@subkernel
def push(heap: Ints, size: int, key: int) -> Ints:
    """Add `key` to the binary heap in heap[:size]. Returns the heap, or a larger copy if it was full."""
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


@subkernel
def pop(heap: Ints, size: int) -> int:
    """Take the least key out of the binary heap in heap[:size], and return it."""
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
    return int(least)


class Policy(NamedTuple):
    """How the list scheduler chooses: one value a lane each.

    priority: of lanes whose next pass is ready, the one with the highest goes first.
    cap: the most passes of the lane in flight (started, while the partner lane's pass of their microbatch is not). A pass
      that brings memory back for one that waits for nothing else is exempt.
    patience: a filler starts if the gap is at least `patience` times as long as the filler.
    slack: a filler also starts if the stream would otherwise have been idle for more than `slack` µs since its first pass:
      a W may wait while the bubble stays below the largest one of any stage (arXiv 2401.10241, section 3.1).
    """

    priority: Ints
    cap: Ints
    patience: Floats
    slack: Ints


def deepest_first(problem: Problem) -> Policy:
    """The policy that prefers the pass furthest along the graph and fills only gaps that are long enough. Its only caps are
    on how far ahead of its use memory is brought back (see `most_ahead`)."""
    a = arrays_of(problem)
    priority = np.where(a.partner < 0, -1, a.depth[a.first_pass])
    return Policy(priority, usual_ahead(problem, a), np.ones(len(priority)), np.full(len(priority), NEVER))


def list_schedule(problem: Problem, policy: Policy) -> Schedule:
    """The schedule that a policy makes. With slowdowns: the best of several, each made with the durations of the one before.

    It exists if each rank has the capacity for all that one microbatch takes there, including what it takes after it freed
    something. With less, raises NotFound.
    """
    best = schedule = _listed(problem, policy)
    for _ in range(STRETCHED if problem.slowdowns else 0):
        timeline = schedule.timeline()
        taken = replace(problem.passes, duration=timeline.end - timeline.start)
        again = _listed(replace(problem, passes=taken, slowdowns=()), policy)
        schedule = Schedule(problem, again.order, again.syncs)
        best = min(best, schedule, key=lambda either: either.timeline().value)
    return best


def _listed(problem: Problem, policy: Policy) -> Schedule:
    start, place = start_times(arrays_of(problem), policy)
    if (start < 0).any():
        first = problem.names[int(np.argmax(start < 0))]
        raise NotFound(f"list scheduling finds no room for pass {first}")
    return synced(problem, moments_of(start, start + problem.passes.duration, place))


def schedule_by_start(problem: Problem, start: Ints) -> Schedule:
    """The schedule whose streams run their passes by start time. start: µs, shape (passes,).

    Of passes that start at the same time, those of duration 0 go first, along the graph and by microbatch, so that each
    frees its memory before the next one takes some.
    """
    a = arrays_of(problem)
    end = start + problem.passes.duration
    turn = np.empty(len(start), np.int64)
    turn[np.lexsort((a.level, a.depth, last_microbatch(problem), end, start))] = np.arange(len(start))
    return synced(problem, moments_of(start, end, turn))


class _State(NamedTuple):
    """The state of the list scheduler.

    One value a pass: waiting, how many of its inputs have not started; ready, when the inputs that have started arrive, µs.
    One value a lane: begun, how many of its passes have started.
    One value a stream: free, when it is free, µs; wake, when the scheduler visits it next (`NEVER`: not planned); began,
      when its first pass started; busy, µs of work started on it.
    ledger: the memory that is held (see `Ledger`).
    """

    waiting: Ints
    ready: Ints
    begun: Ints
    free: Ints
    wake: Ints
    began: Ints
    busy: Ints
    ledger: Ledger


@subkernel
def _initial(a: ProblemArrays) -> _State:
    """The state before anything has started."""
    ready, begun = np.zeros(len(a.duration), np.int64), np.zeros(len(a.partner), np.int64)
    streams = np.zeros((4, len(a.stream_lane_first) - 1), np.int64)
    return _State(a.inputs.copy(), ready, begun, streams[0], streams[1], streams[2], streams[3], new_ledger(a))


@inner_kernel
def _occupied(a: ProblemArrays, state: _State, i: int, now: int) -> bool:
    """Whether one of the streams of pass i runs another pass."""
    for k in range(a.pass_stream_first[i], a.pass_stream_first[i + 1]):  # noqa: SIM110 (a generator is slow here)
        if state.free[a.pass_streams[k]] > now:
            return True
    return False


@inner_kernel
def _due(a: ProblemArrays, state: _State, i: int) -> bool:
    """Whether pass i brings memory back for a pass whose other inputs have all started."""
    return bool(a.user[i] >= 0 and state.waiting[a.user[i]] <= a.returns[a.user[i]])


@inner_kernel
def _pick(a: ProblemArrays, policy: Policy, state: _State, s: int, now: int) -> tuple[int, int]:
    """The pass to start on stream s at `now`, or −1; and when its next known pass is ready (`NEVER`: none is known)."""
    best, filler = -1, -1
    blocked = False
    arrival = again = NEVER
    for h in range(a.stream_lane_first[s], a.stream_lane_first[s + 1]):
        lane = a.stream_lanes[h]
        at = a.lane_first[lane] + state.begun[lane]
        if at == a.lane_first[lane + 1]:
            continue
        i = a.lane_passes[at]
        if state.waiting[i] > 0:
            continue
        partner = a.partner[lane]
        if state.ready[i] > now:
            again = min(again, state.ready[i])
            if partner >= 0:
                arrival = min(arrival, state.ready[i])
            continue
        if _occupied(a, state, i, now):
            continue
        if partner < 0 and a.takes[i] == 0:
            if filler < 0 or policy.priority[lane] > policy.priority[a.lane[filler]]:
                filler = i
            continue
        if partner >= 0 and state.begun[lane] - state.begun[partner] >= policy.cap[lane] and not _due(a, state, i):
            # A lane at its cap waits for its partner's pass. If that is a filler, the filler should start.
            blocked = blocked or a.partner[partner] < 0
            continue
        if a.takes[i] > 0 and not may_take(a, state.ledger, i):
            blocked = True
            continue
        if best < 0 or policy.priority[lane] > policy.priority[a.lane[best]]:
            best = i
    if filler >= 0:
        lane = a.lane[filler]
        if best >= 0:
            return (filler if policy.priority[lane] > policy.priority[a.lane[best]] else best), again
        gap = arrival - now
        idle = now - state.began[s] - state.busy[s] if state.busy[s] > 0 else 0
        if blocked or gap >= policy.patience[lane] * a.duration[filler] or idle + gap > policy.slack[lane]:
            return filler, again
    return best, again


@inner_kernel
def _occupy(a: ProblemArrays, state: _State, i: int, now: int) -> None:
    """Pass i starts: it takes its memory and occupies its streams."""
    state.begun[a.lane[i]] += 1
    take(a, state.ledger, i)
    for k in range(a.pass_stream_first[i], a.pass_stream_first[i + 1]):
        t = a.pass_streams[k]
        state.free[t] = now + a.duration[i]
        if state.busy[t] == 0:
            state.began[t] = now
        state.busy[t] += a.duration[i]


@kernel
def start_times(a: ProblemArrays, policy: Policy) -> tuple[Ints, Ints]:
    """The start of each pass, µs (−1: the scheduler could not place it), and its place among all starts, which orders passes
    that start at the same time; shape (passes,) each. Compiled: a loop over events in order of time.

    An event is time · ids + id. The id of a pass's end is the pass; the id of a visit to stream s is passes + s. So ends
    come before visits at the same time.
    """
    count, streams = len(a.duration), len(a.stream_lane_first) - 1
    start, place = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    begins = 0
    state = _initial(a)
    ids = count + streams
    heap = np.empty(4 * streams + 64, np.int64)
    size = 0
    for s in range(streams):
        heap = push(heap, size, count + s)
        size += 1
    while size > 0:
        key = pop(heap, size)
        size -= 1
        now, what = key // ids, key % ids
        if what < count:
            free(a, state.ledger, what)
            # Streams of its rank may have waited for this pass or its memory, and streams of its pools for their memory.
            first = a.accounts.first[what]
            for m in range(first - 1, a.accounts.first[what + 1]):
                pool = a.rank[what] if m < first else a.accounts.pool[m]
                for k in range(a.pool_stream_first[pool], a.pool_stream_first[pool + 1]):
                    s = a.pool_streams[k]
                    if state.wake[s] != now and state.free[s] <= now:
                        state.wake[s] = now
                        heap = push(heap, size, now * ids + count + s)
                        size += 1
            continue
        s = what - count
        if state.wake[s] != now or state.free[s] > now:
            continue
        i, again = _pick(a, policy, state, s, now)
        state.wake[s] = NEVER
        if i < 0:
            if again < NEVER:
                state.wake[s] = again
                heap = push(heap, size, again * ids + what)
                size += 1
            continue
        end = now + a.duration[i]
        start[i] = now
        place[i] = begins
        begins += 1
        _occupy(a, state, i, now)
        heap = push(heap, size, end * ids + i)
        size += 1
        for e in range(a.out_first[i], a.out_first[i + 1]):
            j = a.out_pass[e]
            state.ready[j] = max(state.ready[j], end + a.out_lag[e])
            state.waiting[j] -= 1
            if state.waiting[j] == a.returns[j]:  # passes that bring memory back for it are due (see `_due`)
                for k in range(a.pool_stream_first[a.rank[j]], a.pool_stream_first[a.rank[j] + 1]):
                    t = a.pool_streams[k]
                    if a.returns[j] > 0 and state.wake[t] != now and state.free[t] <= now:
                        state.wake[t] = now
                        heap = push(heap, size, now * ids + count + t)
                        size += 1
            if state.waiting[j] == 0:
                for k in range(a.pass_stream_first[j], a.pass_stream_first[j + 1]):
                    t = a.pass_streams[k]
                    if state.ready[j] < state.wake[t] and state.free[t] <= state.ready[j]:
                        state.wake[t] = state.ready[j]
                        heap = push(heap, size, state.ready[j] * ids + count + t)
                        size += 1
    return start, place


# --- One microbatch after the other ---


# The priority (0 first) of passes that bring memory back, that copy it out, of all others, and of those that take memory for
# others. Rule 0 brings copies back at once; rule 1 as late as possible; rule 2 copies out as late as possible.
RULES = ((0, 1, 2, 3), (2, 0, 1, 2), (1, 2, 0, 3))
TRIES = 4000  # passes that one rule tries in a microbatch, beyond one try each


def one_after_another(problem: Problem) -> Schedule | None:
    """The schedule that fits as if no two passes ran at once (its edges and syncs may still let them overlap). None if one
    microbatch fits in no order that was tried."""
    order = _Order(problem).all_passes()
    if order is None:
        return None
    place = np.argsort(order)
    return synced(problem, Moments(2 * place, 2 * place + 1))


class _Order:
    """Makes an order of all passes. used: bytes held in each pool. moves: (pool, bytes taken, bytes freed) of each pass in
    pools with a limit. waiting: how many inputs of each pass are missing. harmless: passes that leave no pool fuller."""

    def __init__(self, problem: Problem) -> None:
        a = arrays_of(problem)
        count = len(problem.passes)
        self.room: list[int] = problem.room.tolist()
        self.used = [0] * len(self.room)
        self.moves: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for pool in np.flatnonzero(problem.room < UNLIMITED).tolist():
            taken, freed = problem.moved(pool)
            for i in np.flatnonzero((taken > 0) | (freed > 0)).tolist():
                self.moves[i].append((pool, int(taken[i]), int(freed[i])))
        self.harmless = [all(freed >= taken for _, taken, freed in moves) for moves in self.moves]
        out, reserving = np.isin(np.arange(count), a.accounts.copy_out), ~problem.computing & (problem.taken > 0)
        self.kind = np.select([brings_back(problem), out, reserving], [0, 1, 3], 2).tolist()
        self.depth = a.depth.tolist()
        # Lanes keep their order, too.
        before = np.concatenate([problem.edges.before, *(rows[:-1] for rows in problem.lanes)])
        after = np.concatenate([problem.edges.after, *(rows[1:] for rows in problem.lanes)])
        self.waiting: list[int] = np.bincount(after, minlength=count).tolist()
        self.behind: list[list[int]] = [[] for _ in range(count)]
        for i, j in zip(before.tolist(), after.tolist(), strict=True):
            self.behind[i].append(j)
        order = np.argsort(a.account, kind="stable")
        self.accounts = np.split(order, np.flatnonzero(np.diff(a.account[order])) + 1)

    def all_passes(self) -> list[int] | None:
        """All passes in order; None if no order of some microbatch was found."""
        order: list[int] = []
        for rows in self.accounts:
            tried = (self._account(rows.tolist(), rule) for rule in RULES)
            behind = next((passes for passes in tried if passes is not None), None)
            if behind is None:
                return None
            order += behind
        return order

    def _account(self, rows: list[int], rule: tuple[int, ...]) -> list[int] | None:
        """The passes of one microbatch in an order that fits, or None; found by backtracking. rows: its passes."""
        bit = {i: 1 << k for k, i in enumerate(rows)}
        ready = {i for i in rows if self.waiting[i] == 0}
        order: list[int] = []
        done, dead, tries = 0, set[int](), len(rows) + TRIES
        choices = [self._choices(ready, rule)]
        while len(order) < len(rows):
            if choices[-1] and tries > 0:
                i = choices[-1].pop()
                if done | bit[i] in dead:
                    continue
                tries -= 1
                done |= bit[i]
                order.append(i)
                self._move(i, 1, ready, bit)
                choices.append(self._choices(ready, rule))
                continue
            if not order:
                return None
            dead.add(done)
            choices.pop()
            i = order.pop()
            done ^= bit[i]
            self._move(i, -1, ready, bit)
        return order

    def _choices(self, ready: set[int], rule: tuple[int, ...]) -> list[int]:
        """The passes that fit next, the best last, of equals the deepest; a pass alone where it leaves no pool fuller."""
        fit = [i for i in ready if all(self.used[pool] + taken <= self.room[pool] for pool, taken, _ in self.moves[i])]
        fit.sort(key=lambda i: (-rule[self.kind[i]], self.depth[i], -i))
        return next(([i] for i in reversed(fit) if self.harmless[i]), fit)

    def _move(self, i: int, way: int, ready: set[int], account: Collection[int]) -> None:
        """Run pass i (way 1), or undo it (way −1). account: the passes of the microbatch."""
        for pool, taken, freed in self.moves[i]:
            self.used[pool] += way * (taken - freed)
        ready ^= {i}
        for j in self.behind[i]:
            self.waiting[j] -= way
            if self.waiting[j] == 0 and j in account:
                ready.add(j)
            else:
                ready.discard(j)
