"""Every partition of layers into stages, and what a rank of one has: for bounds that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, at least one each."""
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
