"""The named schedules of sequence slices: bubbles and memory of the papers, and `solve` in the same memory."""

from __future__ import annotations

import pytest

from zbsolve import BadInput, pipeline, solve, verify
from zbsolve.build import with_slices
from zbsolve.systems import PRESETS, preset, presets_of, problem_for

NAMES = ("slimpipe", "terapipe")


@pytest.mark.parametrize(("p", "m", "n"), [(2, 1, 2), (4, 3, 4), (4, 2, 8), (8, 2, 32), (5, 3, 3)])
def test_bubble_and_slices_held(p: int, m: int, n: int) -> None:
    """SlimPipe: bubble (p − 1)/(mn + p − 1), rank r holds n + p − r − 1 slices, where there are as many. TeraPipe: all."""
    for name in NAMES:
        problem = problem_for(name, p, m, 100, 120, 80, slices=n, held_until_W=1)
        schedule = preset(name, problem)
        timeline = schedule.timeline()
        assert verify(problem, schedule) == ()
        assert timeline.bubble_rate == pytest.approx((p - 1) / (m * n + p - 1))
        most = (m * n,) * p if name == "terapipe" else tuple(min(n + p - r - 1, m * n) for r in range(p))
        assert timeline.peak_bytes == most


def test_memory_of_a_rank_falls_from_p_microbatches_to_about_one() -> None:
    """SlimPipe's accumulated activations, M/p·(1 + (p − 1)/n), beside 1F1B's M = p microbatches of a rank's share."""
    p, m, whole = 8, 8, 96
    usual = preset("1f1b", pipeline([96] * p, BW=[192] * p, microbatches=2 * p, held_until_B=whole))
    assert max(usual.timeline().peak_bytes) == p * whole
    for n in (2, 4, 8, 16, 32):
        problem = problem_for("slimpipe", p, m, 96 // n, 96 // n, 96 // n, slices=n, held_until_W=whole // n)
        assert max(preset("slimpipe", problem).timeline().peak_bytes) == whole * (1 + (p - 1) / n)


@pytest.mark.parametrize("split", [False, True])
def test_solve_is_not_worse_in_the_same_memory(split: bool) -> None:
    rows = [[10, 12, 14, 16]] * 4
    backward = {"B": rows, "W": [9] * 4} if split else {"BW": [[19, 21, 23, 25]] * 4}
    step = {"microbatches": 3, "slices": 4, "held_until_B": 1, "held_keys": 1}
    usual = preset("slimpipe", pipeline(rows, **backward, **step))
    problem = pipeline(rows, **backward, **step, capacity=usual.timeline().peak_bytes)
    found = solve(problem, effort=0.3)
    assert found.certificate.bound <= found.certificate.value <= usual.timeline().makespan


def test_other_orders_say_that_they_know_no_slices() -> None:
    problem = with_slices(pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=8), 2)
    assert {name for name, _ in presets_of(problem)} == set(NAMES)
    for name in set(PRESETS) - set(NAMES):
        with pytest.raises(BadInput):
            preset(name, problem)
    with pytest.raises(BadInput, match="slimpipe: the step has no slices"):
        preset("slimpipe", pipeline([1] * 4, [1] * 4, microbatches=8))
    with pytest.raises(BadInput, match=r"placement single only; for vee there are no named ones"):
        preset("slimpipe", pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=2, slices=2, placement="vee"))
