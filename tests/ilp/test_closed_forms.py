"""Closed forms come as they are found, the most promising first, and large bytes only lower them."""

from __future__ import annotations

import dataclasses
from itertools import islice
from weakref import WeakKeyDictionary

import pytest

from zbsolve import Infeasible
from zbsolve.ilp.bounds import closed_forms
from zbsolve.ilp.bounds.bound import AREA
from zbsolve.ilp.bounds.closed_forms import all_closed_forms, closed_form, each_closed_form
from zbsolve.problem import Problem
from zbsolve.search.certify import work_bound
from zbsolve.search.solver import solve
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from ..support.exact import optimum
from ..support.problems import random_problem, uniform


def windows_walked(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks whose windows are looked at, as that happens, with no closed form known yet."""
    seen: list[int] = []
    walk = closed_forms.heads_and_tails

    def counted(problem: Problem, rank: int) -> object:
        seen.append(rank)
        return walk(problem, rank)

    monkeypatch.setattr(closed_forms, "heads_and_tails", counted)
    monkeypatch.setattr(closed_forms, "_known", WeakKeyDictionary())
    return seen


def test_windows_of_outer_ranks_come_first_and_each_costs_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform("single", 12, 24, (10, 10, 9), 12, "span")
    best = closed_form(problem).value  # of all windows
    seen = windows_walked(problem, monkeypatch)
    found = next(bound for bound in each_closed_form(problem) if bound.value == best)
    assert (found.ranks, seen) == ((0,), [0])
    list(each_closed_form(problem))
    assert seen[1:] == [0, 11, *range(1, 11)]


def test_a_search_looks_at_no_more_windows_once_its_value_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform("single", 4, 8, capacity=4, objective="span")
    known = solve(problem, effort=0.1)
    assert known.certificate is not None
    assert known.certificate.status == "optimal"
    state = State(problem, Clock(60.0), work_bound(problem))
    state.offer(known, "known")
    seen = windows_walked(problem, monkeypatch)
    state.raise_closed_forms()
    assert state.settled
    assert seen == [0]


def with_odd_bytes(problem: Problem, factor: int) -> Problem:
    """`factor` times the bytes, and one more of each edge that has some; so much room that the same edges fit together."""
    assert problem.capacity is not None
    edges = dataclasses.replace(problem.edges, bytes=problem.edges.bytes * factor + (problem.edges.bytes > 0))
    room = tuple(capacity * factor + len(edges) for capacity in problem.capacity)
    return dataclasses.replace(problem, edges=edges, capacity=room)


def test_energy_of_bytes_whose_sums_no_float_holds_is_no_higher_and_hardly_lower() -> None:
    """Bytes near 2**44 without a common divisor: sums of byte·µs are beyond 2**53, so the bytes are made coarser."""
    energies = 0
    for seed in range(60):
        try:
            problem = dataclasses.replace(random_problem(seed, 3, 4), objective=("span", "makespan")[seed % 2])
        except Infeasible:
            continue
        if problem.capacity is None or len(problem.passes) > 18:
            continue
        plain, odd = (
            {(b.kind, b.ranks): b.value for b in all_closed_forms(one) if b.kind == AREA}
            for one in (problem, with_odd_bytes(problem, 1 << 44))
        )
        assert all(odd[key] <= plain[key] and odd[key] >= 0.99 * plain[key] - 1 for key in plain if key in odd)
        assert max(odd.values(), default=0) <= (optimum(problem) or 0)
        energies += len(odd)
    assert energies > 10


def test_the_first_closed_form_needs_no_window_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform("vee", 6, 12, (3, 4, 2), 6, "span")
    seen = windows_walked(problem, monkeypatch)
    assert len(list(islice(each_closed_form(problem), 3))) == 3
    assert seen == [0]
