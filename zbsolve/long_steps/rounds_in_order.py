"""The round of an order: which part of it repeats, in order and in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import Ints, Problem
from ..tables import Bools
from .lanes import places, rank_lanes
from .repeated import Round


def find_round(one: Problem, order: Sequence[Ints], start: Ints, every: int) -> Round | None:
    """The longest row of rounds of `every` microbatches in an order, long enough for what `check` asks; None where there is
    none. start: its earliest starts, µs, shape (lanes, few)."""
    lanes, few = rank_lanes(one), start.shape[1]
    if few < 3 * every:
        return None
    step = start[:, every:] - start[:, :-every]
    period = int(np.median(step[:, (few - every) // 2]))
    runs = [_longest(_goes_on(order[rank], every, step[own] == period)) for rank, own in enumerate(lanes)]
    widths = [every * len(own) for own in lanes]
    each = [1 + (last - first) // width for (first, last), width in zip(runs, widths, strict=True)]
    copies = min(each)
    if copies < 3 or period < 1:
        return None
    flat = [start[own].ravel()[np.argsort(places(order[rank]).ravel())] for rank, own in enumerate(lanes)]
    times = np.array([row[first] for row, (first, _) in zip(flat, runs, strict=True)])
    later = np.clip((times.max() - times) // period, 0, np.array(each) - copies)  # rounds that begin about the same time
    begin = np.zeros(len(one.passes), np.int64)
    for rank, own in enumerate(lanes):
        first = runs[rank][0] + int(later[rank]) * widths[rank]
        begin[own] = (places(order[rank]) < first).sum(axis=1)
    found = Round(every, period, begin, copies)
    return found if enough_copies(one, found) else None


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
