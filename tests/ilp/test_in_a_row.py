"""Bounds of long steps from microbatches in a row: never above an optimum, above all single ranks, and proven again."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from zbsolve import Problem, pipeline
from zbsolve.ilp.bounds.bound import AREA, IN_A_ROW, Bound
from zbsolve.ilp.bounds.many import bound_of_many
from zbsolve.ilp.proof_check import recheck, recheck_of_many
from zbsolve.ilp.steady import windows
from zbsolve.ilp.steady.windows import higher_in_a_row, row_of
from zbsolve.search.many import solve_many
from zbsolve.util.clock import Clock

from ..support.exact import optimum


def tight(ranks: int, microbatches: int = 1) -> Problem:
    """F, B, W of 20, 20 and 18 µs, messages of 1 µs, half of 1F1B's memory."""
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": 3 * ranks}
    return pipeline([20] * ranks, [20] * ranks, [18] * ranks, microbatches=microbatches, comm=1, **held)


def highest(row: windows.Row, most: int) -> Fraction:
    """The highest of some times up to `most` µs that the model refutes; 0 if it refutes none."""
    times = [Fraction(time, 2) for time in range(2 * most + 1, 0, -1)]
    return next((time for time in times if windows._refuted(row, time, 2.0, Clock(9.0, 9.0))), Fraction(0))


def small(draw: random.Random, microbatches: int) -> list[Problem]:
    """One microbatch, and so many, of a random step of one stage a rank in which few microbatches fit."""
    ranks = draw.randint(1, 2)
    times = dict(zip("FBW", ([draw.randint(1, 5) for _ in range(ranks)] for _ in range(3)), strict=True))
    until_b, until_w = draw.randint(1, 3), draw.randint(0, 3)
    room = [draw.randint(until_b + until_w, 2 * until_b + 2 * until_w) for _ in range(ranks)]
    held = {"held_until_B": until_b, "held_until_W": until_w, "capacity": room, "comm": draw.randint(0, 3)}
    objective = draw.choice(("makespan", "span"))
    return [pipeline(**times, **held, objective=objective, microbatches=m) for m in (1, microbatches)]


def test_no_optimum_is_below_the_bound() -> None:
    """With few microbatches in the model, so that steps of a few more have a known optimum."""
    draw, asked, above = random.Random(2), 0, 0
    while above < 4:
        count = draw.randint(2, 4)
        one, whole = small(draw, count)
        row, least = row_of(one, draw.randrange(one.ranks)), optimum(whole)
        assert row is not None
        assert least is not None
        row = row._replace(n=draw.randint(1, min(2, count - 1)))
        time = highest(row, -(-least // count) + 6)
        value = windows._value(one, row, count, time)
        asked, above = asked + 1, above + (value > whole.work)
        assert value <= least, (whole.digest, row.rank, row.n, time)
    assert asked < 40


def test_waves_that_cross_cost_more_than_any_rank_alone_says() -> None:
    """No k-periodic schedule of these ranks takes less than 100 µs a microbatch (k up to 3)."""
    one = tight(4)
    known = bound_of_many(one, 8192)
    bound = higher_in_a_row(one, 8192, known, Clock(9.0, 2.0))
    assert (known.kind, bound.kind, bound.ranks) == (AREA, IN_A_ROW, (0,))
    assert 8192 * 97 < bound.value < 8192 * 100
    assert known.value < 8192 * 92.1
    assert recheck_of_many(one, 8192, bound, 60.0) == bound
    assert recheck_of_many(one, 8192, replace(bound, value=8192 * 101), 3.0) == known


def test_with_all_its_passes_it_is_proven_again_from_one_microbatch() -> None:
    one, whole = tight(4), tight(4, 100)
    known = bound_of_many(one, 100)
    bound = higher_in_a_row(one, 100, known, Clock(9.0, 0.5))
    assert bound.value > known.value
    assert recheck(whole, bound, 60.0) == bound
    uneven = replace(whole, passes=replace(whole.passes, duration=whole.passes.duration + (whole.passes.microbatch == 3)))
    assert recheck(uneven, bound, 5.0).value == 0


@pytest.mark.parametrize("ranks", [(), (-1,), (4,), (0, 1)])
def test_ranks_that_are_not_there_prove_nothing(ranks: tuple[int, ...]) -> None:
    """Bounds come from files."""
    known = bound_of_many(tight(4), 200)
    stated = Bound(known.value + 1, "", IN_A_ROW, ranks)
    assert recheck_of_many(tight(4), 200, stated, 1.0) == known


def test_solve_many_has_it() -> None:
    long = solve_many(tight(4), 2_000, effort=1.5)
    assert long.certificate is not None
    assert long.certificate.relaxation == IN_A_ROW
    assert long.certificate.gap < 0.08


def test_there_is_none_for_a_large_model_or_a_short_step() -> None:
    one = tight(4)
    known = bound_of_many(one, 60)
    assert higher_in_a_row(one, 60, known, Clock(9.0, 1.0)) == known
    assert row_of(tight(32), 0) is None
    assert row_of(pipeline([20] * 4, [20] * 4, [18] * 4, microbatches=1, held_until_W=2), 0) is None
    work = Bound(known.value, "", "work", (0,))
    assert higher_in_a_row(one, 8192, work, Clock(9.0, 1.0)) == work
