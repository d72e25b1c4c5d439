"""Which version of the weights a pass uses, and which update its gradients go to: read off a graph with passes U."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..problem import Problem
from ..tables import Bools
from ..util.errors import BadInput
from .program import VersionUse

Spot = tuple[int, int]  # (stage, microbatch)


def check_groups(problem: Problem) -> None:
    """Raise BadInput unless all stages update after the same microbatches, and every update takes equally many."""
    groups = groups_of(problem)
    by_stage = [{m: g for (s, m), g in groups.items() if s == stage} for stage in range(problem.stages)]
    if any(one != by_stage[0] for one in by_stage):
        raise BadInput("updates: every stage must update after the same microbatches")
    sizes = set(np.bincount(list(by_stage[0].values())).tolist())
    if len(sizes) != 1:
        raise BadInput(f"updates: groups of {', '.join(map(str, sorted(sizes)))} microbatches: all must be of one size")


def versions_of(problem: Problem) -> dict[Spot, int]:
    """(stage, microbatch) → the version that it uses: what the last update makes that its forward waits for. Microbatches
    that wait for none, and so use the model's own weights, are left out."""
    p, e = problem.passes, problem.edges
    found: dict[Spot, int] = {}
    rows = np.flatnonzero(p.are("U")[e.before] & p.are("F")[e.after])
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        spot = int(p.stage[b]), int(p.microbatch[b])
        found[spot] = max(found.get(spot, 0), int(p.microbatch[a]) + 1)
    return found


def groups_of(problem: Problem) -> dict[Spot, int]:
    """(stage, microbatch) → the update that waits for its gradients. Raises BadInput where several do, or one of another
    stage."""
    p, e = problem.passes, problem.edges
    update = p.are("U")
    rows = np.flatnonzero(~update[e.before] & update[e.after])
    found: dict[Spot, int] = {}
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        spot, number = (int(p.stage[a]), int(p.microbatch[a])), int(p.microbatch[b])
        if p.stage[a] != p.stage[b] or found.setdefault(spot, number) != number:
            raise BadInput(f"pass {problem.names[a]}: its gradient goes to {problem.names[b]} and to another update")
    return found


def uses_of(problem: Problem, order: Sequence[str], weighted: Bools) -> dict[str, VersionUse]:
    """Pass → what it has to do with versions, for the passes of one rank in their order; empty without updates. weighted:
    whether each pass of the problem uses weights, shape (passes,).

    All passes of a microbatch use the version of its forward (see `versions_of`). Raises BadInput where a gradient goes to
    no update, or updates are not in turn.
    """
    p, groups, version = problem.passes, groups_of(problem), versions_of(problem)
    if not groups:
        return {}
    update, found = p.are("U"), dict[str, VersionUse]()
    last: dict[tuple[int, int], str] = {}
    made = [0] * problem.stages
    for name in order:
        row = problem.index[name]
        stage, microbatch = spot = int(p.stage[row]), int(p.microbatch[row])
        if update[row]:
            if microbatch != made[stage]:
                raise BadInput(f"pass {name}: updates of stage {stage} must run in turn, from 0")
            made[stage] += 1
            found[name] = VersionUse(made[stage], microbatch, False)
        elif weighted[row]:
            if spot not in groups:
                raise BadInput(f"pass {name}: its gradient goes to no update")
            found[name] = VersionUse(version.get(spot, 0), groups[spot], False)
        else:
            continue
        last[stage, found[name].version] = name
    return found | {name: replace(found[name], over=True) for name in last.values()}
