"""Searching the list scheduler's policies: caps, priorities and patience by simulated annealing.

Every policy makes a schedule that holds, so the search walks among whole schedules, thousands a second. A move changes
one value for a lane and its likes on a range of neighbouring ranks, since good policies change slowly along a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from ..clock import Clock
from ..problem import Ints, Problem
from .arrays import arrays
from .list_scheduler import Policy, _run, deepest_first


def starting_policies(problem: Problem) -> Iterator[Policy]:
    """Policies to start from: `deepest_first` with caps on what each lane has in flight.

    The flight of a lane's pass lasts until its partner's pass ends; 1F1B keeps about flight / (own work of both) in the
    air (arXiv 2006.09503), a zero-bubble warm-up up to flight / own work (arXiv 2401.10241, section 2). Between the two
    lies what memory and times ask for. Patience under 1 delays the passes that wait for less than a filler's length.
    """
    a = arrays(problem)
    base = deepest_first(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    partner = np.where(a.partner < 0, np.arange(len(first)), a.partner)
    own, other = a.duration[first], a.duration[first[partner]]
    flight = a.depth[first[partner]] + other - a.depth[first]
    few = np.maximum(1, np.ceil(flight / np.maximum(1, own + other)))
    many = np.maximum(few, np.ceil(flight / np.maximum(1, own)))
    takes = (a.taken[first] > 0) | (a.partner >= 0)
    leads = takes & ~np.isin(np.arange(len(first)), a.partner)
    for patience in (1.0, 0.5, 0.1):
        for share in (0.0, 1.0, 0.5, 0.25, 0.75, None):
            cap = base.cap if share is None else np.where(leads, np.ceil(few + share * (many - few)), base.cap)
            yield base._replace(cap=cap.astype(np.int64), patience=np.full(len(first), patience))


def value_of(problem: Problem, policy: Policy) -> int:
    """The value, µs, of the schedule that a policy makes."""
    a = arrays(problem)
    return int(_value(a, _run(a, *policy), problem.objective == "span"))


def improve_policies(problem: Problem, clock: Clock, seed: int, seconds: float) -> Iterator[Policy | None]:
    """Policies of better and better schedules for `seconds` of the clock; None after a slice without one.

    Short annealings from the best few starting policies, then longer ones from the best of those and of all.
    """
    a = arrays(problem)
    spans = problem.objective == "span"
    shape = _shape(problem)
    cost = len(problem.passes) * 7e-7  # seconds a simulation
    until = clock.used + seconds
    rng = np.random.default_rng(seed)
    starts = sorted(((value_of(problem, p), i, p) for i, p in enumerate(starting_policies(problem))), key=lambda s: s[:2])
    best_value, best = starts[0][0], starts[0][2]
    share = max(cost, seconds / 12)
    for turn in range(1000):
        value, _, policy = starts[turn % 4] if turn < 4 else (best_value, turn, best)
        begin, length = clock.used, share if turn < 4 else 2 * share
        current, at, top, top_value = policy, value, policy, value
        while clock.used < min(until, begin + length) and clock.left > 0:
            done = (clock.used - begin) / length
            steps = max(1, min(2000, int(0.1 / cost)))
            heat = 0.004 * value * (1 - done) ** 2
            found = _anneal(a, *shape, *current, at, *top, top_value, spans, heat, steps, int(rng.integers(1 << 30)))
            clock.spend(steps * cost)
            current, at, top, top_value = Policy(*found[:3]), found[3], Policy(*found[4:7]), found[7]
            if top_value < best_value:
                best_value, best = top_value, top
                yield best
            else:
                yield None
        if clock.used >= until or clock.left <= 0:
            return


def _shape(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """Rank, step (F, B, W: 0, 1, 2) and chunk (place among the rank's stages) of every lane."""
    a = arrays(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    rank, stage = a.rank[first], problem.passes.stage[first]
    step = np.zeros(len(first), np.int64)
    for _ in range(3):
        for lane, partner in enumerate(a.partner):
            if partner >= 0:
                step[partner] = step[lane] + 1
    chunk = np.array(
        [len({s for s, r in zip(stage, rank, strict=True) if r == k and s < at}) for at, k in zip(stage, rank, strict=True)]
    )
    return rank, step, chunk.astype(np.int64)


@numba.njit(cache=True, nogil=True)
def _value(a, start, spans):  # type: ignore[no-untyped-def]
    """The objective of start times, µs; very large where a pass was not placed."""
    ranks = len(a.room)
    first = np.full(ranks, np.int64(1) << 60)
    last = np.zeros(ranks, np.int64)
    for i in range(len(start)):
        if start[i] < 0:
            return np.int64(1) << 60
        r = a.rank[i]
        first[r] = min(first[r], start[i])
        last[r] = max(last[r], start[i] + a.duration[i])
    return (last - first).max() if spans else last.max()


@numba.njit(cache=True, nogil=True)
def _move(a, rank, step, chunk, priority, cap, patience):  # type: ignore[no-untyped-def]
    """Change one value of a random lane and of its likes on a random range of ranks, in place."""
    lanes, ranks = len(priority), len(a.room)
    chosen = np.random.randint(lanes)
    top = a.lane_first[chosen + 1] - a.lane_first[chosen]
    width = 0 if np.random.randint(2) == 0 else np.random.randint(ranks)
    low, high = rank[chosen] - np.random.randint(width + 1), rank[chosen] + np.random.randint(width + 1)
    same_chunk = np.random.randint(2) == 0
    kind = np.random.randint(8)
    shift = np.random.randint(1, 3) * (1 if np.random.randint(2) == 0 else -1)
    jump = np.random.randint(1, 2 * ranks + 2)
    level = abs(np.random.normal(0.0, 1.0))
    nudge = np.random.normal(0.0, 0.2)
    other = np.random.randint(lanes)
    for k in range(lanes):
        if rank[k] < low or rank[k] > high or step[k] != step[chosen] or (same_chunk and chunk[k] != chunk[chosen]):
            continue
        if a.partner[k] < 0:
            patience[k] = level if kind < 3 else max(0.0, patience[k] + nudge)
        elif kind < 5:
            cap[k] = max(1, min(cap[k], top) + shift)
        elif kind < 7:
            cap[k] = jump
        else:
            cap[k] = len(a.duration)
    if kind == 7 and rank[other] == rank[chosen]:
        priority[chosen], priority[other] = priority[other], priority[chosen]


@numba.njit(cache=True, nogil=True)
def _anneal(  # type: ignore[no-untyped-def]
    a,
    rank,
    step,
    chunk,
    priority,
    cap,
    patience,
    at,
    best_priority,
    best_cap,
    best_patience,
    value,
    spans,
    heat,
    steps,
    seed,
):
    np.random.seed(seed)
    for _ in range(steps):
        p, c, w = priority.copy(), cap.copy(), patience.copy()
        for _ in range(1 + np.random.randint(2)):
            _move(a, rank, step, chunk, p, c, w)
        new = _value(a, _run(a, p, c, w), spans)
        if new <= at or np.random.random() < np.exp((at - new) / max(heat, 1e-9)):
            priority, cap, patience, at = p, c, w, new
        if new < value:
            best_priority, best_cap, best_patience, value = p.copy(), c.copy(), w.copy(), new
    return priority, cap, patience, at, best_priority, best_cap, best_patience, value
