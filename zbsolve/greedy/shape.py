"""What a named schedule must know of a problem: its stages' ranks, its kinds, its microbatches."""

from __future__ import annotations

import numpy as np

from ..errors import BadInput
from ..problem import KINDS, Problem


def microbatches(problem: Problem) -> int:
    """How many microbatches the problem has."""
    return int(problem.passes.microbatch.max()) + 1


def shape(problem: Problem, name: str) -> tuple[tuple[int, ...], bool]:
    """Stage → rank, and whether the backward is split. Raises BadInput where the problem is no plain pipeline."""
    passes = problem.passes
    kinds = {KINDS[k]: int(count) for k, count in enumerate(np.bincount(passes.kind)) if count}
    home = np.zeros(int(passes.stage.max()) + 1, np.int64)
    home[passes.stage] = passes.rank
    stages = tuple(home[np.unique(passes.stage)].tolist())
    m = microbatches(problem)
    for needed in (("F", "B", "W"), ("F", "BW")):
        if kinds == {kind: len(stages) * m for kind in needed} and (passes.rank == home[passes.stage]).all():
            return stages, len(needed) == 3
    raise BadInput(f"{name}: needs a plain pipeline of F, B, W (or F, BW) passes, not {kinds}")


def routes_of(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Microbatch → stage → rank of its forward passes."""
    p = problem.passes
    rows = p.kind == KINDS.index("F")
    table = np.zeros((microbatches(problem), int(p.stage.max()) + 1), np.int64)
    table[p.microbatch[rows], p.stage[rows]] = p.rank[rows]
    return tuple(map(tuple, table.tolist()))
