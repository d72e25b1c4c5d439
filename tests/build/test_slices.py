"""Sequence slices (SlimPipe, Seq1F1B, TeraPipe): what waits for what, what is held, exact on small problems."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zbsolve import Infeasible, Problem, pipeline, solve, verify
from zbsolve.build import with_recompute, with_sharding, with_slices
from zbsolve.util.errors import BadInput

from ..support.exact_streams import optimum
from ..support.slice_problems import random_slices
from ..support.stream_checks import bounds_hold, cp_is_exact


def waits(problem: Problem, name: str) -> set[str]:
    edges, i = problem.edges, problem.index[name]
    return {problem.names[a] for a in edges.before[edges.after == i].tolist()}


def test_forwards_run_in_order_and_backwards_the_other_way_round() -> None:
    problem = pipeline([[3, 4], [5, 6]], [7, 8], [1, 1], microbatches=2, slices=2)
    assert (problem.stages, problem.microbatches, len(problem.passes)) == (2, 2, 2 * 2 * 2 * 3)
    assert waits(problem, "1F1.1") == {"0F1.1", "1F1"}
    assert waits(problem, "1F1") == {"0F1"}
    assert waits(problem, "0B1") == {"0F1", "1B1", "0B1.1"}
    assert waits(problem, "0B1.1") == {"0F1.1", "1B1.1"}
    assert waits(problem, "0W1") == {"0F1", "0B1"}
    times = {name: one.duration for name, one in zip(problem.names, problem.passes, strict=True)}
    assert [times[name] for name in ("0F1", "0F1.1", "1F0", "1F0.1", "1B0.1")] == [3, 4, 5, 6, 8]
    assert problem.alike
    assert len(problem.lanes) == 2 * 2 * 3  # microbatches of one slice are alike, slices are not


def test_keys_live_until_their_own_backward_and_their_gradients_from_the_first() -> None:
    problem = pipeline([1], BW=[1], microbatches=1, slices=3, held_until_B=10, held_keys=[[1, 2, 3]], held_gradients=100)
    schedule = solve(problem, effort=0.1)
    assert schedule.order["compute:0"] == ("0F0", "0F0.1", "0F0.2", "0BW0.2", "0BW0.1", "0BW0")
    assert schedule.timeline().peak_bytes == (3 * 10 + 1 + 2 + 3 + 2 * 100,)
    edges, names = problem.edges, problem.names
    ends = zip(edges.before.tolist(), edges.after.tolist(), edges.bytes.tolist(), strict=True)
    held = {(names[a], names[b]): size for a, b, size in ends if size}
    assert held[("0BW0.2", "0BW0")] == held[("0BW0.2", "0BW0.1")] == 100
    assert ("0BW0.2", "0BW0.2") not in held


@pytest.mark.parametrize(("ranks", "microbatches", "slices"), [(4, 4, 4), (8, 4, 8), (4, 2, 8)])
def test_even_slices_reach_slimpipes_bubble_in_its_memory(ranks: int, microbatches: int, slices: int) -> None:
    """arXiv 2504.14519: bubble (p − 1)/(mn + p − 1), and n + p − 1 slices on the first rank; one fewer has no such step."""
    step = {"microbatches": microbatches, "slices": slices, "held_until_B": 1}
    problem = pipeline([10] * ranks, BW=[20] * ranks, capacity=slices + ranks - 1, **step)
    schedule = solve(problem, effort=0.3)
    units = microbatches * slices
    assert schedule.certificate.value == schedule.certificate.bound == 30 * (units + ranks - 1)
    assert schedule.timeline().bubble_rate == pytest.approx((ranks - 1) / (units + ranks - 1))
    assert max(schedule.timeline().peak_bytes) == slices + ranks - 1
    one_less = pipeline([10] * ranks, BW=[20] * ranks, capacity=slices + ranks - 2, **step)
    assert solve(one_less, effort=0.3).certificate.bound > schedule.certificate.value


def test_a_microbatch_for_each_slice_is_the_same_step() -> None:
    row = [3, 5]
    whole = pipeline([row * 2] * 2, [4] * 2, [2] * 2, microbatches=4, held_until_W=6)
    direct = pipeline([row] * 2, [4] * 2, [2] * 2, microbatches=2, slices=2, held_until_W=6)
    assert with_slices(whole, 2) == direct == with_slices(whole, 2, held_keys=0)
    assert with_slices(with_recompute(whole, "all", held_input=1), 2) == pipeline(
        [row] * 2, [4] * 2, [2] * 2, microbatches=2, slices=2, held_until_W=6, recompute="all", held_input=1
    )


def few(seed: int) -> Problem | None:
    """A random problem that exhaustive search can solve, or None."""
    problem = random_slices(seed)
    return problem if len(problem.passes) <= 12 else None


def test_values_and_bounds_of_small_problems_are_exact() -> None:
    seen = set[str]()
    for problem in filter(None, map(few, (*range(40), 51))):
        best = optimum(problem)
        assert best is not None
        schedule = solve(problem, effort=0.1)
        assert not verify(problem, schedule)
        assert schedule.certificate.bound <= best <= schedule.certificate.value
        bounds_hold(problem)
        seen.update(problem.passes.kinds)
    assert {"B", "BW", "X", "O", "S"} <= seen


def test_cp_sat_finds_the_optimum_of_slices() -> None:
    for problem in filter(None, map(few, range(40, 50))):
        assert optimum(problem) is not None
        cp_is_exact(problem)


@pytest.mark.parametrize("slices", [0, -1, 2.5, True])
def test_no_such_number_of_slices(slices: object) -> None:
    with pytest.raises(BadInput, match="slices: at least 1 is needed"):
        pipeline([1], [1], microbatches=2, slices=slices)


def test_what_cannot_be_sliced_says_why() -> None:
    step = pipeline([1, 1], [1, 1], [1, 1], microbatches=4)
    with pytest.raises(BadInput, match="4 microbatches are no multiple of 3 slices"):
        with_slices(step, 3)
    with pytest.raises(BadInput, match="has slices already"):
        with_slices(with_slices(step, 2), 2)
    with pytest.raises(BadInput, match="sharding already"):
        with_slices(with_sharding(step, 1, 1), 2)
    with pytest.raises(BadInput, match="held_keys"):
        with_slices(step, 2, held_keys=-1)
    with pytest.raises(Infeasible, match="rank 0 needs 6 bytes for the slices of one microbatch, but has 5 bytes"):
        pipeline([1] * 2, [1] * 2, microbatches=2, slices=3, held_until_B=2, capacity=[5, 9])


def test_the_digest_of_steps_without_slices_stays() -> None:
    problem = pipeline([1, 2], [3, 4], [5, 6], microbatches=2)
    assert problem == pipeline([1, 2], [3, 4], [5, 6], microbatches=2, slices=1, held_keys=7)
    assert not np.any(problem.passes.slice)


def test_lengths_of_slices_stay_with_the_problem() -> None:
    step = pipeline([1, 1], BW=[2, 2], placement="single", microbatches=6)
    uneven, even = with_slices(step, 3, lengths=(4, 2, 1)), with_slices(step, 3)
    again = Problem.from_json(json.loads(json.dumps(uneven.to_json())))
    assert (again, again.slice_lengths) == (uneven, (4, 2, 1))
    assert uneven.digest != even.digest
    assert "slice_lengths" not in even.to_json()
    with pytest.raises(BadInput, match="slices: 2 lengths for 3 slices"):
        with_slices(step, 3, lengths=(4, 2))
    with pytest.raises(BadInput, match=r"problem: slice_lengths \[4.0, 0.0, 1.0\]: 3 numbers above 0"):
        with_slices(step, 3, lengths=(4, 0, 1))
