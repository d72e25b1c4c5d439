"""Asking the search over orders of some ranks: does no order fit a window?"""

from __future__ import annotations

from enum import Enum

import numpy as np

from ...problem import Ints
from ..bounds.memory_arcs import INFINITE
from . import order_search
from .lanes import Lanes
from .order_search import Induction, Limits, search_orders

NO_INCUMBENT = np.full(1, INFINITE)  # the incumbent's value, µs, shape (1,), where there is none that others improve
MAX_WINDOW = 1 << 28  # µs: the search keeps times in 32 bits


class Answer(Enum):
    """What a search over orders says of a window. FITS: one fits (within the relaxation), or the incumbent does. MERGED: too
    few states were kept with the same positions to tell. TOO_MANY: there were more partial orders in all than allowed."""

    REFUTED = order_search.REFUTED
    FITS = order_search.FITS
    MERGED = order_search.MERGED
    TOO_MANY = order_search.TOO_MANY


def refute(
    lanes: Lanes, window: int, breadth: int, states: int, steady: bool = False, incumbent: Ints = NO_INCUMBENT
) -> tuple[Answer, int]:
    """Whether no order of the lanes' passes fits `window` µs, and how many partial orders were tried.

    At most `breadth` states with the same positions are kept, and at most `states` partial orders are tried in all;
    steady: no more than twice as many at any time as that allows in the mean. incumbent: the value, µs, shape (1,), of the
    best schedule known, which another thread may lower meanwhile; where it falls into the window, the search ends.
    """
    if window >= MAX_WINDOW:
        return Answer.TOO_MANY, 0
    limits, alone = Limits(breadth, states, steady), Induction(lanes.tail, 0, 0)
    answer, tried, _ = search_orders(lanes, window, limits, alone, incumbent, window + 1)
    return Answer(answer), int(tried)
