"""Measured against predicted: where the difference comes from adds up, on runs made by perturbing a prediction."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zbsolve import BadInput, Schedule, Timeline
from zbsolve.show.comparison import Parts, compare, comparison_as_text

from ..support.runs import one_f_one_b, random_run, run_of, trace_of


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("whole", [True, False])
def test_every_rank_adds_up_exactly(objective: str, seed: int, whole: bool) -> None:
    schedule = one_f_one_b(4, 6, objective)
    result = compare(schedule, trace_of(schedule, *(random_run(schedule, 10 * seed + i, whole) for i in range(4))))
    assert len(result.ranks) == 4
    for one in result.ranks:
        assert one.predicted.total == result.predicted == schedule.timeline().value
        assert one.measured.total == result.measured
        assert one.difference.total == result.difference
        assert min(one.measured.waiting, one.measured.launch, one.measured.before, one.measured.after) >= 0
        assert one.predicted.launch == 0


def test_parts_name_their_cause() -> None:
    schedule = one_f_one_b(3, 4)
    passes, random = schedule.problem.passes, np.random.default_rng(1)
    longer, launch = random.integers(0, 6, len(passes)), random.integers(0, 4, len(passes))
    result = compare(schedule, trace_of(schedule, run_of(schedule, longer, launch)))
    for rank in range(3):
        mine, parts = passes.rank == rank, result.ranks[rank].difference
        for kind, k in (("F", 0), ("B", 1), ("W", 2)):
            assert parts.passes[kind] == longer[mine & (passes.kind == k)].sum()
        first = schedule.problem.index[f"{rank}F0"]  # the first launch lies before the rank's first pass
        assert parts.launch == launch[mine].sum() - launch[first]


def test_an_undisturbed_run_has_no_difference() -> None:
    schedule = one_f_one_b(3, 4)
    nothing = np.zeros(len(schedule.problem.passes))
    result = compare(schedule, trace_of(schedule, run_of(schedule, nothing, nothing, 55.0)))
    assert result.difference == 0
    assert all(one.difference == Parts({"F": 0, "B": 0, "W": 0}, 0, 0, 0, 0) for one in result.ranks)


def test_overlaps_and_unknown_ready_times_still_add_up() -> None:
    schedule = one_f_one_b(2, 3)
    step, ready = random_run(schedule, 3)
    early = Timeline(schedule.problem, step.start - 4.0, step.end)  # every pass begins inside the one before
    result = compare(schedule, trace_of(schedule, (early, np.full_like(ready, np.nan))))
    assert all(one.difference.total == result.difference for one in result.ranks)


def test_the_step_time_is_rounded_once() -> None:
    """Not its start and its end one by one, which move the step by up to a µs."""
    schedule = one_f_one_b(2, 3)
    step, ready = run_of(schedule, *[np.zeros(len(schedule.problem.passes))] * 2)
    shifted = Timeline(schedule.problem, step.start + 0.4, step.end + np.where(step.end == step.end.max(), 0.6, 0.4))
    result = compare(schedule, trace_of(schedule, (shifted, ready + 0.4)))
    assert result.measured == round(shifted.value) == step.value
    assert all(rank.measured.total == result.measured for rank in result.ranks)


def test_the_median_step_is_a_real_one() -> None:
    schedule = one_f_one_b(2, 3)
    nothing = np.zeros(len(schedule.problem.passes))
    steps = [run_of(schedule, nothing + extra, nothing) for extra in (5, 1, 9, 3)]
    result = compare(schedule, trace_of(schedule, *steps))
    assert result.median_step == 3
    assert result.measured == result.steps[3] == sorted(result.steps)[1]


def test_speed_up_over_a_baseline() -> None:
    ours, base = one_f_one_b(2, 4), one_f_one_b(2, 4, comm=30)
    nothing = np.zeros(len(ours.problem.passes))
    trace, run = trace_of(ours, run_of(ours, nothing + 1, nothing)), trace_of(base, run_of(base, nothing + 2, nothing))
    result = compare(ours, trace, (base, run))
    assert result.speedup is not None
    assert result.speedup.predicted == base.timeline().value / ours.timeline().value
    assert result.speedup.measured == run.steps[0].value / trace.steps[0].value
    assert "speed-up over the baseline" in comparison_as_text(result)


def test_other_work_is_no_baseline() -> None:
    ours, base = one_f_one_b(2, 4), one_f_one_b(2, 5)
    with pytest.raises(BadInput, match="baseline: a step of 5 microbatches, not 4"):
        compare(ours, trace_of(ours, random_run(ours, 0)), (base, trace_of(base, random_run(base, 0))))
    ours, base = one_f_one_b(2, 4, layers=(2, 2)), one_f_one_b(2, 4, layers=(3, 3))
    with pytest.raises(BadInput, match="baseline: a model of 6 layers, not 4"):
        compare(ours, trace_of(ours, random_run(ours, 0)), (base, trace_of(base, random_run(base, 0))))


def test_a_trace_of_another_problem_or_order_is_refused() -> None:
    schedule, other = one_f_one_b(2, 3), one_f_one_b(2, 3, comm=4)
    with pytest.raises(BadInput, match=f"a run of problem {other.problem.digest}, but .* {schedule.problem.digest}"):
        compare(schedule, trace_of(other, random_run(other, 0)))
    order = dict(schedule.order)
    order["compute:1"] = (*order["compute:1"][:-2], *order["compute:1"][:-3:-1])
    swapped = Schedule(schedule.problem, order)
    with pytest.raises(BadInput, match=r"compute:1 ran .* at place 7, not") as error:
        compare(schedule, trace_of(swapped, random_run(schedule, 0)))
    assert "\n" not in str(error.value)


def test_json_and_table() -> None:
    schedule = one_f_one_b(3, 4)
    result = compare(schedule, trace_of(schedule, random_run(schedule, 0), random_run(schedule, 1)))
    body = json.loads(json.dumps(result.to_json()))
    assert body["difference"] == body["measured"] - body["predicted"]
    for row in body["ranks"]:
        parts = dict(row["difference"])
        assert sum(parts.pop("passes").values()) + sum(parts.values()) == body["difference"]
    text = comparison_as_text(result)
    assert f"* {result.limiting}" in text
    assert all(len(line) <= 120 for line in text.splitlines())
