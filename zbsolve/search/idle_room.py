"""How much work of a user's own fits into a step for nothing, and that no order of the step does more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..build.work import MOST_PIECES, Work, with_work
from ..kinds import WORK
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .solver import solve


@dataclass(frozen=True, slots=True)
class Room:
    """Equal pieces of work beside a step that does not get longer by them.

    value: µs of the step, with the work and without.
    pieces: on each of the ranks, as many as `schedule` does.
    most: no order of the step does more of them without being longer, proven; `pieces` where nothing is left open. Where
        microbatches differ, no order that runs each stage's microbatches by number.
    share: of all ranks' time in the step, what the pieces take.
    bubble: of the same, what the step without work leaves idle.
    """

    value: int
    pieces: int
    most: int
    share: float
    bubble: float
    schedule: Schedule


def work_room(
    problem: Problem, piece: int, ranks: Sequence[int], *, seconds: float = 10.0, effort: float | None = None
) -> Room:
    """How many pieces of `piece` µs each of the `ranks` can do within a step, at any moment, at no cost.

    seconds, effort: of each of the searches, about ten: one of the step alone, then one a number of pieces (see `solve`).
    Raises BadInput, Infeasible, NotFound.
    """
    if not ranks:
        raise BadInput("work: on one rank at least")
    if problem.objective != "makespan":
        raise BadInput(f"work: objective '{problem.objective}': what fits for nothing is asked of a makespan")
    ranks = tuple(dict.fromkeys(ranks))
    with_work(problem, *(Work(rank, piece) for rank in ranks))  # what cannot be raises before the search
    search: dict[str, Any] = {"seconds": seconds, "effort": effort, "prefer": None}
    base = solve(problem, **search)
    value = round(base.timeline().value)
    busy = np.bincount(problem.passes.rank, np.where(problem.computing, problem.passes.duration, 0), problem.ranks)
    most = min(int(value - busy[rank]) // piece for rank in ranks)
    if most > MOST_PIECES:
        raise BadInput(f"work: {most} pieces of {piece} µs may fit, and {MOST_PIECES} are possible: take longer ones")
    pieces, above, schedule = 0, most, base
    gaps = _gaps(base, piece, ranks, value)
    least = min(map(sum, gaps.values()))
    while pieces < above:
        count = least if pieces < least <= above else above if above == most else (pieces + above + 1) // 2
        step = with_work(problem, *(Work(rank, count * piece, count) for rank in ranks))
        found = solve(step, **search, hint=_in_gaps(base, step, gaps) if count == least else None)
        assert found.certificate is not None
        if found.certificate.value <= value:
            pieces, schedule = count, found
            continue
        above = count - 1
        if found.certificate.bound > value:
            most = above
    whole = value * problem.ranks
    return Room(value, pieces, most, pieces * piece * len(ranks) / whole, float(1 - busy.sum() / whole), schedule)


def _gaps(base: Schedule, piece: int, ranks: Sequence[int], value: int) -> dict[int, list[int]]:
    """Rank → how many pieces fit before each of its passes, and behind its last one."""
    found, timeline = {}, base.timeline()
    for rank in ranks:
        times = [timeline[name] for name in base.order[f"compute:{rank}"]]
        free = zip([0, *(end for _, end in times)], [*(start for start, _ in times), value], strict=True)
        found[rank] = [int((start - end) // piece) for end, start in free]
    return found


def _in_gaps(base: Schedule, step: Problem, gaps: dict[int, list[int]]) -> Schedule:
    """The step with work in the order of the one without it, its pieces in the first gaps that have room for them."""
    order, works = dict(base.order), np.flatnonzero(step.passes.that(feature=WORK))
    for rank, counts in gaps.items():
        pieces = iter(step.names[i] for i in works[step.passes.rank[works] == rank])
        names = base.order[f"compute:{rank}"]
        filled = [(*islice(pieces, count), name) for count, name in zip(counts, names, strict=False)]
        order[f"compute:{rank}"] = (*(name for part in filled for name in part), *pieces)
    return Schedule(step, order, base.syncs)
