"""How torch.distributed.pipelining gathers sharded parameters: for a window of the next stages in a rank's order.

Before each action torch's runtime gathers the next `window` different stages of the rank's order, if they are not gathered
already, and frees all others (`_add_unshard_reshard` in torch.distributed.pipelining.schedules, three stages; pytorch issue
196706 asks for more than a fixed window). A stage's gradients are reduced directly after its last backward
(`_add_reduce_grad`). Both ignore memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..build.sharded import regathered
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.errors import BadInput

WINDOW = 3


def torch_window(schedule: Schedule, window: int = WINDOW) -> Schedule:
    """A schedule of a sharded problem as torch gathers: its compute order, and torch's gathers in place of its own.

    schedule: of a problem with sharded parameters.
    window: how many different stages are gathered at a time: the next ones in the rank's order.

    A gather is issued when the pass before which torch puts it could start, and runs on `comm:<rank>` beside computing. So
    do reductions, although torch makes the next pass wait for them. The returned problem has no capacity: torch checks none.

    Raises BadInput if the problem is not sharded, or has all-to-alls, which torch does not support.
    """
    problem = schedule.problem
    if "AG" not in problem.passes.kinds:
        raise BadInput("torch's window: the problem is not sharded")
    if {"AF", "AB"} & set(problem.passes.kinds):
        raise BadInput("torch's window: the problem has all-to-alls, of whose order torch says nothing")
    if window < 1:
        raise BadInput(f"torch's window: {window} stages: one at least is needed")
    orders = [schedule.sequences[f"compute:{rank}"] for rank in range(problem.ranks)]
    issued = [use for order in orders for use in _uses(problem, order, window)]
    other = regathered(replace(problem, capacity=None), [rows for _, rows in issued])
    names, index = problem.names, other.index
    gathers = len(other.passes) - len(issued) + np.arange(len(issued))
    sequences = {f"compute:{rank}": [index[names[i]] for i in order] for rank, order in enumerate(orders)}
    comm: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(problem.ranks)}
    syncs = []
    for (at, rows), gather in zip(issued, gathers.tolist(), strict=True):
        rank = int(problem.passes.rank[rows[0]])
        comm[rank].append((at, gather))
        if at:
            syncs.append((names[orders[rank][at - 1]], other.names[gather]))
    for row in other.rows("RS", "C").tolist():
        rank = int(other.passes.rank[row])
        comm[rank].append((_after_inputs(other, sequences[f"compute:{rank}"], row), row))
    sequences |= {f"comm:{rank}": [row for _, row in sorted(lane)] for rank, lane in comm.items() if lane}
    return Schedule.of(other, sequences, syncs)


def _uses(problem: Problem, order: Ints, window: int) -> list[tuple[int, Ints]]:
    """A rank's gathers in the order of issue: (index of the pass before which it is issued, passes that use it)."""
    stages = problem.passes.stage[order].tolist()
    active: dict[int, list[int]] = {}
    uses: list[tuple[int, list[int]]] = []
    for position, stage in enumerate(stages):
        following = list(dict.fromkeys(stages[position:]))[:window]
        active = {key: rows for key, rows in active.items() if key in following}
        for new in following:
            if new not in active:
                active[new] = []
                uses.append((position, active[new]))
        active[stage].append(int(order[position]))
    return [(position, np.array(rows, np.int64)) for position, rows in uses]


def _after_inputs(problem: Problem, order: list[int], row: int) -> float:
    """The position of `row` in the order: right behind the passes that it waits for; at the end if some are not in it."""
    place = {i: position for position, i in enumerate(order)}
    inputs = problem.edges.before[problem.edges.after == row].tolist()
    known = [place[i] for i in inputs if i in place]
    return max(known) + 0.5 if len(known) == len(inputs) else float(len(order))
