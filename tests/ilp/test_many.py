"""Bounds of very many microbatches, made from one: never above an optimum, and what closed forms say of uniform steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zbsolve import BadInput, Infeasible, pipeline
from zbsolve.ilp.bounds.bound import rounded_up, value_unit
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.bounds.many import bound_of_many

from ..support.exact import optimum


def random_step(draw: random.Random, most: int) -> dict[str, Any]:
    """A random step of few ranks, with times up to `most`, without its number of microbatches."""
    ranks, placement = draw.randint(1, 3), draw.choice(("single", "vee", "loop"))
    stages = ranks * (1 if placement == "single" else 2)
    until_b, until_w, from_b = (draw.randint(0, 3) for _ in range(3))
    times = [[draw.randint(1, most) for _ in range(stages)] for _ in range(3)]
    held = max(1, until_b + until_w + from_b) * (stages // ranks)
    given = {"F": times[0], "BW": times[1]} if draw.random() < 0.3 else dict(zip("FBW", times, strict=True))
    held_by = {"held_until_B": until_b, "held_until_W": until_w, "held_from_B": from_b}
    room = {"capacity": draw.choice((None, held * draw.randint(1, ranks + 1)))}
    return {**given, **held_by, **room, "placement": placement, "comm": draw.randint(0, 3)}


@pytest.mark.slow
def test_no_optimum_is_below_the_bound() -> None:
    draw, reached, asked = random.Random(11), 0, 0
    while asked < 60:
        given = random_step(draw, 5) | {"objective": draw.choice(("makespan", "span"))}
        count = draw.randint(1, 3 if given["placement"] == "single" else 2)
        try:
            one, whole = (pipeline(**given, microbatches=m) for m in (1, count))
        except Infeasible:
            continue
        least, bound = optimum(whole), bound_of_many(one, count)
        if least is not None:
            asked, reached = asked + 1, reached + (bound.value == least)
            assert bound.value <= least, (given, count, bound)
    assert reached > 15


def test_closed_forms_of_the_whole_step_are_as_high_or_higher() -> None:
    draw = random.Random(3)
    for count in (8, 12, 16, 24) * 12:
        given = random_step(draw, 30)
        try:
            one, whole = (pipeline(**given, microbatches=m) for m in (1, count))
        except Infeasible:
            continue
        assert bound_of_many(one, count).value <= rounded_up(closed_form(whole), value_unit(whole)).value


@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
@pytest.mark.parametrize("count", [24, 48])
def test_of_uniform_steps_with_room_they_say_the_same(placement: str, count: int) -> None:
    stages = 8 if placement == "single" else 16
    given: dict[str, Any] = {"F": [20] * stages, "B": [20] * stages, "W": [18] * stages, "placement": placement, "comm": 1}
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": 6 * stages}
    one, whole = (pipeline(**given, **held, microbatches=m) for m in (1, count))
    assert bound_of_many(one, count).value == rounded_up(closed_form(whole), value_unit(whole)).value


def test_an_edge_may_hold_a_byte_of_a_large_room() -> None:
    """As many of the small edge as fill the room would be 10¹² rows."""
    given: dict[str, Any] = {"F": [3, 4], "B": [4, 5], "W": [2, 1], "capacity": 1 << 40}
    for held_until_b in (1, 1 << 39):
        one, whole = (pipeline(**given, held_until_B=held_until_b, held_until_W=1, microbatches=m) for m in (1, 4))
        assert bound_of_many(one, 4).value <= closed_form(whole).value
        assert bound_of_many(one, 10**9).value >= 10 * 10**9


def test_other_steps_are_refused() -> None:
    for wrong in (
        pipeline([1], [1], [1], microbatches=2),
        pipeline([1], [1], [0], microbatches=1),
        pipeline([3, 2], [2, 4], [2, 1], microbatches=1, AF=2, AB=[1, 3]),
    ):
        with pytest.raises(BadInput, match="many microbatches"):
            bound_of_many(wrong, 10)
