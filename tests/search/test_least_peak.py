"""Of schedules with one value, the one that needs least memory: against exhaustive search, and at no cost of the value."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from zbsolve import BadInput, Problem, pipeline, solve, verify
from zbsolve.bench.suites import suite
from zbsolve.search import least_peak as module
from zbsolve.search.least_peak import LeastPeak
from zbsolve.search.state import fullness

from ..support.exhaustive import optimum

HELD = {"held_until_B": 2, "held_until_W": 1}
TINY = {
    "split": pipeline([3, 4], [5, 6], [2, 1], microbatches=3, **HELD),
    "fused": pipeline([3, 3, 3], BW=[5, 5, 5], microbatches=3, **HELD),
    "vee": pipeline([3] * 4, BW=[4] * 4, placement="vee", microbatches=2, **HELD),
    "slow messages": pipeline([3, 3], [4, 4], [3, 3], comm=6, microbatches=3, **HELD),
    "limited": pipeline([3, 4], [5, 6], [2, 1], microbatches=3, capacity=[9, 8], **HELD),
    "span": pipeline([3, 4], BW=[5, 6], microbatches=3, objective="span", **HELD),
}


def least_capacity(problem: Problem, value: int) -> int:
    """The least memory, the same of every rank, in which exhaustive search has a schedule of this value."""
    most = max(problem.capacity or (9 * problem.microbatches,))
    fits = [c for c in range(3, most + 1) if _value(problem, c) <= value]
    return min(fits)


def _value(problem: Problem, room: int) -> float:
    most = problem.capacity or (room,) * problem.ranks
    found = optimum(replace(problem, capacity=tuple(min(room, one) for one in most)))
    return float("inf") if found is None else found


@pytest.mark.parametrize("name", [name for name in TINY if name != "limited"])
def test_the_least_peak_is_that_of_exhaustive_search(name: str) -> None:
    problem, seen = TINY[name], list[LeastPeak]()
    found = solve(problem, effort=2.0, peaks=seen.append)
    assert found.certificate is not None
    least = least_capacity(problem, found.certificate.value)
    assert found.certificate.value == optimum(problem)
    assert max(found.timeline().peak_bytes) == least
    assert seen[-1].floor <= least
    assert seen[-1].proven == (seen[-1].floor == least)
    assert verify(problem, found) == ()


def test_where_capacities_differ_shares_of_them_count() -> None:
    problem = TINY["limited"]
    found = solve(problem, effort=1.0)
    assert fullness(found) == max(
        Fraction(peak, room) for peak, room in zip(found.timeline().peak_bytes, (9, 8), strict=True)
    )
    assert fullness(found) <= fullness(solve(problem, effort=1.0, prefer=None))


@pytest.mark.parametrize("name", ["unit single p4 m8 2p", "vocabulary single p4 m12", "fused loop p4 m8"])
def test_less_memory_costs_neither_value_nor_bound(name: str) -> None:
    """And is the same schedule each time."""
    problem = suite("small")[name]
    plain, lean, again = solve(problem, effort=0.3, prefer=None), solve(problem, effort=0.3), solve(problem, effort=0.3)
    assert plain.certificate is not None
    assert lean.certificate is not None
    assert (lean.certificate.value, lean.certificate.bound) == (plain.certificate.value, plain.certificate.bound)
    assert fullness(lean) <= fullness(plain)
    assert lean.order == again.order


def test_the_peak_of_the_zero_bubble_schedule_halves() -> None:
    """ZB-H2 (arXiv 2401.10241) has the optimal value of this problem at 2p − 1 = 7 microbatches held; four are enough."""
    problem = suite("small")["unit single p4 m8 2p"]
    one = 10_000
    assert max(solve(problem, effort=0.3, prefer=None).timeline().peak_bytes) > 7 * one
    assert max(solve(problem, effort=0.3).timeline().peak_bytes) == 4 * one


def test_with_memory_preferred_a_percent_of_the_value_may_go() -> None:
    problem, seen = pipeline([10] * 4, [11] * 4, [9] * 4, microbatches=24, held_until_B=2, held_until_W=2), list[LeastPeak]()
    quick, small = solve(problem, effort=0.5), solve(problem, effort=1.0, prefer="memory", peaks=seen.append)
    assert quick.certificate is not None
    assert small.certificate is not None
    value = int(seen[-1].before.timeline().value)
    assert small.certificate.value <= seen[-1].enough == int(1.01 * value)
    assert fullness(small) < fullness(quick)
    assert small.certificate.bound <= quick.certificate.value
    assert small.certificate.value == int(small.timeline().value)


def test_large_problems_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, seen = TINY["split"], list[LeastPeak]()
    monkeypatch.setattr(module, "LARGE_PASSES", 10)
    solve(problem, effort=0.2, peaks=seen.append)
    assert [one.schedule is one.before for one in seen] == [True]


def test_a_preference_that_there_is_not() -> None:
    with pytest.raises(BadInput, match="prefer 'speed': one of time, memory"):
        solve(TINY["split"], effort=0.1, prefer="speed")
    with pytest.raises(BadInput, match="prefer 'memory': it is for method auto, not for greedy"):
        solve(TINY["split"], effort=0.1, prefer="memory", method="greedy")
