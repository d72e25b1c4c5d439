"""Layers → stages: contiguous groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .errors import BadInput


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many layers each stage gets so that the costliest stage is as cheap as possible; among those, the sum of
    squares is least (so the rest is even too). Exact dynamic programme, O(stages · layers²). Raises BadInput where
    there are fewer layers than stages."""
    if len(costs) < stages:
        raise BadInput(f"partition: {len(costs)} layers do not make {stages} stages")
    total = list(accumulate(costs, initial=0.0))
    layers = len(costs)
    best: list[tuple[float, float, tuple[int, ...]]] = [(total[i], total[i] ** 2, (i,)) for i in range(layers + 1)]
    for stage in range(2, stages + 1):
        following = []
        for i in range(layers + 1):
            options = [
                (max(best[j][0], total[i] - total[j]), best[j][1] + (total[i] - total[j]) ** 2, (*best[j][2], i - j))
                for j in range(stage - 1, i)
            ]
            following.append(min(options) if options else (float("inf"), float("inf"), ()))
        best = following
    return best[layers][2]
