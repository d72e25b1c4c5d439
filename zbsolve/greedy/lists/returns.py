"""Memory that comes back to a device from a further pool: how far ahead of its use.

Late returns leave room on the device; early ones leave room in the pool. What is away for longer than the pool has room for
has to come back sooner, or fewer microbatches are in flight.
"""

from __future__ import annotations

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import ProblemArrays

FULL_SHARE = 0.875  # of a device's room is for what came back early, at most


def most_ahead(problem: Problem, a: ProblemArrays, share: float = 1.0) -> Ints:
    """For each lane that brings memory back how many of its passes may be ahead of their use, if all such lanes of a device
    together have a share of its room; else all passes. Shape (lanes,)."""
    first, back = a.first_pass, brings_back(problem)[a.first_pass]
    cap = np.full(len(first), len(a.duration), np.int64)
    rank = a.rank[first]
    together = np.bincount(rank[back], a.taken[first[back]], len(a.capacity))[rank[back]]
    room = a.capacity[rank[back]]
    cap[back] = np.where(room == UNLIMITED, len(a.duration), share * room / together)
    return cap


def usual_ahead(problem: Problem, a: ProblemArrays) -> Ints:
    """The same: at most one where pools have room for what is in flight, else as many as fit well. Shape (lanes,).

    What is in flight of a lane: from the start of the pass that sends memory away to that of the first that uses it again,
    over the work of the rank for a microbatch.
    """
    e, first = problem.edges, a.first_pass
    away = np.flatnonzero((e.pool > 0) & (e.bytes > 0) & np.isin(e.after, first) & brings_back(problem)[e.after])
    if not len(away):
        return np.full(len(first), len(a.duration), np.int64)
    work = np.bincount(a.rank, np.where(problem.computing, a.duration, 0), len(a.capacity)) / max(1, problem.microbatches)
    lane, pool = a.lane[e.after[away]], problem.ranks + e.pool[away] - 1
    flight = (a.depth[first[a.partner[lane]]] - a.depth[e.before[away]]) / np.maximum(1, work[a.rank[first[lane]]])
    in_flight = np.bincount(pool, e.bytes[away] * np.maximum(1, flight), len(a.room))
    most = most_ahead(problem, a, FULL_SHARE)
    return most if (in_flight > a.room).any() else np.where(brings_back(problem)[first], np.minimum(most, 1), most)
