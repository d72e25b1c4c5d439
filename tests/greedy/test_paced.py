"""Blocks over all streams: orders that hold where copies and collectives share the ranks with passes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from zbsolve import Profile, Schedule, Step
from zbsolve.build import Vocabulary, with_exchange, with_offload, with_vocabulary
from zbsolve.build.plain import pipeline
from zbsolve.greedy.arrays.microbatch import rank_work
from zbsolve.greedy.blocks.period_search import BEST, PACES, paced_blocks, paced_graph, paced_schedules
from zbsolve.problem import Problem
from zbsolve.verifier import verify


def step(placement: str, capacity: int, stages: int = 8, copy: int = 40) -> Problem:
    """Four ranks, twelve microbatches, a sharded vocabulary, all activations copied away and back, and sums at the end."""
    times = [50] * stages, [55] * stages, [40] * stages
    plain = pipeline(*times, placement=placement, microbatches=12, comm=1, held_until_B=4, held_until_W=6)
    costs = Vocabulary(S=20, T=8, broadcast=3, reduce=3)
    whole = with_offload(with_vocabulary(plain, costs), copy, copy)
    return with_exchange(replace(whole, capacity=(capacity,) * 4), 30, replicas=True)


@pytest.mark.parametrize("placement", ["loop", "vee", "single"])
def test_every_pace_holds_where_memory_is_there(placement: str) -> None:
    problem = step(placement, 60, 4 if placement == "single" else 8)
    tried: list[bool] = []
    found = list(paced_schedules(problem, lambda: inf))
    assert len(found) == BEST + len(PACES)
    for schedule in found:
        tried.append(not verify(problem, schedule))
    assert all(tried)
    values = [one.timeline().value for one in found]
    assert min(values) <= 1.25 * problem.work
    assert values[-1] == max(values)


@pytest.mark.parametrize("placement", ["loop", "vee"])
def test_blocks_are_made_to_fit_where_memory_is_scarce(placement: str) -> None:
    """What the stages of a rank keep of one microbatch is 20."""
    problem = step(placement, 16)
    found = list(paced_schedules(problem, lambda: inf))
    assert not any(verify(problem, one) for one in found[:BEST])
    assert any(verify(problem, one) for one in found[BEST:])  # of a pace, whatever it holds


def test_no_timing_holds_more_than_there_is_room_for() -> None:
    problem, random = step("vee", 16), np.random.default_rng(0)
    p, over = problem.passes, {True: 0, False: 0}
    schedule = next(paced_schedules(problem, lambda: inf))
    for _ in range(10):
        times = np.rint(10 * p.duration * random.choice([0.2, 1.0, 3.0], len(p))).astype(np.int64)
        other = replace(problem, passes=replace(p, duration=times))
        for kept in over:
            timeline = Schedule(other, schedule.order, schedule.syncs if kept else ()).timeline()
            over[kept] += bool(np.greater((*timeline.peak_bytes, *timeline.pool_peaks), problem.room).any())
    assert over[True] == 0
    assert over[False] > 0


def test_nothing_comes_that_is_too_long_at_its_pace() -> None:
    problem = step("loop", 60)
    assert not list(paced_schedules(problem, lambda: 0.8 * problem.work))


def test_sums_come_behind_the_collectives_that_they_wait_for() -> None:
    """Slices bring several collectives of a microbatch to one moment: a sum between them waited for those behind it."""
    profile = Profile.load("benchmarks/profiles/estimated-llama3-8b-h100.json")
    how = {"replicas": 4, "vocabulary": "sharded", "slices": 4, "offload": "half", "memory": "46GiB"}
    problem = Step(4, 4, "single", **how).problem(profile)
    wrong = [verify(problem, one) for one in paced_schedules(problem, lambda: inf)]
    assert {one.rule for each in wrong for one in each} <= {"memory"}
    assert sum(not each for each in wrong) >= 4


def test_no_stream_is_busy_twice_in_a_period() -> None:
    problem = step("loop", 60)
    g = paced_graph(problem)
    assert g is not None
    assert len(g.passes) * 12 == int(problem.in_microbatch.sum())
    assert rank_work(g).max() >= problem.work // 12
    for one in paced_blocks(g, PACES[:8]):
        for rank in np.unique(g.rank):
            mine = np.flatnonzero((g.rank == rank) & (g.duration > 0))
            begin = np.sort(one.offset[mine] % one.period)
            order = mine[np.argsort(one.offset[mine] % one.period)]
            gaps = np.diff(np.append(begin, begin[0] + one.period))
            assert (gaps >= g.duration[order]).all()


def test_microbatches_that_differ_have_no_block() -> None:
    problem = step("loop", 60)
    longer = problem.passes.duration.copy()
    longer[problem.rows("F")[0]] += 5
    assert not list(paced_schedules(replace(problem, passes=replace(problem.passes, duration=longer)), lambda: inf))
