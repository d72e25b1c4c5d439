"""Searching the list scheduler's policies: caps, priorities and patience by simulated annealing.

Every policy makes a schedule that holds, so the search walks among whole schedules, thousands a second. A move changes
one value for a lane and its likes on a range of neighbouring ranks, since good policies change slowly along a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import numba
import numpy as np

from ..clock import Clock
from ..problem import Ints, Problem
from .arrays import arrays
from .list_scheduler import NEVER, Policy, _run, deepest_first

PASS = 7e-7  # seconds that list scheduling a pass takes, or counts for


def starting_policies(problem: Problem, clock: Clock | None = None, seconds: float = 0.0) -> list[Policy]:
    """Policies to start from, best first: `deepest_first` with caps on what each lane has in flight.

    The flight of a lane's pass lasts until its partner's pass ends; 1F1B keeps about flight / (own work of both) in the
    air (arXiv 2006.09503), a zero-bubble warm-up up to flight / own work (arXiv 2401.10241, section 2). Between the two
    lies what memory and times ask for. Patience under 1 delays the passes that wait for less than a filler's length; no
    slack fills every gap, however short.
    With a clock, as many as can be tried in `seconds` of it, the likeliest first and at least one.
    """
    sample = _sample(problem)
    until = 0.0 if clock is None else clock.used + seconds
    tried: list[tuple[int, int, Policy]] = []

    def rank(policies: Iterable[Policy]) -> None:
        for policy in policies:
            if clock is not None:
                if tried and clock.used >= until:
                    return
                clock.spend(len(sample.passes) * PASS)
            tried.append((value_of(sample, policy), len(tried), policy))

    rank(_starting(sample))
    tried.sort(key=lambda t: t[:2])
    rank([policy._replace(slack=np.zeros_like(policy.slack)) for _, _, policy in tried[:4]])
    for _ in range(2):
        tried.sort(key=lambda t: t[:2])
        rank([_with_slack(sample, policy) for _, _, policy in tried[:12]])
    return [policy for _, _, policy in sorted(tried, key=lambda t: t[:2])]


def _starting(problem: Problem) -> Iterator[Policy]:
    a = arrays(problem)
    base = deepest_first(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    partner = np.where(a.partner < 0, np.arange(len(first)), a.partner)
    own, other = a.duration[first], a.duration[first[partner]]
    flight = a.depth[first[partner]] + other - a.depth[first]
    few = np.maximum(1, np.ceil(flight / np.maximum(1, own + other)))
    many = np.maximum(few, np.ceil(flight / np.maximum(1, own)))
    # So many fit wholly before the partner's first pass may start: one more would delay it on every rank in turn.
    whole = np.maximum(1, (a.depth[first[partner]] - a.depth[first]) // np.maximum(1, own))
    leads = (a.partner >= 0) & ~np.isin(np.arange(len(first)), a.partner)
    shallow = np.where(a.partner < 0, -1, a.depth.max() - a.depth[first])
    flying = [few + share * (many - few) for share in (0.0, 0.5, 0.25, 0.75, 1.0)]
    caps = [base.cap, *(np.where(leads, np.ceil(most), base.cap).astype(np.int64) for most in (whole, *flying))]
    for priority, patience, cap in product((base.priority, shallow), (1.0, 0.1, 0.5), caps):
        yield Policy(priority, cap, np.full(len(first), patience), base.slack)


def _with_slack(problem: Problem, policy: Policy) -> Policy:
    """The policy with as much idle time on every rank as its own value leaves: work + slack = value − 1."""
    a = arrays(problem)
    work = _work(problem)
    lane_rank = a.rank[a.lane_rows[a.lane_first[:-1]]]
    slack = np.maximum(0, value_of(problem, policy) - 1 - work[lane_rank])
    return policy._replace(slack=slack, patience=np.ones(len(slack)))


def _work(problem: Problem) -> Ints:
    """µs of compute a rank."""
    durations = np.where(problem.computing, problem.passes.duration, 0)
    return np.bincount(problem.passes.rank, durations, problem.ranks).astype(np.int64)


def value_of(problem: Problem, policy: Policy) -> int:
    """The value, µs, of the schedule that a policy makes."""
    a = arrays(problem)
    return int(_value(a, _run(a, *policy)[0], problem.objective == "span"))


def improve_policies(
    problem: Problem, starts: list[Policy], clock: Clock, seed: int, seconds: float
) -> Iterator[Policy | None]:
    """Policies of better and better schedules for `seconds` of the clock; None after a slice without one.

    Short annealings from the first few of `starts`, then longer ones from the best of all. A policy says nothing of
    microbatches, so a long step is annealed with its first few: see `_sample`.
    """
    sample = _sample(problem)
    a, shape, spans = arrays(sample), _shape(sample), problem.objective == "span"
    cost = len(sample.passes) * PASS  # seconds a simulation
    until = clock.used + seconds
    rng = np.random.default_rng(seed)
    best, best_value = starts[0], value_of(sample, starts[0])
    share = max(cost, seconds / 12)
    turn = 0
    while clock.used < until and clock.left > 0:
        policy = starts[turn] if turn < min(4, len(starts)) else best
        value = value_of(sample, policy)
        begin, length = clock.used, share if turn < 4 else 2 * share
        current, at, top, top_value = policy, value, policy, value
        while clock.used < min(until, begin + length) and clock.left > 0:
            steps = max(1, min(2000, int(0.1 / cost)))
            heat = 0.004 * value * (1 - (clock.used - begin) / length) ** 2
            found = _anneal(a, *shape, *current, at, *top, top_value, spans, heat, steps, int(rng.integers(1 << 30)))
            clock.spend(steps * cost)
            current, at, top, top_value = Policy(*found[:4]), found[4], Policy(*found[5:9]), found[9]
            if top_value < best_value:
                best_value, best = top_value, top
                yield best
            else:
                yield None
        turn += 1


def _sample(problem: Problem) -> Problem:
    """The problem itself where it is small, else its first microbatches: enough for warm-up, steady state, cool-down."""
    count = int(problem.passes.microbatch.max()) + 1
    few = max(3 * problem.ranks, 4_000 * count // len(problem.passes))
    return problem.head(few) if len(problem.passes) > 6_000 and few < 0.8 * count else problem


def _shape(problem: Problem) -> tuple[Ints, Ints, Ints, Ints]:
    """Rank, step (F, B, W: 0, 1, 2), chunk (place among the rank's stages) and the rank's work (µs) of every lane."""
    a = arrays(problem)
    first = a.lane_rows[a.lane_first[:-1]]
    rank, stage = a.rank[first], problem.passes.stage[first]
    step = np.zeros(len(first), np.int64)
    for _ in range(3):
        for lane, partner in enumerate(a.partner):
            if partner >= 0 and partner != lane:
                step[partner] = step[lane] + 1
    chunk = np.array(
        [len({s for s, r in zip(stage, rank, strict=True) if r == k and s < at}) for at, k in zip(stage, rank, strict=True)]
    )
    work = _work(problem)
    return rank, step, chunk.astype(np.int64), work[rank]


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
def _move(a, rank, step, chunk, work, value, priority, cap, patience, slack):  # type: ignore[no-untyped-def]
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
            if kind < 2:
                patience[k] = level
            elif kind < 4:
                patience[k] = max(0.0, patience[k] + nudge)
            elif kind < 7:
                slack[k] = np.int64(max(0.0, (value - work[k]) * (1.0 + nudge)))
            else:
                slack[k] = NEVER
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
    work,
    priority,
    cap,
    patience,
    slack,
    at,
    best_priority,
    best_cap,
    best_patience,
    best_slack,
    value,
    spans,
    heat,
    steps,
    seed,
):
    np.random.seed(seed)
    for _ in range(steps):
        p, c, w, s = priority.copy(), cap.copy(), patience.copy(), slack.copy()
        for _ in range(1 + np.random.randint(2)):
            _move(a, rank, step, chunk, work, value, p, c, w, s)
        new = _value(a, _run(a, p, c, w, s)[0], spans)
        if new <= at or np.random.random() < np.exp((at - new) / max(heat, 1e-9)):
            priority, cap, patience, slack, at = p, c, w, s, new
        if new < value:
            best_priority, best_cap, best_patience, best_slack, value = p.copy(), c.copy(), w.copy(), s.copy(), new
    return priority, cap, patience, slack, at, best_priority, best_cap, best_patience, best_slack, value
