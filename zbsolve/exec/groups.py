"""Which version of the weights a pass uses, and which update its gradients go to: read off a graph with passes U."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..problem import KINDS, Problem

GRADIENTS = ("B", "W", "BW")  # passes that add to gradients of parameters
ALL_TO_ALL = {"AF": ("F",), "AB": ("B", "BW")}  # what hands its output to each


@dataclass(frozen=True, slots=True)
class Use:
    """What a pass has to do with versions of its stage's weights. version: the one that it uses, or that an update makes;
    group: the update that its gradients go to (an update: itself); over: no pass after this one uses the version."""

    version: int
    group: int
    over: bool


def group_size(problem: Problem) -> int:
    """Microbatches whose mean gradient makes one update; without updates: all. Raises BadInput where groups differ."""
    p, groups = problem.passes, groups_of(problem)
    if not groups:
        return int((p.kind == KINDS.index("F")).sum()) // (int(p.stage.max()) + 1)
    stages = {stage for stage, _ in groups}
    by_stage = [{m: g for (s, m), g in groups.items() if s == stage} for stage in sorted(stages)]
    if len(stages) <= int(p.stage.max()) or any(one != by_stage[0] for one in by_stage):
        raise BadInput("updates: every stage must update after the same microbatches")
    sizes = set(np.bincount(list(by_stage[0].values())).tolist())
    if len(sizes) > 1:
        raise BadInput(f"updates: groups of {', '.join(map(str, sorted(sizes)))} microbatches: all must be of one size")
    return int(sizes.pop())


def versions(problem: Problem) -> dict[tuple[int, int], int]:
    """(stage, microbatch) → the version that it uses: what the last update makes that its forward waits for; those that
    wait for none, the model's own weights, are left out."""
    p, e = problem.passes, problem.edges
    update, forward = p.kind == KINDS.index("U"), p.kind == KINDS.index("F")
    found: dict[tuple[int, int], int] = {}
    rows = np.flatnonzero(update[e.before] & forward[e.after])
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        place = int(p.stage[b]), int(p.microbatch[b])
        found[place] = max(found.get(place, 0), int(p.microbatch[a]) + 1)
    return found


def uses(problem: Problem, walk: Iterable[str]) -> dict[str, Use]:
    """Pass → its use, for the passes of one rank in their order; empty without updates.

    A forward uses what the last update makes that it waits for, and the model's weights where it waits for none; what
    follows of its microbatch uses the same. Raises BadInput where a gradient goes to no update, or to several.
    """
    p, groups = problem.passes, groups_of(problem)
    if not groups:
        return {}
    version = versions(problem)
    found: dict[str, Use] = {}
    last: dict[tuple[int, int], str] = {}
    made = [0] * (int(p.stage.max()) + 1)
    for name in walk:
        one = p[problem.index[name]]
        place = one.stage, one.microbatch
        if one.kind == "U":
            if one.microbatch != made[one.stage]:
                raise BadInput(f"pass {name}: updates of stage {one.stage} must run in turn, from 0")
            made[one.stage] += 1
            found[name] = Use(made[one.stage], one.microbatch, False)
        elif one.kind in ALL_TO_ALL:
            continue
        else:
            if place not in groups:
                raise BadInput(f"pass {name}: its gradient goes to no update")
            found[name] = Use(version.get(place, 0), groups[place], False)
        last[one.stage, found[name].version] = name
    for name in last.values():
        found[name] = Use(found[name].version, found[name].group, True)
    return found


def groups_of(problem: Problem) -> dict[tuple[int, int], int]:
    """(stage, microbatch) → the update that waits for its weight gradients."""
    p, e = problem.passes, problem.edges
    gradient = np.isin(p.kind, [KINDS.index(kind) for kind in GRADIENTS])
    rows = np.flatnonzero(gradient[e.before] & (p.kind[e.after] == KINDS.index("U")))
    found: dict[tuple[int, int], int] = {}
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        place, update = (int(p.stage[a]), int(p.microbatch[a])), int(p.microbatch[b])
        if p.stage[a] != p.stage[b] or found.setdefault(place, update) != update:
            raise BadInput(f"pass {problem.names[a]}: its gradient goes to {problem.names[b]} and to another update")
    return found
