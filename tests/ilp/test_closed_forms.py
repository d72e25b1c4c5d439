"""Closed forms come as they are found, the most promising first, and large bytes only lower them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from zbsolve import Infeasible
from zbsolve.ilp.bounds import closed_forms
from zbsolve.ilp.bounds.bound import AREA, Bound
from zbsolve.ilp.bounds.closed_forms import all_closed_forms, closed_form, closed_forms_within, each_closed_form
from zbsolve.ilp.bounds.energy import paths_within
from zbsolve.ilp.bounds.necessary_arcs import WHOLE_STEP, necessary_arcs_of
from zbsolve.problem import Problem
from zbsolve.search.certify import work_bound
from zbsolve.search.solver import solve
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from ..support.exact import optimum
from ..support.problems import random_offloaded, random_problem, random_sharded, uneven_microbatches, uniform


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


def of_all_windows(problem: Problem) -> list[Bound]:
    """The closed forms of the span in each rank's window."""
    return [bound for rank in range(problem.ranks) for bound in closed_forms_within(problem, rank)]


def every_closed_form(problem: Problem) -> list[Bound]:
    """The closed forms, of the span those of all windows."""
    return of_all_windows(problem) if problem.objective == "span" else list(all_closed_forms(problem))


def random_spans(count: int, ranks: int, microbatches: int) -> Iterator[Problem]:
    """Random problems of the span, some with microbatches that differ, with copies or with shards."""
    makers = (
        random_problem,
        lambda seed, ranks, microbatches: uneven_microbatches(seed, min(4, ranks), microbatches),
        lambda seed, ranks, microbatches: random_offloaded(seed, min(3, ranks), min(4, microbatches)),
        lambda seed, ranks, microbatches: random_sharded(seed, min(3, ranks), min(4, microbatches)),
    )
    for seed in range(count):
        with suppress(Infeasible):
            yield dataclasses.replace(makers[seed % 4](seed, ranks, microbatches), objective="span")


def test_windows_of_a_plain_step_but_the_first_cannot_give_more(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform("single", 12, 24, (10, 10, 9), 12, "span")
    best = max(bound.value for bound in of_all_windows(problem))
    seen = windows_walked(problem, monkeypatch)
    found = next(bound for bound in each_closed_form(problem) if bound.value == best)
    assert (found.ranks, seen) == ((0,), [0])
    assert closed_form(problem).value == best
    assert set(seen) == {0, WHOLE_STEP}  # the whole step says what other windows reach at most


@pytest.mark.slow
def test_windows_left_out_give_no_more() -> None:
    """The best closed form is the best of all windows, of which most are left out."""
    looked, windows = 0, 0
    for problem in random_spans(160, 7, 9):
        best = max(bound.value for bound in (Bound(0, ""), *of_all_windows(problem)))
        assert closed_form(problem).value == best
        looked += len({bound.ranks[0] for bound in all_closed_forms(problem) if bound.ranks})
        windows += problem.ranks
    assert 0.2 * windows < looked < 0.8 * windows


def test_no_closed_form_in_any_window_is_above_the_optimum() -> None:
    tight = 0
    for problem in random_spans(240, 3, 3):
        best = optimum(problem) if len(problem.passes) <= 16 and not len(problem.side_stream) else None
        if best is not None:
            values = [bound.value for bound in of_all_windows(problem)]
            assert max(values) <= best
            tight += max(values) == best
    assert tight > 30


def test_paths_within_a_microbatch_are_the_longest() -> None:
    """Against all paths from each pass, however many pairs it has and where they end."""
    for problem in random_spans(120, 4, 4):
        arcs, duration, microbatch = necessary_arcs_of(problem), problem.passes.duration, problem.passes.microbatch
        inside = np.argwhere(microbatch[:, None] == microbatch).T
        drawn = np.random.default_rng(len(duration)).permutation(inside.shape[1])[: 3 * len(duration)]
        before, after = inside[:, drawn]
        found = paths_within(problem, before, after)
        for source in np.unique(before).tolist():
            longest = {source: 0}  # to the start of each pass
            for i in arcs.order.tolist():
                for e in range(arcs.out_first[i], arcs.out_first[i + 1]) if i in longest else ():
                    j = int(arcs.out_pass[e])
                    if microbatch[j] == microbatch[source]:
                        longest[j] = max(longest.get(j, 0), longest[i] + int(duration[i] + arcs.out_lag[e]))
            for k in np.flatnonzero(before == source).tolist():
                end = int(after[k])
                assert found[k] == longest[end] + duration[end] if end in longest else found[k] < 0


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
            {(b.kind, b.ranks): b.value for b in every_closed_form(one) if b.kind == AREA}
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
