"""Stated bounds, proven again from the problem alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..problem import Problem
from ..util.clock import Clock, TimeUp
from ..util.machine import half_of_cores
from .bounds.any_choice import bound_over_choices
from .bounds.bound import (
    ALL_ORDERS,
    BOTH_ENDS,
    BUSIEST,
    CHOICES,
    IN_A_ROW,
    SEARCHED_RANKS,
    STREAMS,
    WHOLE,
    WORK,
    Bound,
    least_before_rounding,
    rounded_up,
    value_unit,
    with_assumption,
)
from .bounds.closed_forms import closed_forms_within, each_closed_form
from .bounds.many import bound_of_many, repeated_microbatch
from .ranks.end_losses import Answer, proven_again
from .ranks.induction import WindowSearch, refute_by_induction
from .ranks.lanes import Lanes, group_bound, group_of, lanes_of

OF_RANKS = (STREAMS, BOTH_ENDS, IN_A_ROW, *SEARCHED_RANKS)  # relaxations of some ranks that need a search
SEARCHED = (WHOLE, *OF_RANKS)  # relaxations that need a search
STATES_PER_SECOND = 300_000  # partial orders that a search may try in a second of its limit
NOT_PROVEN = "not proven again"


def recheck(problem: Problem, bound: Bound, seconds: float, *, search: bool = True) -> Bound:
    """Prove a stated bound again from the problem alone, by the same relaxation of the same ranks; its `proof` is ignored.

    problem: the step. bound: the stated one. seconds: the time limit. search: False allows closed forms only. Returns a
    bound below the stated one if that could not be proven.
    """
    nameless = bound.kind in OF_RANKS and not bound.ranks
    if bound.value > problem.work and (nameless or (not search and bound.kind in SEARCHED)):
        return Bound(0, NOT_PROVEN, bound.kind, bound.ranks)
    unit = value_unit(problem, bound.kind)
    proven = _recheck(problem, replace(bound, value=least_before_rounding(bound.value, unit)), seconds)
    return with_assumption(proven if proven.value >= bound.value else rounded_up(proven, unit), problem)


def _recheck(problem: Problem, bound: Bound, seconds: float) -> Bound:
    """`recheck` without rounding and without the note on the order of lanes."""
    nothing, states = Bound(0, NOT_PROVEN, bound.kind, bound.ranks), int(STATES_PER_SECOND * seconds)
    if bound.value <= problem.work:
        return Bound(bound.value, BUSIEST, WORK)
    if bound.kind == CHOICES:
        return bound_over_choices(problem)
    if bound.kind == WHOLE:
        from .cp import refutes  # CP-SAT takes a second to load, and few bounds need it

        return Bound(bound.value, ALL_ORDERS, WHOLE) if refutes(problem, bound.value, Clock(seconds)) else nothing
    if bound.kind == STREAMS:
        from .cp import make_solver, ranks_refute, streams_bound

        proven = ranks_refute(problem, bound.ranks, bound.value, make_solver(seconds, half_of_cores()))
        return streams_bound(bound.ranks, bound.value) if proven else nothing
    if bound.kind == BOTH_ENDS:
        return proven_again(problem, bound.ranks[0], bound.value, states) or nothing
    if bound.kind in SEARCHED_RANKS:
        group = group_of(problem, bound)
        lanes = lanes_of(problem, *group)
        proven = lanes is not None and _refuted(lanes, bound.value, states)
        return group_bound(problem, group, bound.value) if proven else nothing
    if (first := repeated_microbatch(problem)) is not None:
        many = recheck_of_many(first, problem.microbatches, bound, seconds)
        if (many.kind, many.ranks) == (bound.kind, bound.ranks) and many.value >= bound.value:
            return many  # much faster for large steps
    if bound.kind == IN_A_ROW:
        return nothing
    clock, within = Clock(seconds), problem.objective == "span" and bound.ranks  # then in the window of the first rank
    with suppress(TimeUp):
        for form in closed_forms_within(problem, bound.ranks[0], clock) if within else each_closed_form(problem, clock):
            if (form.kind, form.ranks) == (bound.kind, bound.ranks):
                nothing = max(nothing, form, key=lambda best: best.value)
                if form.value >= bound.value:
                    break
    return nothing


def recheck_of_many(one: Problem, microbatches: int, bound: Bound, seconds: float) -> Bound:
    """Prove a stated bound of very many equal microbatches again. one: the step of one microbatch. Returns the best closed
    form where that is enough, or where the stated bound could not be proven."""
    known = bound_of_many(one, microbatches)
    if bound.kind != IN_A_ROW or known.value >= bound.value:
        return known
    from .steady.windows import proven_in_a_row  # it needs CP-SAT, which takes a second to load

    return proven_in_a_row(one, microbatches, bound, Clock(seconds)) or known


def _refuted(lanes: Lanes, value: int, states: int) -> bool:
    """Whether a search with so many partial orders refutes all values below `value` µs."""
    answer, tried = refute_by_induction(lanes, value, states // 2)
    if answer is not Answer.REFUTED:
        answer, _ = WindowSearch(lanes, value, 1).attempt(value - 1, states - tried)
    return answer is Answer.REFUTED
