"""Lower bounds that hold for every schedule: cheap ones, in closed form.

Each looks at one rank alone and replaces all other ranks by longest-path lags along necessary arcs (`arcs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..greedy.arrays import arrays
from ..problem import Ints, Problem
from .arcs import arcs
from .area import area, least_lifespans
from .idle import Window, idle
from .relax import heads_and_tails
from .window import one_machine


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule whose lanes run in table order has a smaller value than `value` µs; `proof` says why.

    kind: the relaxation ("path", "work", "idle", "area", "one rank", …); ranks: which ranks it keeps. With both, the
    bound can be proven again from the problem alone (`recheck`).
    """

    value: int
    proof: str
    kind: str = ""
    ranks: tuple[int, ...] = ()


def closed_form(problem: Problem) -> Bound:
    """The best bound in closed form: the longest path, and for every rank one stream with heads and tails, idle time
    around memory, and memory over time."""
    best = Bound(0, "nothing", "path")
    if problem.objective == "makespan":
        a = arcs(problem)
        value = int((a.depth + problem.passes.duration + a.after).max())
        best = Bound(value, "longest path through the graph, lanes in order, memory's waits", "path")
    spans = _lifespans(problem)
    for rank in range(problem.ranks):
        for bound in _of_rank(problem, rank, spans):
            if bound.value > best.value:
                best = bound
    return best


def _of_rank(problem: Problem, rank: int, spans: Ints | None) -> Iterator[Bound]:
    """The closed forms of one rank. Ranks with several streams have no idle form."""
    window = _window(problem, rank)
    duration, room = problem.passes.duration[window.mine], int(arrays(problem).room[rank])
    used = {problem.passes.stream_sets[s] for s in set(problem.passes.streams[window.mine].tolist())}
    if len(used) == 1:
        work = int(duration.sum())
        value = int(one_machine(window.head, duration, window.tail))
        yield Bound(value, f"rank {rank}: its passes on one stream, with arrivals and departures", "work", (rank,))
        first, last = idle(problem, window, room)
        proof = f"rank {rank}: work {work} + idle {first} until memory is freed + idle {last} once all is taken"
        yield Bound(work + first + last, proof, "idle", (rank,))
    if spans is None or problem.capacity is None:
        return
    edges = problem.edges
    rows = np.flatnonzero((edges.bytes > 0) & (problem.passes.rank[edges.before] == rank))
    if len(rows) == 0 or int(edges.bytes[rows].sum()) <= room:
        return
    at = np.searchsorted(window.mine, np.stack([edges.before[rows], edges.after[rows]]))
    value = area(edges.bytes[rows], spans[rows], room, window.head[at[0]], window.tail[at[1]])
    yield Bound(value, f"rank {rank}: bytes times the time they are held, over {room} bytes", "area", (rank,))


def _lifespans(problem: Problem) -> Ints | None:
    """The least lifespan of each edge with bytes, µs, by row of the table of edges (0 where it has none)."""
    rows = np.flatnonzero(problem.edges.bytes > 0)
    if problem.capacity is None or len(rows) == 0:
        return None
    spans = np.zeros(len(problem.edges), np.int64)
    spans[rows] = least_lifespans(problem, arcs(problem), rows)
    return spans


def _window(problem: Problem, rank: int) -> Window:
    """The rank's passes with their heads and tails."""
    mine = np.flatnonzero(problem.passes.rank == rank)
    return Window(rank, mine, *heads_and_tails(problem, mine))


def improve(problem: Problem, best: Bound, value: int | None, seconds: float) -> Iterator[Bound]:
    """Higher bounds than `best` as they are found, cheap ones first, until `value` (the incumbent's) or time is reached."""
    first = closed_form(problem)
    if first.value > best.value:
        yield first


def recheck(problem: Problem, bound: Bound, seconds: float) -> Bound:
    """Prove a stated bound again from the problem alone: the bound of the same kind and ranks, at most as high as stated."""
    if bound.kind == "path" or not bound.ranks:
        return closed_form(problem)
    spans = _lifespans(problem) if bound.kind == "area" else None
    found = [b for rank in bound.ranks for b in _of_rank(problem, rank, spans) if b.kind == bound.kind]
    return max(found, key=lambda b: b.value, default=Bound(0, "nothing", bound.kind, bound.ranks))
