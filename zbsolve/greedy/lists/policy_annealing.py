"""Simulated annealing over the list scheduler's policies: caps, priorities, patience, slack.

Every policy makes a valid schedule, so the search moves among whole schedules, thousands a second. Good policies change
slowly along a pipeline, so a move changes one value for a lane and for similar lanes on a range of neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...util.clock import Clock
from ...util.kernels import kernel, subkernel
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import NEVER, ProblemArrays, arrays_of, most_ahead
from .list_scheduler import Policy, deepest_first, start_times

SECONDS_PER_SCHEDULED_PASS = 7e-7  # of list scheduling, also as effort
ANNEALED_STARTS = 4  # policies that get a short annealing each before the best of all is annealed
SHORT_RUNS = 12  # a short annealing has this part of the whole time
ROUNDS_AT_ONCE, SECONDS_AT_ONCE = 2000, 0.1  # the most rounds and seconds between two results
HEAT = 0.004  # the temperature at first, as a share of the value
AHEAD = (0.0, 0.75, 0.5, 0.95, 0.25)  # shares of a device's memory for bytes that are brought back early
SAMPLED_PASSES, SAMPLE_SIZE = 6_000, 4_000  # a step of more passes is annealed with its first microbatches; their passes


def starting_policies(problem: Problem, clock: Clock | None = None, seconds: float = 0.0) -> list[Policy]:
    """Policies to start from, best first: `deepest_first` with caps on each lane's passes in flight.

    The flight of a lane's pass lasts until its partner's pass ends. 1F1B keeps about flight / (work of both lanes) passes
    in flight (arXiv 2006.09503), a zero-bubble warm-up up to flight / own work (arXiv 2401.10241, section 2). The best cap
    is between the two, depending on memory and times. A patience below 1 delays passes that become ready before the filler
    ends. With slack 0 every gap is filled, however short.
    With a clock, policies are tried for `seconds` of it, the most promising first, and at least one.
    """
    sample = _sample(problem)
    share = None if clock is None else clock.share(seconds)
    tried: list[tuple[int, int, Policy]] = []

    def try_all(policies: Iterable[Policy]) -> None:
        """Try policies while the clock allows it."""
        for policy in policies:
            if share is not None:
                if tried and share.over:
                    return
                share.clock.spend(len(sample.passes) * SECONDS_PER_SCHEDULED_PASS)
            tried.append((policy_value(sample, policy), len(tried), policy))

    try_all(_candidates(sample))
    tried.sort(key=lambda t: t[:2])
    try_all([policy._replace(slack=np.zeros_like(policy.slack)) for _, _, policy in tried[:4]])
    for _ in range(2):
        tried.sort(key=lambda t: t[:2])
        try_all([_with_slack(sample, policy) for _, _, policy in tried[:12]])
    return [policy for _, _, policy in sorted(tried, key=lambda t: t[:2])]


def _candidates(problem: Problem) -> Iterator[Policy]:
    """Policies with all combinations of caps, priorities and patience, the most promising first."""
    a = arrays_of(problem)
    base = deepest_first(problem)
    first = a.first_pass
    partner = np.where(a.partner < 0, np.arange(len(first)), a.partner)
    own, other = a.duration[first], a.duration[first[partner]]
    flight = a.depth[first[partner]] + other - a.depth[first]
    few = np.maximum(1, np.ceil(flight / np.maximum(1, own + other)))
    many = np.maximum(few, np.ceil(flight / np.maximum(1, own)))
    # So many end before the partner's first pass can start. One more would delay that pass on every rank in turn.
    whole = np.maximum(1, (a.depth[first[partner]] - a.depth[first]) // np.maximum(1, own))
    leads = (a.partner >= 0) & ~np.isin(np.arange(len(first)), a.partner)
    shallow = np.where(a.partner < 0, -1, a.depth.max() - a.depth[first])
    flying = [few + share * (many - few) for share in (0.0, 0.5, 0.25, 0.75, 1.0)]
    caps = [base.cap, *(np.where(leads, np.ceil(most), base.cap).astype(np.int64) for most in (whole, *flying))]
    back = brings_back(problem)[first]
    ahead = [base.cap, *(most_ahead(problem, a, share) for share in AHEAD)] if back.any() else [base.cap]
    for priority, patience, cap, early in product((base.priority, shallow), (1.0, 0.1, 0.5), caps, ahead):
        yield Policy(priority, np.where(back, early, cap), np.full(len(first), patience), base.slack)


def _with_slack(problem: Problem, policy: Policy) -> Policy:
    """The policy with a slack on every rank that its own value leaves: work + slack = value − 1."""
    a = arrays_of(problem)
    slack = np.maximum(0, policy_value(problem, policy) - 1 - problem.busy[a.rank[a.first_pass]])
    return policy._replace(slack=slack, patience=np.ones(len(slack)))


def policy_value(problem: Problem, policy: Policy) -> int:
    """The value, µs, of the schedule that a policy makes; 1 << 60 where it makes none."""
    a = arrays_of(problem)
    return int(_value(a, start_times(a, policy)[0], problem.objective == "span"))


def improve_policies(
    problem: Problem, starts: list[Policy], clock: Clock, seed: int, seconds: float
) -> Iterator[Policy | None]:
    """Policies of better and better schedules for `seconds` of the clock; None after rounds without a better one.

    The first few of `starts` get a short annealing each, then the best of all gets longer ones. A policy does not depend on
    single microbatches, so a long step is annealed with its first microbatches only (`_sample`).
    """
    sample = _sample(problem)
    a, traits, spans = arrays_of(sample), _traits(sample), problem.objective == "span"
    cost = len(sample.passes) * SECONDS_PER_SCHEDULED_PASS  # of one simulation
    whole = clock.share(seconds)
    rng = np.random.default_rng(seed)
    best, best_value = starts[0], policy_value(sample, starts[0])
    share = max(cost, seconds / SHORT_RUNS)
    turn = 0
    while not whole.over:
        policy = starts[turn] if turn < min(ANNEALED_STARTS, len(starts)) else best
        value = policy_value(sample, policy)
        begin, length = clock.used, share if turn < ANNEALED_STARTS else 2 * share
        current, top = (policy, value), (policy, value)
        step_share = clock.share(length)
        while not (step_share.over or whole.over):
            rounds = max(1, min(ROUNDS_AT_ONCE, int(SECONDS_AT_ONCE / cost)))
            heat = HEAT * value * max(0.0, 1 - (clock.used - begin) / length) ** 2
            budget = _Budget(heat, rounds, int(rng.integers(1 << 30)))
            current, top = _anneal(a, traits, current, top, spans, budget)
            clock.spend(rounds * cost)
            if top[1] < best_value:
                best, best_value = top
                yield best
            else:
                yield None
        turn += 1


def _sample(problem: Problem) -> Problem:
    """The problem if it is small, else its first microbatches: enough for warm-up, steady state and cool-down."""
    count = problem.microbatches
    few = max(3 * problem.ranks, SAMPLE_SIZE * count // len(problem.passes))
    return problem.head(few) if len(problem.passes) > SAMPLED_PASSES and few < 0.8 * count else problem


class _Traits(NamedTuple):
    """What makes lanes similar, one value a lane. rank. step: its number along the chain of partners, from 0. chunk: the
    number of its stage among the rank's stages. work: of the rank, µs."""

    rank: Ints
    step: Ints
    chunk: Ints
    work: Ints


class _Budget(NamedTuple):
    """The limits of one call of annealing. heat: the temperature, µs."""

    heat: float
    rounds: int
    seed: int


def _traits(problem: Problem) -> _Traits:
    """The traits of the problem's lanes."""
    a = arrays_of(problem)
    rank, stage = a.rank[a.first_pass], problem.passes.stage[a.first_pass]
    step = np.zeros(len(rank), np.int64)
    for _ in range(3):
        for lane, partner in enumerate(a.partner):
            if partner >= 0 and partner != lane:
                step[partner] = step[lane] + 1
    at = np.unique(np.stack([rank, stage]), axis=1)  # a rank's stages in order
    chunk = np.array([int(np.sum((at[0] == r) & (at[1] < s))) for s, r in zip(stage, rank, strict=True)])
    return _Traits(rank, step, chunk.astype(np.int64), problem.busy[rank])


@kernel
def _value(a: ProblemArrays, start: Ints, spans: bool) -> int:
    """The makespan, or the span if `spans`, of start times, µs; 1 << 60 if a pass has none. start: µs, shape (passes,)."""
    ranks = len(a.capacity)
    first = np.full(ranks, 1 << 60)
    last = np.zeros(ranks, np.int64)
    for i in range(len(start)):
        if start[i] < 0:
            return 1 << 60
        r = a.rank[i]
        first[r] = min(first[r], start[i])
        last[r] = max(last[r], start[i] + a.duration[i])
    return int((last - first).max() if spans else last.max())


@subkernel
def _copy(policy: Policy) -> Policy:
    """A copy of a policy."""
    return Policy(policy.priority.copy(), policy.cap.copy(), policy.patience.copy(), policy.slack.copy())


@subkernel
def _move(a: ProblemArrays, traits: _Traits, value: int, policy: Policy) -> None:
    """Change one value of a random lane, and of similar lanes on a random range of ranks, in place. value: of the best
    policy so far, µs."""
    lanes, ranks, rank = len(policy.priority), len(a.capacity), traits.rank
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
        if rank[k] < low or rank[k] > high or traits.step[k] != traits.step[chosen]:
            continue
        if same_chunk and traits.chunk[k] != traits.chunk[chosen]:
            continue
        if a.partner[k] < 0:
            if kind < 2:
                policy.patience[k] = level
            elif kind < 4:
                policy.patience[k] = max(0.0, policy.patience[k] + nudge)
            elif kind < 7:
                policy.slack[k] = np.int64(max(0.0, (value - traits.work[k]) * (1.0 + nudge)))
            else:
                policy.slack[k] = NEVER
        elif kind < 5:
            policy.cap[k] = max(1, min(policy.cap[k], top) + shift)
        elif kind < 7:
            policy.cap[k] = jump
        else:
            policy.cap[k] = len(a.duration)
    if kind == 7 and rank[other] == rank[chosen]:
        priority = policy.priority
        priority[chosen], priority[other] = priority[other], priority[chosen]


@kernel
def _anneal(
    a: ProblemArrays, traits: _Traits, current: tuple[Policy, int], best: tuple[Policy, int], spans: bool, budget: _Budget
) -> tuple[tuple[Policy, int], tuple[Policy, int]]:
    """Some rounds of annealing. current, best: pairs (policy, value in µs), whose arrays are not changed. Returns the new
    pairs."""
    np.random.seed(budget.seed)
    policy, at = current
    top, value = best
    for _ in range(budget.rounds):
        trial = _copy(policy)
        for _ in range(1 + np.random.randint(2)):
            _move(a, traits, value, trial)
        new = _value(a, start_times(a, trial)[0], spans)
        if new <= at or np.random.random() < np.exp((at - new) / max(budget.heat, 1e-9)):
            policy, at = trial, new
        if new < value:
            top, value = _copy(trial), new
    return (policy, at), (top, value)
