"""Orders as rows of lanes: lanes run in order, so the k-th time that a lane stands there is its microbatch k."""

from __future__ import annotations

import numpy as np

from ..problem import Ints, Problem


def rank_lanes(one: Problem) -> list[Ints]:
    """The lanes of each rank: rows of its passes in the step of one microbatch."""
    rank = one.passes.rank
    rows = np.argsort(rank, kind="stable").astype(np.int64)
    return np.split(rows, np.cumsum(np.bincount(rank))[:-1])


def counted(lanes: Ints) -> Ints:
    """How often each lane of an order stood there before: the microbatch of each pass, shape (passes,)."""
    rows = np.argsort(lanes, kind="stable")
    number = lanes[rows]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    within = np.arange(len(rows)) - np.repeat(first, np.diff(np.append(first, len(rows))))
    tensor = np.empty(len(rows), np.int64)
    tensor[rows] = within
    return tensor


def places(lanes: Ints) -> Ints:
    """Where each lane stands in an order, shape (lanes, microbatches), lanes ascending; all stand there equally often."""
    return np.argsort(lanes, kind="stable").reshape(len(np.unique(lanes)), -1).astype(np.int64)
