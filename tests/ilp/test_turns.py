"""Tests that searches over ranks share their partial orders by what they gain, and ask for less where that was too much."""

import numpy as np
import pytest

from zbsolve import pipeline
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.ranks.end_losses import (
    ALONE,
    FIRST_STATES,
    KINDS_OF_GROUPS,
    MAX_STATES,
    OWN,
    STATES_FACTOR,
    WHOLE,
    Answer,
    Share,
    next_kind,
)
from zbsolve.ilp.ranks.group_search import higher_bounds
from zbsolve.ilp.ranks.induction import WindowSearch
from zbsolve.ilp.ranks.lanes import lanes_of
from zbsolve.util.clock import Clock

from ..support.problems import uniform


def turns(gains, rounds, alone=True):
    """The kinds in their turns, where each try of a kind takes as many partial orders and gains as much as is given."""
    shares, taken = {kind: Share() for kind in KINDS_OF_GROUPS}, []
    for _ in range(rounds):
        kind = next_kind(shares, alone)
        taken.append(kind)
        shares[kind].count(gains.get(kind, 0), 10 * shares[kind].states)
    return taken, shares


def test_each_kind_has_one_turn_first_and_what_gains_has_its_next_before_the_others():
    taken, shares = turns({WHOLE: 100}, 15)
    assert taken[: len(KINDS_OF_GROUPS)] == list(KINDS_OF_GROUPS)
    second, third = (
        {kind: [i for i, one in enumerate(taken) if one == kind][n] for kind in KINDS_OF_GROUPS} for n in (1, 2)
    )
    assert min(second, key=second.get) == min(third, key=third.get) == WHOLE
    assert all(share.states > STATES_FACTOR * FIRST_STATES for share in shares.values())  # the others may gain with more


def test_kinds_that_gain_alike_have_turns_alike():
    taken, _ = turns(dict.fromkeys(KINDS_OF_GROUPS, 5), 15)
    assert all(taken.count(kind) == 3 for kind in KINDS_OF_GROUPS)


def test_single_ranks_have_one_turn_where_a_group_is_better_and_turns_end():
    taken, shares = turns({OWN: 1}, 21, alone=False)
    assert taken.count(ALONE) == 1
    assert next_kind(shares, alone=False) is None
    assert all(shares[kind].states > MAX_STATES for kind in KINDS_OF_GROUPS if kind != ALONE)


def test_a_window_of_too_many_orders_is_approached_with_as_many_and_tried_again_with_more():
    problem = uniform("loop", 4, 12, (3, 4, 2), 4, "span")
    low, lanes = closed_form(problem).value, lanes_of(problem, (0,))
    search = WindowSearch(lanes, low + 100, min_step=40)
    window = search.next_window(low, 1, 20)
    assert window == low + 40
    answer, _ = search.attempt(window, 20)
    assert answer is Answer.TOO_MANY
    assert search.next_window(low, 1, 20) == low + 20  # halfway, below the least step
    assert search.next_window(low, 40, 20) is None  # no more than this is left to gain with so few
    assert search.next_window(low, 40, 21) == low + 40


def test_the_look_at_all_ranks_comes_before_larger_groups():
    """Half of 1F1B's memory: all ranks, or all but the last, prove the value at once. Whole groups of three and four took
    four times as long."""
    memory = {"held_until_B": 6, "held_until_W": 4, "capacity": 30}
    problem = pipeline([20] * 6, [24] * 6, [16] * 6, comm=1, microbatches=15, **memory)
    *_, best = higher_bounds(problem, closed_form(problem), Clock(60.0, 0.25), 0.25, np.array([1654]))
    assert best.value == 1654
    assert len(best.ranks) >= 5


@pytest.mark.slow
def test_three_whole_ranks_of_four_are_searched_as_soon_as_two_have_no_more_to_give():
    """A V in half of 1F1B's memory. Two ranks prove 42552; other pairs, and three lean ranks, take time and give nothing."""
    memory = {"held_until_B": 6, "held_until_W": 4, "capacity": 40, "objective": "span"}
    problem = pipeline([500] * 8, [550] * 8, [300] * 8, comm=2, placement="vee", microbatches=12, **memory)
    searched = higher_bounds(problem, closed_form(problem), Clock(60.0, 6.0), 6.0, np.array([43102]))
    assert next(one.ranks for one in searched if one.value > 42552) == (0, 3, 2, 1)


@pytest.mark.slow
def test_a_value_that_falls_is_looked_at_in_the_next_turn():
    """Eight ranks in half of 1F1B's memory, for which a look at all ranks needs a large breadth. The value is known once
    two ranks have been searched; nothing else proves it in this time."""
    memory = {"held_until_B": 6, "held_until_W": 4, "capacity": 40}
    problem = pipeline([1000] * 8, [1200] * 8, [800] * 8, comm=5, microbatches=24, **memory)
    value, ranks = np.array([130_090]), ()
    for bound in higher_bounds(problem, closed_form(problem), Clock(60.0, 8.0), 8.0, value):
        ranks = bound.ranks
        if len(ranks) > 1:
            value[0] = 125_430
    assert bound.value == 125_430
    assert len(ranks) == 8
