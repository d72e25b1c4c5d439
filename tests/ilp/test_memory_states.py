"""Prices of what a rank holds and runs at one moment: no schedule exceeds them, and they give known steady states."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Edge, Infeasible, NotFound, Pass, Problem, pipeline, verify
from zbsolve.build import Work, with_offload, with_sharding, with_work
from zbsolve.greedy.arrays.microbatch import microbatch_graph
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.bounds.bound import AREA, rounded_up, value_unit
from zbsolve.ilp.bounds.closed_forms import all_closed_forms, closed_forms_within
from zbsolve.ilp.bounds.energy import WHOLE_ONES, _in_whole_microbatches
from zbsolve.ilp.bounds.many import bound_of_many
from zbsolve.ilp.bounds.memory_states import Microbatches, best_prices, prices_of
from zbsolve.ilp.proof_check import recheck
from zbsolve.schedule import Schedule

from ..support import exact_streams
from ..support.exact import optimum

SAID = WHOLE_ONES.split(" {")[0]


def tight_step(draw: random.Random, microbatches: int, most: int = 9) -> Problem | None:
    """A random step with little memory: uneven stages, some with a fused backward, bytes of any size."""
    ranks, placement = draw.randint(1, 4), draw.choice(("single", "vee", "loop2", "loop3"))
    stages = ranks * {"single": 1, "vee": 2, "loop2": 2, "loop3": 3}[placement]
    times = [[draw.randint(1, most) for _ in range(stages)] for _ in range(3)]
    given = {"F": times[0], "BW": times[1]} if draw.random() < 0.2 else dict(zip("FBW", times, strict=True))
    held = [[draw.randint(0, 4) for _ in range(stages)] for _ in range(3)]
    names = dict(zip(("held_until_B", "held_until_W", "held_from_B"), held, strict=True))
    room = [draw.randint(1, 2 + ranks) * draw.randint(3, 12) * stages // ranks for _ in range(ranks)]
    extra = {"comm": draw.randint(0, 3), "capacity": room, "objective": draw.choice(("makespan", "span"))}
    try:
        return pipeline(**given, **names, **extra, placement=placement, microbatches=microbatches)
    except Infeasible:
        return None


def sided_step(draw: random.Random, microbatches: int) -> Problem:
    """A random step with little memory, some of which copies free, or gathered parameters and gradients take."""
    ranks = draw.randint(1, 3)
    placement = draw.choice([(*range(ranks),), (*range(ranks), *range(ranks)), (*range(ranks), *reversed(range(ranks)))])

    def some(least: int, most: int) -> list[int]:
        return [draw.randint(least, most) for _ in placement]

    held = {"held_until_B": some(1, 4), "held_until_W": some(2, 6), "objective": draw.choice(("makespan", "span"))}
    step = pipeline(some(1, 9), some(1, 9), some(0, 9), placement=placement, microbatches=microbatches, **held)
    sides = draw.choice(("copies", "gathers", "both", "both"))
    if sides != "gathers":
        step = with_offload(step, some(0, 12), some(0, 12), fraction=[draw.choice((0, 0.5, 1, 1)) for _ in placement])
    if sides != "copies":
        gathers = [draw.choice((1, 1, 2)) for _ in placement]
        step = with_sharding(
            step, some(0, 6), some(0, 6), parameter_bytes=some(0, 8), gradient_bytes=some(1, 8), gathers=gathers
        )
    one = np.bincount(step.passes.rank, np.where(step.passes.microbatch < 1, step.taken, 0), ranks)
    least = [int(step.taken[step.passes.rank == rank].max()) for rank in range(ranks)]
    unit, room = draw.choice((1, 1, 100_003)), np.maximum(least, (one * draw.uniform(0.5, 1.1)).astype(int)).tolist()
    edges = replace(step.edges, bytes=step.edges.bytes * unit)
    return replace(step, edges=edges, capacity=tuple(size * unit + draw.randrange(unit) for size in room))


def exceeds(schedule: Schedule) -> list[str]:
    """The moments at which prices add up to more than the most that is stated."""
    alike, line, found = Microbatches.of(schedule.problem), schedule.timeline(), []
    assert alike is not None
    for rank in range(schedule.problem.ranks):
        for prices in prices_of(alike, rank):
            counts = np.arange(prices.first.shape[1]) >= prices.skipped[:, None]
            for moment in range(int(line.end.max())):
                start, end = line.start[prices.first], line.end[prices.last]
                now = int((((start <= moment) & (end > moment) & counts).sum(axis=1) * prices.price).sum())
                found += [f"rank {rank} at {moment}: {now} > {prices.most}"] if now > prices.most else []
    return found


@pytest.mark.parametrize("seed", range(3))
def test_no_moment_of_a_schedule_exceeds_the_prices(seed: int) -> None:
    draw, tried = random.Random(seed), 0
    while tried < 4:
        problem = tight_step(draw, draw.randint(2, 6))
        for policy in draw.sample(starting_policies(problem), 3) if problem is not None else ():
            try:
                schedule = list_schedule(problem, policy)
            except NotFound:
                continue
            tried += 1
            assert exceeds(schedule) == []


def test_nor_with_copies_and_gathers_in_little_memory() -> None:
    tried = late = 0
    for seed in (*range(60), 160, 218, 342):  # the last ones have gathers for parts of the microbatches
        draw = random.Random(seed)
        problem = sided_step(draw, draw.randint(2, 7))
        with suppress(NotFound):
            schedule = list_schedule(problem, deepest_first(problem))
            assert verify(problem, schedule) == ()
            assert exceeds(schedule) == [], seed
            assert max(whole_ones(problem), default=0) <= schedule.timeline().value
            alike = Microbatches.of(problem)
            assert alike is not None
            late += any(prices.skipped.any() for rank in range(problem.ranks) for prices in prices_of(alike, rank))
            tried += 1
    assert min(tried - 25, late) > 3


def test_no_optimum_is_below_the_bound() -> None:
    draw, tried, priced = random.Random(5), 0, 0
    while priced < 12:
        problem = tight_step(draw, draw.randint(1, 3))
        if problem is None or len(problem.passes) > 16 or not (said := whole_ones(problem)):
            continue
        least = optimum(problem)
        if least is not None:
            tried, priced = tried + 1, priced + any(bound > problem.work for bound in said)
            assert max(said) <= least, problem.digest
            assert bound_of_many(problem.head(1), problem.microbatches).value <= least


def whole_ones(problem: Problem) -> list[int]:
    """The bounds from whole microbatches, in all windows, µs."""
    windows = range(problem.ranks) if problem.objective == "span" else ()
    forms = [form for rank in windows for form in closed_forms_within(problem, rank)] or all_closed_forms(problem)
    return [form.value for form in forms if SAID in form.proof]


def one_microbatch(ranks: int, placement: str, capacity: int) -> Problem:
    """F, B, W of 20, 20 and 18 µs, messages of 1 µs; 6 bytes from F on, 2 of them until W."""
    stages = ranks * (2 if placement == "vee" else 1)
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": capacity}
    return pipeline([20] * stages, [20] * stages, [18] * stages, placement=placement, microbatches=1, comm=1, **held)


@pytest.mark.parametrize(
    ("ranks", "placement", "capacity", "rank", "time"),
    [
        # While W runs, three others fit between F and B: (334 + 18) / 4. Bytes times time give (6 · 334 + 2 · 18) / 24.
        (8, "single", 24, 0, 88.0),
        (4, "single", 12, 0, 92.0),
        (64, "single", 192, 0, 84.5),
        (4, "vee", 24, 3, 121.0),
    ],
)
def test_known_steady_states(ranks: int, placement: str, capacity: int, rank: int, time: float) -> None:
    one = one_microbatch(ranks, placement, capacity)
    assert dict(best_prices(one))[rank].time == time
    bound = bound_of_many(one, 8192)
    assert 8192 * time <= bound.value < 8192 * time + 500
    assert SAID in bound.proof


def test_check_proves_it_again_and_no_more() -> None:
    one = one_microbatch(4, "single", 12)
    problem = pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=12, comm=1, held_until_B=4, held_until_W=2, capacity=12)
    bound = max((form for form in all_closed_forms(problem) if form.kind == AREA), key=lambda form: form.value)
    assert SAID in bound.proof
    assert bound_of_many(one, 12).value <= rounded_up(bound, value_unit(problem)).value
    assert recheck(problem, bound, 5.0).value >= bound.value
    assert recheck(problem, replace(bound, value=bound.value + 1), 5.0).value < bound.value + 1


def test_bytes_too_many_for_the_tables_only_lower_the_bound() -> None:
    """A capacity of millions of units is counted in coarser ones."""
    small, large = (
        pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=12, comm=1, held_until_B=b, held_until_W=w, capacity=c)
        for b, w, c in ((4, 2, 13), (4_000_001, 2_000_003, 13_000_007))
    )
    first, second = (max(whole_ones(step)) for step in (small, large))
    assert second <= first
    assert second > max(form.value for form in all_closed_forms(large) if form.kind == AREA and SAID not in form.proof)


def test_there_is_none_without_a_limit_or_where_microbatches_differ() -> None:
    free = pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=4, held_until_W=2)
    uneven = pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=4, held_until_W=2, capacity=4)
    longer = uneven.passes.duration + np.arange(len(uneven.passes)) % 3
    assert _in_whole_microbatches(free) == []
    assert _in_whole_microbatches(replace(uneven, passes=replace(uneven.passes, duration=longer))) == []


@pytest.mark.parametrize(
    ("times", "comm", "held", "capacity", "best"),
    [((20, 15, 25), 15, 2, (4, 4), 360), ((21, 14, 21), 21, 6, (14, 13), 392), ((25, 20, 25), 15, 5, (10, 13), 430)],
)
def test_small_steps_of_a_v_are_proven_where_bytes_alone_say_less(times, comm, held, capacity, best) -> None:
    """By bytes times time they take 343, 375 and 408 µs or more."""
    F, B, W = ([time] * 4 for time in times)
    problem = pipeline(F, B, W, placement="vee", microbatches=2, comm=comm, held_until_B=held, capacity=capacity)
    highest = max(all_closed_forms(problem), key=lambda bound: bound.value)
    assert highest.proof.partition(": ")[2].startswith(SAID)
    assert highest.value == best == optimum(problem)


@pytest.mark.parametrize(
    ("sizes", "capacity", "others", "bound", "best"),
    [
        (None, 7, 58, 78, 78),  # one microbatch at a time: F and its copy, or the copy back, B and W
        ((2, 5), 13, 40, 47, 51),  # so it is once gradients take memory
    ],
)
def test_copies_and_what_is_beside_microbatches_count(sizes, capacity, others, bound, best) -> None:
    step = with_offload(
        pipeline([3], [4], [2], microbatches=4, held_until_B=2, held_until_W=2), *((4, 4) if sizes else (6, 6))
    )
    if sizes is not None:
        step = with_sharding(step, 1, 1, parameter_bytes=sizes[0], gradient_bytes=sizes[1])
    problem = replace(step, capacity=(capacity,))
    forms = all_closed_forms(problem)
    assert max(form.value for form in forms if SAID not in form.proof) == others
    highest = max(forms, key=lambda form: form.value)
    assert (highest.value, SAID in highest.proof) == (bound, True)
    assert exact_streams.optimum(problem) == best
    assert recheck(problem, highest, 5.0).value == bound


def test_what_a_pass_of_no_microbatch_holds_counts_once() -> None:
    """Work beside a step of one microbatch is on the compute stream, too."""
    step = pipeline([3], [4], [2], microbatches=1, held_until_B=1, held_until_W=1, capacity=4)
    problem = with_work(step, Work(rank=0, time=5, pieces=1, before=0, held=2))
    assert max(form.value for form in all_closed_forms(problem)) == exact_streams.optimum(problem) == 14


def test_a_stream_that_ranks_share_is_not_each_ones_only_one() -> None:
    """Rank 0 runs on two streams, rank 1 on the second of these."""
    shared = ("compute:1",)
    passes = [Pass("F", 0, m, 0, 4, 0) for m in range(2)] + [Pass("B", 0, m, 0, 3, 0, shared) for m in range(2)]
    passes += [Pass("F", 1, m, 1, 2, 0, shared) for m in range(2)]
    edges = [Edge(f"0F{m}", f"0B{m}", 0, 1, carries="") for m in range(2)]
    problem = Problem.of(passes, edges, [2, 2])
    assert microbatch_graph(problem) is None
    assert max(form.value for form in all_closed_forms(problem)) <= exact_streams.optimum(problem)


def test_what_fits_nowhere_has_no_price() -> None:
    step = pipeline([2] * 2, [2] * 2, [2] * 2, microbatches=2, held_until_B=4, held_until_W=2, capacity=6)
    alike = Microbatches.of(replace(step, capacity=(1, 1)))
    assert alike is not None
    with np.errstate(all="raise"):
        priced = [prices for rank in range(2) for prices in prices_of(alike, rank)]
    assert all(prices.time <= 6 for prices in priced)  # its work
