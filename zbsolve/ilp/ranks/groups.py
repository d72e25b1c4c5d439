"""Groups of ranks that a search keeps: which, in whose window; what a group becomes next, and the bound that it proves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Problem
from ..bounds.bound import GROUP_KINDS, OWN_WINDOWS, SEARCHED_RANKS, WINDOW_KINDS, Bound
from .lanes import Lanes, lanes_of, left_out

MAX_LEAN_RANKS, MAX_WHOLE_RANKS = 8, 4  # ranks of a group at most


class Group(NamedTuple):
    """Ranks that a search keeps, all others as lags.

    lean: only the first is kept whole (see `lanes.left_out`). whose: the rank whose span the window is, where that is not
    the first of them; −1: the first of them, or the makespan. own: the spans of all of them count, not that one alone.
    """

    ranks: tuple[int, ...]
    lean: bool = False
    whose: int = -1
    own: bool = False


def lanes_of_group(problem: Problem, group: Group) -> Lanes | None:
    """The lanes of the group's ranks in its window; None where there are none (see `lanes_of`)."""
    return lanes_of(problem, *group)


def group_of(problem: Problem, bound: Bound) -> Group:
    """The ranks that the bound keeps, in the window that it is about: the first of two ranks or more in a closed form of the
    span gives the window alone."""
    lean = bound.kind in (GROUP_KINDS[True], WINDOW_KINDS[True])
    if bound.kind == OWN_WINDOWS:
        return Group(bound.ranks, own=True)
    searched = bound.kind in SEARCHED_RANKS
    whole = len(bound.ranks) < 2 or (bound.kind in GROUP_KINDS if searched else problem.objective == "makespan")
    return Group(bound.ranks, lean) if whole else Group(bound.ranks[1:], lean, bound.ranks[0])


def group_bound(problem: Problem, group: Group, value: int) -> Bound:
    """The bound that no order of the group's passes fits `value` − 1 µs, with a proof that says what is left out."""
    ranks, lean, whose, own = group
    window = ", each in its window" if own else "" if whose < 0 else f" in the window of rank {whose}"
    of = "their" if len(ranks) > 1 else "its"
    proof = f"{_rank_names(ranks)}{window}: no order of {of} passes fits {value - 1} µs, whatever other ranks do"
    missing = len(left_out(problem, ranks)) if lean else 0
    if missing:
        proof += (
            f"; left out: {missing} passes of {_rank_names(ranks[1:])} in lanes that no compute waits for and that take no "
            "memory, and the bytes that these passes free"
        )
    beside = int(np.isin(problem.passes.rank[problem.side_stream], ranks).sum())
    if beside:
        proof += (
            f"; {beside} passes on side streams there are delays alone, and what they hold counts where it is always held"
        )
    if own:
        return Bound(value, proof, OWN_WINDOWS, ranks)
    return (
        Bound(value, proof, GROUP_KINDS[lean], ranks)
        if whose < 0
        else Bound(value, proof, WINDOW_KINDS[lean], (whose, *ranks))
    )


def _rank_names(ranks: tuple[int, ...]) -> str:
    """`rank 0` or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def grown(problem: Problem, root: Group, size: int) -> list[Group]:
    """Groups of `size` ranks: the first of the root's, filled up with others where those are too few, and one rank more.
    Neighbours of the last one come first, since queues between ranks matter most there."""
    others = [rank for rank in range(problem.ranks) if rank not in root.ranks]
    kept = (*root.ranks, *others)[: size - 1]
    near = sorted((rank for rank in range(problem.ranks) if rank not in kept), key=lambda rank: abs(rank - kept[-1]))
    return [root._replace(ranks=(*kept, other)) for other in near]


def in_own_windows(group: Group) -> Group:
    """Two ranks at most that a search for the span may begin with in their own windows: that of the group's window first."""
    ranks = group.ranks if group.whose < 0 else tuple(dict.fromkeys((group.whose, *group.ranks)))
    return Group(ranks[:2], own=True)


def all_ranks(problem: Problem, firsts: list[Group]) -> list[Group]:
    """All ranks, where there are not too many: each given group's first as the first, lean, in its window; then whole."""
    if problem.ranks > MAX_LEAN_RANKS:
        return []
    groups = [
        Group((first.ranks[0], *(rank for rank in range(problem.ranks) if rank != first.ranks[0])), True, first.whose)
        for first in firsts
    ]
    return [*dict.fromkeys(groups), groups[0]._replace(lean=False)]
