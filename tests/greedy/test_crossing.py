"""Schedules joined from parts of others: what was lost in a part of one comes from another, or from another part of it."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import verify
from zbsolve.greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from zbsolve.greedy.decoding import Decoded, DecodeRule, decode, to_schedule
from zbsolve.greedy.orders import crossing
from zbsolve.greedy.orders.crossing import joined
from zbsolve.problem import Problem
from zbsolve.systems import preset

from ..support.problems import uniform

AS_ORDERED = DecodeRule(0, 0, 1)


def graph_of(problem: Problem) -> MicrobatchGraph:
    g = microbatch_graph(problem)
    assert g is not None
    return g


def delayed(g: MicrobatchGraph, plain: Decoded, first: int, last: int) -> Decoded:
    """A schedule whose first stage runs the forwards first:last late."""
    target = plain.start.copy()
    target[0, first:last] += 100
    late = decode(g, target, AS_ORDERED)
    assert late is not None
    return late


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, MicrobatchGraph, Decoded]:
    """A step, and its schedule by ZB-H1. Decoding keeps orders as they are, so it does not repair what is late by itself."""
    monkeypatch.setattr(crossing, "RULE", AS_ORDERED)
    problem = uniform("single", 3, 16, (30, 40, 20))
    g = graph_of(problem)
    plain = decode(g, preset("zb-h1", problem).timeline().start[g.passes], AS_ORDERED)
    assert plain is not None
    return problem, g, plain


def test_the_begin_of_one_goes_with_the_end_of_another(step: tuple[Problem, MicrobatchGraph, Decoded]) -> None:
    problem, g, plain = step
    begin, end = delayed(g, plain, 11, 12), delayed(g, plain, 4, 5)
    shorter = min(begin.value, end.value)
    found = joined(g, [begin.start, end.start], np.random.default_rng(0), 100)
    assert plain.value <= found[0].value < shorter
    for one in found:
        assert verify(problem, to_schedule(problem, g, one.order)) == ()


def test_a_short_round_takes_the_place_of_a_long_one(step: tuple[Problem, MicrobatchGraph, Decoded]) -> None:
    problem, g, plain = step
    late = delayed(g, plain, 8, 9)
    found = joined(g, [late.start], np.random.default_rng(0), 100)
    assert found[0].value < late.value
    assert verify(problem, to_schedule(problem, g, found[0].order)) == ()


def test_a_step_of_one_microbatch_has_nothing_to_join() -> None:
    problem = uniform("single", 2, 1)
    g = graph_of(problem)
    start = preset("1f1b", problem).timeline().start[g.passes]
    assert all(one.value >= problem.work for one in joined(g, [start], np.random.default_rng(0), 10))
    assert joined(g, [], np.random.default_rng(0), 10) == []
