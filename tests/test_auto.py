"""Placement `auto`: the best of several, and what became of the others."""

from __future__ import annotations

import pytest

from zbsolve import BadInput, Infeasible, Layer, Link, Profile, verify
from zbsolve.auto import ranks_of, solve_auto


def layered(count: int = 8, parameter_bytes: int = 0) -> Profile:
    layers = tuple(Layer(f"layer{i}", 10, 12, 8, 20, 100, 50, parameter_bytes, 0) for i in range(count))
    return Profile("estimated: by hand", "toy", layers, Link(0.0, 1000.0), 4.0, None, {}, {})


def test_the_best_placement_wins_and_the_others_say_why():
    schedule, tried = solve_auto(layered(), 2, 4, effort=0.5)
    assert [one.placement for one in tried] == ["single", "loop", "loop4", "vee"]
    winner = next(one for one in tried if not one.why)
    certificate = schedule.certificate
    assert certificate is not None
    assert verify(schedule.problem, schedule) == ()
    assert winner.value == certificate.value == min(one.value for one in tried if one.value is not None)
    assert all(("longer than" in one.why or "equals" in one.why) == (one is not winner) for one in tried)


def test_effort_gives_the_same_bytes():
    first, second = (solve_auto(layered(), 2, 3, effort=0.3, seed=4) for _ in range(2))
    assert first[0].to_json() == second[0].to_json()
    assert first[1] == second[1]


def test_too_few_layers_and_too_little_memory_are_told():
    _, tried = solve_auto(layered(4), 2, 2, effort=0.1)
    assert next(one for one in tried if one.placement == "loop4").why == "partition: 4 layers do not make 8 stages"
    uneven = layered(4, 1000)  # single: 2 layers of 4000 bytes a rank
    with pytest.raises(Infeasible, match=r"no placement fits: .*rank 0 needs .* \(single, loop, vee\)"):
        solve_auto(uneven, 2, 2, memory=7_000)
    with pytest.raises(BadInput, match="4 layers do not make 5 stages"):
        solve_auto(layered(4), 5, 2)
    with pytest.raises(BadInput, match="seconds"):
        solve_auto(layered(4), 2, 2, seconds=0)


def test_a_hint_starts_the_placement_that_it_was_made_for():
    earlier, _ = solve_auto(layered(), 2, 4, effort=0.2)
    again, _ = solve_auto(layered(), 2, 4, effort=0.1, hint=earlier)
    assert earlier.certificate is not None
    assert again.certificate is not None
    assert again.certificate.value <= earlier.certificate.value
    assert ranks_of(earlier.problem)[:2] == (0, 1)


def test_an_interrupted_race_returns_what_it_has():
    _, tried = solve_auto(layered(), 2, 3, effort=0.2, stop=lambda: True)
    assert tried[0].value is not None
    assert tried[1].why == "not tried: interrupted"
