"""The round of an order: which part of it repeats, in order and in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import Ints, Problem
from ..tables import Bools
from .repeated import Round, places, rank_lanes


def find_round(one: Problem, order: Sequence[Ints], start: Ints, every: int) -> Round | None:
    """The longest row of rounds of `every` microbatches in an order, long enough for what `check` asks; None where there is
    none. start: its earliest starts, µs, shape (lanes, few)."""
    lanes, few = rank_lanes(one), start.shape[1]
    if few < 3 * every:
        return None
    middle = (few - every) // 2
    period = int(np.median(start[:, middle + every] - start[:, middle]))
    runs, each, widths = [], [], [every * len(own) for own in lanes]
    for rank, own in enumerate(lanes):
        first, last = _longest(_goes_on(order[rank], every, start[own, every:] - start[own, :-every] == period))
        copies = 1 + (last - first) // widths[rank]
        if copies < 3 or period < 1:
            return None
        runs.append(first)
        each.append(copies)
    times = np.array([_begin(own, first, start) for own, first in zip(order, runs, strict=True)])
    later = np.clip((times.max() - times) // period, 0, np.array(each) - min(each))  # rounds that begin about the same time
    begin = np.zeros(len(one.passes), np.int64)
    for rank, own in enumerate(order):
        begin += np.bincount(own[: runs[rank] + int(later[rank]) * widths[rank]], minlength=len(begin))
    found = Round(every, period, begin, min(each))
    return found if enough_copies(one, found) else None


def _begin(order: Ints, place: int, start: Ints) -> int:
    """When the pass at a place of a rank's order starts, µs."""
    lane = order[place]
    return int(start[lane, (order[:place] == lane).sum()])


def enough_copies(one: Problem, round: Round) -> bool:
    """Whether the copies reach as far as passes wait for each other: see `check`, condition 3."""
    e, least, most = one.edges, round.begin.copy(), round.begin.copy()
    np.minimum.at(least, e.after, round.begin[e.before])
    np.maximum.at(most, e.after, round.begin[e.before])
    return bool((round.copies - 2) * round.every >= (most - least).max())


def _goes_on(order: Ints, every: int, in_time: Bools) -> Bools:
    """Of each pass in a rank's order whether the one `every` microbatches later comes a period and a round later. in_time:
    whether it comes a period later, shape (lanes of the rank, few − every)."""
    where = places(order)
    same = in_time & (where[:, every:] - where[:, :-every] == every * len(where))
    found = np.zeros(len(order), bool)
    found[where[:, :-every][same]] = True
    return found


def _longest(row: Bools) -> tuple[int, int]:
    """Where the longest row of trues begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8))).reshape(-1, 2)
    if not len(edges):
        return 0, 0
    first, last = edges[int((edges[:, 1] - edges[:, 0]).argmax())].tolist()
    return first, last
