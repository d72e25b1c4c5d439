"""What one microbatch alone needs, in any order: below that no schedule exists."""

from __future__ import annotations

from graphlib import TopologicalSorter

import numpy as np

from ..kinds import KINDS
from ..problem import Problem
from ..tables import Ints
from ..util.errors import Infeasible
from ..util.text import exact_bytes


def one_microbatch_needs(problem: Problem, microbatch: int = 0) -> Ints:
    """Bytes that each pool needs at least for the passes of this microbatch, shape (pools,): the ranks' devices, then
    `problem.pools`.

    While a pass runs, bytes lie there that it takes, or a pass before it, and that it frees, or a pass behind it: those
    of all edges around it in the graph, in whatever order passes run. `least_room` is its closed form for a plain step that
    is not built yet.
    """
    mine = np.flatnonzero(problem.in_microbatch & (problem.passes.microbatch == microbatch))
    one = problem.only(mine)
    before, after = one.edges.before, one.edges.after
    upstream = _upstream(len(mine), before.tolist(), after.tolist())
    around = upstream[:, before] & upstream.T[:, after]  # [pass, edge]
    needs = np.zeros(len(problem.room), np.int64)
    for pool in range(len(needs)):
        rows = one.edges_in(pool)
        needs[pool] = (around[:, rows] @ one.edges.bytes[rows]).max(initial=0)
    return needs


def checked_room(problem: Problem) -> Problem:
    """The problem, a step whose microbatches differ in size alone, where each of them fits. Raises Infeasible."""
    for microbatch in _largest(problem):
        need = one_microbatch_needs(problem, microbatch)
        for rank, room in enumerate(problem.capacity or ()):
            if need[rank] > room:
                what = f"needs {exact_bytes(need[rank])} for microbatch {microbatch} alone, but has {exact_bytes(room)}"
                raise Infeasible(f"capacity: rank {rank} {what}: no schedule exists")
    return problem


def _largest(problem: Problem) -> list[int]:
    """The microbatch that holds most, of those alike in passes and their ranks."""
    p, mine = problem.passes, problem.in_microbatch
    table = np.zeros((len(KINDS) * problem.stages, problem.microbatches), np.int64)
    np.add.at(table, (p.kind[mine] * problem.stages + p.stage[mine], p.microbatch[mine]), 1 + p.rank[mine])
    before = problem.edges.before
    held = np.bincount(p.microbatch[before], problem.edges.bytes * mine[before], problem.microbatches)
    order = np.argsort(-held, kind="stable")
    _, first = np.unique(table[:, order], axis=1, return_index=True)
    return sorted(order[first].tolist())


def _upstream(count: int, before: list[int], after: list[int]) -> np.ndarray:
    """[i, j]: whether pass j is i or comes before it in the graph, shape (count, count)."""
    waits: dict[int, list[int]] = {i: [] for i in range(count)}
    for a, b in zip(before, after, strict=True):
        waits[b].append(a)
    found = np.eye(count, dtype=bool)
    for i in TopologicalSorter(waits).static_order():
        found[i] |= found[waits[i]].any(axis=0)
    return found
