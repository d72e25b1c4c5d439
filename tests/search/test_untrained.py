"""Searches over splits where some have stages that train nothing: one's schedule is a start for the other all the same."""

from __future__ import annotations

from zbsolve import Profile, Step, solve, solve_auto
from zbsolve.build.untrained import untrained_stages
from zbsolve.partition.layer import Layer, Link


def test_splits_of_unlike_fronts_are_searched_together() -> None:
    """Four frozen layers before four that are trained: two stages are best with five in front, which needs a message back
    of 5 ms, or four, which does not."""
    tower = [Layer(f"tower{i}", 1000, 0, 0, 0, 0, 0, 8, 0, message=5000.0, frozen_bytes=8) for i in range(4)]
    rest = [Layer(f"lm{i}", 1000, 1000, 1000, 2000, 0, 0, 0, 0) for i in range(4)]
    profile = Profile("given", "tower", (*tower, *rest), Link(0.0, 1e12), 0.0, None, {}, {})
    best, tried = solve_auto(profile, Step(2, 8, "auto", "auto"), effort=2.0)
    splits = [step.problem(profile) for step in (Step(2, 8, "single", (4, 4)), Step(2, 8, "single", (5, 3)))]
    assert [untrained_stages(problem) for problem in splits] == [1, 0]
    assert all(one.value is not None or one.why for one in tried)
    assert best.certificate is not None
    assert best.certificate.value == min(one.value for one in tried if one.value is not None)


def test_given_times_alone_say_that_a_front_trains_nothing() -> None:
    """Megatron #5833, by hand: 4 ms of F, a message of 5 ms, then 8 microbatches of 12 ms on rank 1; no message back."""
    tower = [Layer(f"tower{i}", 1000, 0, 0, 0, 0, 0, 0, 0, message=5000.0) for i in range(4)]
    rest = [Layer(f"lm{i}", 1000, 1000, 1000, 2000, 0, 0, 0, 0) for i in range(4)]
    profile = Profile("given", "tower", (*tower, *rest), Link(0.0, 1e12), 0.0, None, {}, {})
    certificate = solve(Step(2, 8, "single", (4, 4), fused=True).problem(profile)).certificate
    assert certificate is not None
    assert certificate.value == certificate.bound == 105_000
