"""PipeDream and PipeDream-2BW: 1F1B that never flushes, with an update after each group of microbatches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..greedy.side_stream import with_side_streams, without_side_streams
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .one_direction import one_f_one_b, single
from .plain_step import WrongPlacement, plain_stages


def pipedream(problem: Problem) -> Schedule:
    """PipeDream and PipeDream-2BW: 1F1B in rounds (see `in_rounds`)."""
    return in_rounds(problem, one_f_one_b)


def in_flight(problem: Problem, most: int) -> Schedule:
    """1F1B with at most `most` microbatches in flight on a rank, p − r as ever on rank r; where the problem has updates,
    they come as PipeDream's do. Raises BadInput."""

    def flushed(plain: Problem) -> Schedule:
        return single(plain, "1f1b", lambda rank, ranks, m: min(most, ranks - rank), lambda rank: 0)

    plain = without_side_streams(problem)
    return with_side_streams(problem, in_rounds(plain, flushed) if problem.round else flushed(plain))


def in_rounds(problem: Problem, flushed: Callable[[Problem], Schedule]) -> Schedule:
    """PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503): one order, 1F1B over all microbatches and each
    update as soon as its gradients are there. Which of the two it is lies in the problem (see `build.with_updates`).
    flushed: 1F1B on the problem without updates."""
    plain, waits = _without_updates(problem)
    stages, _ = plain_stages(plain, "pipedream")
    if stages != tuple(range(problem.ranks)):
        raise WrongPlacement("pipedream: is defined for placement single only")
    order = {}
    for stream, names in flushed(plain).order.items():
        order[stream] = tuple(one for name in names for one in (name, *waits.get(name, ())))
    place = {name: i for names in order.values() for i, name in enumerate(names)}
    e, name_of = problem.edges, problem.names
    for a in np.flatnonzero(problem.passes.are("U")[e.before]).tolist():
        update, user = name_of[e.before[a]], name_of[e.after[a]]
        if place[user] < place[update]:
            raise BadInput(f"pipedream: pass {user} would wait for {update} for ever: the delay of updates is too short")
    return Schedule(problem, order)


def _without_updates(problem: Problem) -> tuple[Problem, dict[str, list[str]]]:
    """The problem without its updates, and for each pass the updates whose last gradient it makes."""
    p, e, names = problem.passes, problem.edges, problem.names
    update = p.are("U")
    if not update.any():
        raise BadInput("pipedream: needs a problem with updates U (zbsolve.updates)")
    waits: dict[str, list[str]] = {}
    for row in np.flatnonzero(update).tolist():
        gradients = e.before[(e.after == row) & ~update[e.before]]
        last = int(gradients[np.argmax(p.microbatch[gradients])])
        waits.setdefault(names[last], []).append(names[row])
    return problem.only(np.flatnonzero(~update)), waits
