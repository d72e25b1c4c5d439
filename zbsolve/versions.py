"""Builder: optimizer updates inside the graph, and the versions of weights that passes hold meanwhile.

Synchronous training over several steps, PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503) differ in two
numbers only: how many microbatches make an update, and how many updates later its weights are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import BadInput
from .problem import KINDS, Edges, Ints, Passes, Problem

Numbers = Sequence[int] | int


def updates(problem: Problem, time: Numbers, *, every: int, delay: Numbers, parameter_bytes: Numbers = 0) -> Problem:
    """`problem` with an update U of every stage after each `every` microbatches, named `<stage>U<update>`.

    Update t waits for the weight gradients of its microbatches, t·every and on, and makes a version of the weights. Forwards
    of group t wait for update t − delay (a number, or one a stage): 1 is training step by step, 2 is 2BW, and p − s with
    every = 1 is PipeDream's weight stashing. A version takes `parameter_bytes` of its stage from its update's start to the
    end of the last backward that uses it (the first version: from the stage's first forward). time: µs of an update, a
    number or one a stage. Raises BadInput where a stage lives on several ranks, or numbers make no sense.
    """
    p = problem.passes
    stages, m = int(p.stage.max()) + 1, int(p.microbatch.max()) + 1
    if every < 1 or m % every:
        raise BadInput(f"updates: {m} microbatches do not make groups of {every}")
    if len({(s, r) for s, r in zip(p.stage.tolist(), p.rank.tolist(), strict=True)}) != stages:
        raise BadInput("updates: a stage lives on several ranks")
    home = np.zeros(stages, np.int64)
    home[p.stage] = p.rank
    times, behind, size = (
        _of_stages(v, stages, what) for v, what in ((time, "time"), (delay, "delay"), (parameter_bytes, "parameter_bytes"))
    )
    if behind.min() < 1:
        raise BadInput(f"updates: delay {behind.min()}: forwards wait for an update at least 1 group before")
    groups = m // every
    first = len(p)  # rows of the updates: stage by stage
    stage = np.repeat(np.arange(stages), groups)
    streams = [p.stream_sets.index((f"compute:{rank}",)) for rank in home.tolist()]
    rows = {
        "kind": np.full(stages * groups, KINDS.index("U")),
        "stage": stage,
        "microbatch": np.tile(np.arange(groups), stages),
        "slice": np.zeros(stages * groups, np.int64),
        "rank": home[stage],
        "duration": times[stage],
        "streams": np.array(streams)[stage],
    }
    columns = {what: np.concatenate([getattr(p, what), column]) for what, column in rows.items()}
    edges = [_waits(problem, s, first + s * groups, every, int(behind[s]), groups) for s in range(stages)]
    edges += [_held(problem, s, first + s * groups, every, int(behind[s]), groups, int(size[s])) for s in range(stages)]
    before = (problem.edges.before, problem.edges.after, problem.edges.lag, problem.edges.bytes)
    table = Edges(*(np.concatenate([column, *(part[i] for part in edges)]) for i, column in enumerate(before)))
    return Problem(
        Passes(**columns, stream_sets=p.stream_sets),
        table,
        problem.capacity,
        problem.objective,
        problem.layers,
        problem.source,
    )


def _of_stages(values: Numbers, stages: int, what: str) -> Ints:
    row = np.array(values if isinstance(values, Sequence) else [values] * stages)
    if len(row) != stages or row.dtype.kind not in "iu" or row.min() < 0:
        raise BadInput(f"updates: {what} must be a whole number from 0 up, or one a stage ({stages}); got {values}")
    return row.astype(np.int64)


def _lanes(problem: Problem, stage: int) -> tuple[Ints, Ints]:
    """Rows of a stage's forwards, and of what makes its weight gradients (W or BW), by microbatch."""
    p = problem.passes
    found = []
    for kinds in (("F",), ("W", "BW")):
        rows = np.flatnonzero((p.stage == stage) & np.isin(p.kind, [KINDS.index(k) for k in kinds]))
        found.append(rows[np.argsort(p.microbatch[rows])])
    return found[0], found[1]


def _waits(problem: Problem, stage: int, first: int, every: int, delay: int, groups: int) -> tuple[Ints, ...]:
    """Gradients before their update, updates one after the other, an update before the forwards that use its weights."""
    forward, gradient = _lanes(problem, stage)
    group = np.arange(len(forward)) // every
    late = np.flatnonzero(group >= delay)
    before = np.concatenate([gradient, first + np.arange(groups - 1), first + group[late] - delay])
    after = np.concatenate([first + group, first + np.arange(1, groups), forward[late]])
    none = np.zeros(len(before), np.int64)
    return before, after, none, none


def _held(problem: Problem, stage: int, first: int, every: int, delay: int, groups: int, size: int) -> tuple[Ints, ...]:
    """What each version takes: from the update that made it to the last backward that uses it. The last groups' updates
    make versions that nothing here uses any more."""
    forward, gradient = _lanes(problem, stage)
    if not size:
        return (np.zeros(0, np.int64),) * 4
    last = np.arange(delay - 1, groups)  # the last group that uses version 0, 1, …
    starts = np.concatenate([forward[:1], first + np.arange(max(0, groups - delay))])[: max(1, len(last))]
    ends = gradient[(np.minimum(last, groups - 1) + 1) * every - 1] if len(last) else gradient[-1:]
    none = np.zeros(len(starts), np.int64)
    return starts, ends, none, none + size
