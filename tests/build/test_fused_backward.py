"""A step that mixes fused and split backwards: by hand, against the plain steps, and against exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import BadInput, pipeline, solve, verify
from zbsolve.build import with_fused_backward
from zbsolve.ilp.bounds.closed_forms import all_closed_forms

from ..support.exhaustive import optimum


def split(microbatches: int = 2, **options):
    return pipeline([2, 3], [3, 2], [1, 2], microbatches=microbatches, held_until_B=3, held_until_W=2, **options)


def test_all_fused_is_the_fused_step() -> None:
    """The same passes, times, waits and bytes as `pipeline` with BW."""
    mixed = with_fused_backward(split(), np.ones((2, 2), bool), [4, 5])
    fused = pipeline([2, 3], BW=[4, 5], microbatches=2, held_until_B=3, held_until_W=2)
    assert list(mixed.passes) == list(fused.passes)
    assert mixed.taken.tolist() == fused.taken.tolist()
    assert mixed.freed.tolist() == fused.freed.tolist()

    def waits(problem):
        e = problem.edges
        return {(problem.names[a], problem.names[b], lag) for a, b, lag in zip(e.before, e.after, e.lag, strict=True)}

    assert waits(mixed) == waits(fused)


def test_none_fused_changes_nothing() -> None:
    assert with_fused_backward(split(), np.zeros((2, 2), bool), 9) == split()


@pytest.mark.parametrize("capacity", [None, [10, 5]])
@pytest.mark.parametrize("chosen", [[[1, 0], [0, 0]], [[0, 1], [0, 1]], [[1, 0], [0, 1]]])
def test_bounds_and_values_are_those_of_exhaustive_search(chosen, capacity) -> None:
    problem = with_fused_backward(split(capacity=capacity), np.array(chosen, bool), [4, 5])
    best = optimum(problem)
    schedule = solve(problem, effort=0.3)
    assert verify(problem, schedule) == ()
    assert schedule.certificate.value == best
    assert schedule.certificate.bound <= best
    assert all(bound.value <= best for bound in all_closed_forms(problem))


def test_times_may_differ_from_microbatch_to_microbatch() -> None:
    mixed = with_fused_backward(split(), np.array([[1, 1], [0, 1]], bool), np.array([[7, 8], [0, 9]]))
    assert {one.name: one.duration for one in mixed.passes if one.kind == "BW"} == {"0BW0": 7, "0BW1": 8, "1BW1": 9}


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(BadInput, match="shape"):
        with_fused_backward(split(), np.ones((2, 3), bool), 4)
    fused = pipeline([2, 3], BW=[4, 5], microbatches=2)
    with pytest.raises(BadInput, match="stage 1 of microbatch 0 has no B and W"):
        with_fused_backward(fused, np.array([[0, 0], [1, 0]], bool), 4)
