"""A step in which ranks make attention for each other: its orders, from those of its passes without that, and what is
handed over in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..kinds import ATTENTION
from ..problem import Problem
from ..schedule import Schedule
from ..tables import Ints


def without_exchange(problem: Problem) -> Problem:
    """The step's passes without parts and helpers, and the edges between these: names for an order. The problem itself where
    it has no exchange."""
    parts = problem.passes.that(feature=ATTENTION)
    return problem.only(np.flatnonzero(~parts)) if parts.any() else problem


def with_parts(problem: Problem, schedule: Schedule) -> Schedule:
    """The order of `problem` from one of `without_exchange(problem)`: the parts of a pass right before it, and what a rank
    makes for others behind its own pass that the graph says, in the order of the table. The schedule itself where there is
    no exchange."""
    if schedule.problem is problem:
        return schedule
    index = problem.index
    before: dict[int, list[int]] = {}
    for kinds, last in ((("FQ", "FA"), ("F",)), (("BQ", "BA"), ("B", "BW"))):
        rows = problem.rows(*kinds)  # FQ and BQ come before FA and BA in the table
        for row, whole in zip(rows.tolist(), _like(problem, rows, problem.rows(*last)).tolist(), strict=True):
            before.setdefault(whole, []).append(row)
    first, behind = _helpers(problem)
    found = {}
    for stream, names in schedule.order.items():
        order = [index[name] for name in names]
        found[stream] = [
            one for row in order for one in (*first.get(row, ()), *before.get(row, ()), row, *behind.get(row, ()))
        ]
    return Schedule.of(problem, found)


class HandedOver(NamedTuple):
    """What a pass hands over: the rank that helps, and the share of the tokens before its slice whose keys go there."""

    rank: int
    share: float


def handed_over(problem: Problem) -> dict[tuple[int, int, bool], HandedOver]:
    """(stage, part, whether it is a backward) → what its pass hands over. Attention to one earlier slice takes twice what
    that to the own one takes, so durations say the share."""
    p, found = problem.passes, {}
    for kind, own in (("FH", "FA"), ("BH", "BA")):
        rows = problem.rows(kind)
        for row, beside in zip(rows.tolist(), _like(problem, rows, problem.rows(own)).tolist(), strict=True):
            away, stays, earlier = int(p.duration[row]), int(p.duration[beside]), int(p.slice[row])
            share = away * (2 * earlier + 1) / (2 * earlier * (away + stays)) if away + stays else 0.5
            at = int(p.stage[row]), int(problem.parts[row]), kind == "BH"
            found[at] = HandedOver(int(p.rank[row]), min(1.0, share))
    return found


def _helpers(problem: Problem) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Row of a rank's own pass → rows of the helpers before it, and of those behind it."""
    p, e = problem.passes, problem.edges
    helps, here = p.that(away=True), p.rank[e.before] == p.rank[e.after]
    first: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for helper, own, found in ((e.before, e.after, first), (e.after, e.before, behind)):
        rows = np.flatnonzero(here & helps[helper] & ~helps[own])
        for i in rows[np.argsort(helper[rows], kind="stable")].tolist():
            found.setdefault(int(own[i]), []).append(int(helper[i]))
    return first, behind


def _like(problem: Problem, rows: Ints, others: Ints) -> Ints:
    """Of each of `rows` the one of `others` that has its stage, microbatch and slice."""
    p = problem.passes
    key = p.stage * (int(problem.parts.max()) + 1) + problem.parts
    order = np.argsort(key[others], kind="stable")
    found: Ints = others[order][np.searchsorted(key[others][order], key[rows])]
    return found
