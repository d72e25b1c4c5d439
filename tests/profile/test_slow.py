"""What is slow in a run and what it costs: by hand, and in production traces whose makers say what was slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Problem, Schedule, Timeline, Trace, pipeline, preset, updates
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.profile.measured_run import FROM_STEPS, LINKS
from zbsolve.profile.slow import problem_now, slow_parts

from ..support.house import ROOT

TRACES = ROOT / "tests" / "data" / "traces"


def ran(schedule: Schedule, real: Problem, steps: int = 3) -> Trace:
    """A run of the schedule where passes and messages take what `real` says."""
    problem = schedule.problem
    step = Schedule(real, schedule.order).timeline()
    ready = np.zeros(len(real.passes))
    e = real.edges
    np.maximum.at(ready, e.after, step.end[e.before] + e.lag)
    timelines = tuple(Timeline(problem, step.start, step.end) for _ in range(steps))
    return Trace(problem, dict(schedule.order), timelines, (ready,) * steps, (0.0,) * steps, ((0,) * 4,) * steps, {})


def one_f_one_b(F: list[int], BW: list[int], comm: int = 10) -> Schedule:
    return preset("1f1b", pipeline(F, BW=BW, microbatches=8, comm=comm))


def test_a_slow_rank_and_its_cost() -> None:
    """1F1B of 4 ranks and 8 microbatches, F 100 and BW 200: 11 · 300 and 6 messages. Rank 3 takes 1.5 times as long: each
    of its 8 rounds takes 150 more, and nothing else."""
    schedule = one_f_one_b([100] * 4, [200] * 4, comm=0)
    real = one_f_one_b([100, 100, 100, 150], [200, 200, 200, 300], comm=0).problem
    (found,) = slow_parts(ran(schedule, real))
    assert (found.what, found.replica) == ("rank 3", "")
    assert found.times == pytest.approx(1.5)
    assert (found.step, found.cost) == (3300 + 8 * 150, 8 * 150)
    assert str(found) == (
        "slow: rank 3: takes 1.50 times the median of the others; the step is 1,200 µs (26.7%) shorter without"
    )
    assert problem_now(ran(schedule, real)).passes.duration.tolist() == real.passes.duration.tolist()
    unlike = one_f_one_b([100, 110, 100, 150], [200, 220, 200, 300], comm=0)
    own = replace(ran(unlike, unlike.problem), facts={LINKS: FROM_STEPS})  # ranks are compared with each other
    assert [(found.what, found.times) for found in slow_parts(own)] == [
        ("rank 3", pytest.approx(1.5)),
        ("rank 1", pytest.approx(1.1)),
    ]


def test_updates_do_not_count_as_slow() -> None:
    """Rank 1 takes 1.5 times as long, its updates as planned: without, the step takes what was planned."""
    schedule, real = (
        preset("pipedream", updates(pipeline([100, 100], BW=[200, last], microbatches=8), 500, every=1, delay=[2, 1]))
        for last in (200, 350)
    )
    (found,) = slow_parts(ran(schedule, real.problem))
    assert (found.what, found.times) == ("rank 1", pytest.approx(1.5))
    assert found.cost == found.step - schedule.timeline().makespan > 0


def test_a_stage_that_was_planned_longer_is_not_slow() -> None:
    schedule = one_f_one_b([100, 100, 100, 150], [200, 200, 200, 300])
    assert slow_parts(ran(schedule, schedule.problem)) == ()


def test_a_slow_link_and_its_cost() -> None:
    """Messages 1 → 2 take 90 in place of 10. The last forward of warm-up and the last backward pass it once each way; each
    of what 1F1B's steady rounds wait for is in the timeline of both."""
    schedule = one_f_one_b([100] * 4, [200] * 4)
    edges, rank = schedule.problem.edges, schedule.problem.passes.rank
    slow = (rank[edges.before] == 1) & (rank[edges.after] == 2)
    real = replace(schedule.problem, edges=replace(edges, lag=np.where(slow, 90, edges.lag)))
    (found,) = slow_parts(ran(schedule, real))
    assert found.what == "link 1 → 2"
    assert found.times == pytest.approx(9)
    cost = Schedule(real, schedule.order).timeline().makespan - schedule.timeline().makespan
    assert found.cost == cost > 80
    assert (problem_now(ran(schedule, real)).edges.lag == real.edges.lag).all()


def test_a_long_microbatch_and_its_cost() -> None:
    schedule = one_f_one_b([100] * 4, [200] * 4, comm=0)
    real = schedule.problem.scaled((1, 1, 1, 2, 1, 1, 1, 1), 0)
    (found,) = slow_parts(ran(schedule, real))
    assert (found.what, found.times) == ("microbatch 3", pytest.approx(2))
    assert found.cost == Schedule(real, schedule.order).timeline().makespan - schedule.timeline().makespan > 0


def test_the_last_stage_of_st() -> None:
    """StragglerAnalysis (arXiv 2505.05713) says of its example ST that the last stage is too long."""
    pytest.importorskip("pyarrow")
    (last,) = slow_parts(read_trace(TRACES / "bytedance-ST.parquet"))
    assert (last.what, last.replica) == ("rank 3", "")


def test_the_last_stage_of_primus() -> None:
    """Its head makes the last stage longer; balancing all stages would save 152 ms (docs/notes/what-if.md)."""
    (last,) = slow_parts(read_trace(TRACES / "primus-pp8"))
    assert last.what == "rank 7"
    assert last.cost / 1000 == pytest.approx(152, rel=0.1)
